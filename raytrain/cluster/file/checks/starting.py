"""Does Ray start on each node so that nodes find each other, the head starts workers, and nobody else gets in?"""

from __future__ import annotations

from collections.abc import Iterator

from raytrain.cluster.file.checks.commands import START, flag_of, start_commands, variable_of
from raytrain.cluster.file.commands import PORT, TOKEN_FILE
from raytrain.cluster.file.document import Document, Mistake

WORLD = ("0.0.0.0/0", "::/0")
SSH_PORT = 22


def head_starts_workers(document: Document) -> Iterator[Mistake]:
    """The head runs `ray start --head` with the file, from which it knows what it may start."""
    command, place = start_commands(document, "head")
    if "ray start" not in command or "--head" not in command:
        rule, fix = "one command is ray start --head", "see what raytrain cluster render writes"
        yield document.mistake(place, command, rule, fix)
    elif "--autoscaling-config" not in command:
        rule, fix = (
            "without it the head starts no workers, and `ray up` succeeds all the same",
            "add it to ray start --head: ",
        )
        yield document.mistake(
            place, "no --autoscaling-config", rule, f"{fix}--autoscaling-config=~/ray_bootstrap_config.yaml"
        )


def workers_find_head(document: Document) -> Iterator[Mistake]:
    """Workers run `ray start` with the head's address and its port."""
    command, place = start_commands(document, "worker")
    head, _ = start_commands(document, "head")
    wanted = f"$RAY_HEAD_IP:{flag_of(head, '--port') or PORT}"
    address = flag_of(command, "--address")
    if "ray start" not in command:
        yield document.mistake(place, command, "one command is ray start", f"add: ray start --address={wanted}")
    elif address is None or address.replace("${RAY_HEAD_IP}", "$RAY_HEAD_IP") != wanted:
        rule, fix = "workers join the head, whose address is in $RAY_HEAD_IP", f"write --address={wanted}"
        yield document.mistake(place, f"--address={address}" if address else "no --address", rule, fix)


def can_start_again(document: Document) -> Iterator[Mistake]:
    """`ray up` on a cluster that runs, and a worker that comes back, start with `ray stop`."""
    for kind, key in START.items():
        command, place = start_commands(document, kind)
        before, start, _ = command.partition("ray start")
        if start and "ray stop" not in before and document.get(key) is not None:
            rule = "Ray does not start beside one that runs, so a second `ray up` would fail"
            yield document.mistake(place, "no ray stop before ray start", rule, "add a command before it: ray stop")


def token_needed(document: Document) -> Iterator[Mistake]:
    """Whoever reaches a port of Ray's can run any code, unless a token is needed. All nodes want it, and have it."""
    modes = {kind: variable_of(start_commands(document, kind)[0], "RAY_AUTH_MODE") for kind in START}
    for kind, mode in modes.items():
        if mode != "token":
            place = start_commands(document, kind)[1]
            rule = "needs a token: without one, whoever reaches a port of Ray's can run any code there"
            yield document.mistake(
                place,
                f"RAY_AUTH_MODE={mode}" if mode else "no RAY_AUTH_MODE",
                rule,
                "add before ray start: export RAY_AUTH_MODE=token;",
            )
    if "token" in modes.values() and not _token_is_mounted(document):
        rule = f"each node finds the token in {TOKEN_FILE}, or Ray does not start there"
        yield document.mistake(("file_mounts",), "no token", rule, f"add to file_mounts: {TOKEN_FILE}: {TOKEN_FILE}")


def _token_is_mounted(document: Document) -> bool:
    commands = " ".join(start_commands(document, kind)[0] for kind in START)
    if "RAY_AUTH_TOKEN" in commands:  # given in another way: as a value, or as another path
        return True
    ending = TOKEN_FILE.removeprefix("~")
    return any(str(target).endswith(ending) for target in document.mapping("file_mounts"))


def dashboard_private(document: Document) -> Iterator[Mistake]:
    """The dashboard starts jobs, so it listens on the head's localhost, or wants a token."""
    command, place = start_commands(document, "head")
    host, mode = flag_of(command, "--dashboard-host"), variable_of(command, "RAY_AUTH_MODE")
    if host not in (None, "127.0.0.1", "localhost") and mode != "token":
        rule = "the dashboard runs any code for whoever reaches it"
        yield document.mistake(place, f"--dashboard-host={host}", rule, "write 127.0.0.1, and use `ray dashboard FILE`")


def ports_private(document: Document) -> Iterator[Mistake]:
    """Security groups open nothing but ssh to the world."""
    place = ("provider", "security_group", "IpPermissions")
    for index, rule in enumerate(document.items(*place)):
        ranges = [each for kind in ("IpRanges", "Ipv6Ranges") for each in _ranges(rule, kind)]
        only_ssh = isinstance(rule, dict) and rule.get("FromPort") == SSH_PORT == rule.get("ToPort")
        if not only_ssh and any(each in WORLD for each in ranges):
            ports = f"ports {rule.get('FromPort', 'all')} to {rule.get('ToPort', 'all')} for the whole world"
            fix = "remove it and use `ray dashboard FILE`, or name your own network as CidrIp"
            yield document.mistake((*place, index), ports, "only ssh is open to everybody", fix)


def _ranges(rule: object, kind: str) -> list[str]:
    ranges = rule.get(kind) if isinstance(rule, dict) else None
    found = ranges if isinstance(ranges, list) else []
    return [str(each.get("CidrIp") or each.get("CidrIpv6")) for each in found if isinstance(each, dict)]


def all_local_workers_start(document: Document) -> Iterator[Mistake]:
    """With machines of one's own, Ray 2.60's newer autoscaler leaves one worker out, and starts none that came back."""
    command, place = start_commands(document, "head")
    if document.provider == "local" and variable_of(command, "RAY_enable_autoscaler_v2") != "0":
        rule = "Ray's autoscaler v2, which `ray up` asks for, starts one worker too few with type: local"
        yield document.mistake(place, "autoscaler v2", rule, "add before ray start: export RAY_enable_autoscaler_v2=0;")
