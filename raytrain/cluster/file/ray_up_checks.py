"""Is a file of `ray up` what an elastic run needs? A head that stays, enough workers that find it, and nobody else gets in.

Each check is a pure function from a document to the mistakes that it finds. `FORM` has what Ray refuses too, but without a
line; `MEANING` has what Ray accepts, and a person finds out later. What machines a cloud has is not known here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raytrain.cluster.file.commands import PORT, START, TOKEN_FILE, flag_of, start_commands, variable_of
from raytrain.cluster.file.document import Document, KeyPath, Mistake
from raytrain.cluster.file.ray_validation import did_you_mean

TYPES = "available_node_types"
WORLD = ("0.0.0.0/0", "::/0")
SSH_PORT = 22
EC2_KEYS = ["InstanceType", "ImageId", "KeyName", "BlockDeviceMappings", "InstanceMarketOptions", "IamInstanceProfile"]
"""Keys of a node_config on AWS that `render` writes or names."""


@dataclass(frozen=True)
class NodeType:
    """One of the file's `available_node_types`; `low` and `high` are its min_workers and max_workers."""

    name: str
    is_head: bool
    low: int
    high: int
    resources: dict[str, Any]

    def amount(self, resource: str) -> int | None:
        """The amount of a resource; None if unknown."""
        stated = self.resources.get(resource)
        return stated if isinstance(stated, int) else None


def _node_types(document: Document) -> list[NodeType]:
    return [] if document.provider == "local" else [_node_type(document, name) for name in document.mapping(TYPES)]


def _workers(document: Document) -> list[NodeType]:
    return [node for node in _node_types(document) if not node.is_head]


def _node_type(document: Document, name: str) -> NodeType:
    is_head = name == _head_name(document)
    most = document.number("max_workers", default=document.provider_defaults.get("max_workers", 0))
    low = document.number(TYPES, name, "min_workers")
    high = document.number(TYPES, name, "max_workers", default=0 if is_head else most)
    return NodeType(name, is_head, low, high, document.mapping(TYPES, name, "resources"))


def _head_name(document: Document) -> str | None:
    """The type of the head; the nearest one where the name is misspelt."""
    name, types = str(document.get("head_node_type")), list(document.mapping(TYPES))
    near = difflib.get_close_matches(name, types, n=1, cutoff=0.4)
    return name if name in types else (near[0] if near else None)


def _provider_known(document: Document) -> Iterator[Mistake]:
    known = [*document.facts.defaults, "external"]
    if document.provider and document.provider not in known:
        fix = did_you_mean(document.provider, known, f"write one of {', '.join(known)}", cutoff=0.6)
        yield document.mistake(("provider", "type"), document.provider, "is a provider of Ray's", fix)


def _local_hosts(document: Document) -> Iterator[Mistake]:
    if document.provider != "local" or document.get("provider", "coordinator_address"):
        return
    for key, example in (("head_ip", "10.0.0.1"), ("worker_ips", "[10.0.0.2, 10.0.0.3]")):
        if not document.get("provider", key):
            yield document.mistake(("provider", key), None, "is required with type: local", f"add {key}: {example}")
    for key in (TYPES, "head_node", "worker_nodes", "head_node_type"):
        if document.get(key):
            yield document.mistake((key,), "given", "type: local has no node types", f"remove {key}")
    head = document.get("provider", "head_ip")
    if head in document.items("provider", "worker_ips"):
        fix = "remove the head's address from worker_ips"
        yield document.mistake(("provider", "worker_ips"), head, "the head is not a worker", fix)


def _head_type_known(document: Document) -> Iterator[Mistake]:
    types, head = document.mapping(TYPES), document.get("head_node_type")
    if types and str(head) not in types and document.provider != "local":
        fix = did_you_mean(str(head), list(types), f"write one of {', '.join(types)}", cutoff=0.4)
        yield document.mistake(("head_node_type",), head, "is one of available_node_types", fix)


def _limits(document: Document) -> Iterator[Mistake]:
    types = _workers(document)
    for node in types:
        if node.low > node.high:
            rule, fix = f"is at most its max_workers, {node.high}", f"lower it, or raise max_workers to {node.low}"
            yield document.mistake((TYPES, node.name, "min_workers"), node.low, rule, fix)
    most = document.number("max_workers", default=document.provider_defaults.get("max_workers", 0))
    wanted = sum(node.low for node in types)
    if types and wanted > most:
        rule = f"is at least the sum of min_workers of all types, {wanted}"
        yield document.mistake(("max_workers",), most, rule, f"raise it to {wanted}, or lower min_workers")


def _head_stays(document: Document) -> Iterator[Mistake]:
    config: KeyPath = (TYPES, str(_head_name(document)), "node_config")
    scheduling = document.get(*config, "scheduling")
    parts = scheduling if isinstance(scheduling, list) else [scheduling]  # Ray's own example has a list
    options = {"preemptible": True, "provisioningModel": "SPOT"}.items()
    is_spot = {
        ("InstanceMarketOptions",): document.get(*config, "InstanceMarketOptions", "MarketType") == "spot",
        ("scheduling",): any(isinstance(part, dict) and part.get(key) == spot for part in parts for key, spot in options),
        ("azure_arm_parameters", "priority"): document.text(*config, "azure_arm_parameters", "priority").lower() == "spot",
    }
    for path in (path for path, is_set in is_spot.items() if is_set and document.provider != "local"):
        rule = "the head must not be a spot machine: when the cloud takes it, all runs end"
        yield document.mistake((*config, *path), "a spot machine", rule, "remove this: use on-demand for the head")


def _head_never_trains(document: Document) -> Iterator[Mistake]:
    command, command_path = start_commands(document, "head")
    head = next((node for node in _node_types(document) if node.is_head), None)
    for resource in ("CPU", "GPU"):
        value, path = flag_of(command, f"--num-{resource.lower()}s"), command_path
        fix = f"start Ray there with --num-{resource.lower()}s=0"
        if head is not None:
            fix = f"write {resource}: 0 in the head's resources"
            stated = head.resources.get(resource)
            value, path = (value, path) if stated is None else (stated, (TYPES, head.name, "resources", resource))
        if str(value) != "0" and (value is not None or resource == "CPU"):
            found = f"all of its {resource}s" if value is None else f"{value} {resource}s"
            yield document.mistake(path, found, "the head must not train: nothing may harm it", fix)


def _workers_used(document: Document) -> Iterator[Mistake]:
    workers = [node for node in _workers(document) if node.high > 0]
    if _node_types(document) and not workers:
        rule = "some type besides the head has a max_workers above 0"
        yield document.mistake((TYPES,), "no workers", rule, "add a type for workers, or raise its max_workers")
    if any((node.amount("GPU") or 0) > 0 for node in workers):
        for node in (node for node in workers if node.amount("GPU") == 0):
            rule = "a run uses one GPU per worker where there are any, so this type would be paid for and idle"
            yield document.mistake((TYPES, node.name), "0 GPUs", rule, "give it GPUs, or max_workers: 0")
    most, wanted = document.provider_defaults.get("max_workers"), sum(node.high for node in workers)
    if document.get("max_workers") is None and most is not None and wanted > most:
        rule = f"without it Ray starts at most {most} workers, whatever the types say"
        yield document.mistake(("max_workers",), None, rule, f"add max_workers: {wanted}")


def _enough_for_the_run(document: Document) -> Iterator[Mistake]:
    types = _workers(document)
    has_gpus = any((node.amount("GPU") or 0) > 0 for node in types)
    sizes = [node.amount("GPU" if has_gpus else "CPU") for node in types]
    if document.facts.workers is None or not types or None in sizes:
        return
    (low, high), most = document.facts.workers, document.number("max_workers", default=sum(node.high for node in types))
    room, ready = 0, 0
    for size, node in sorted(zip(sizes, types, strict=True), key=lambda pair: -(pair[0] or 0)):  # the largest first
        number = min(node.high, most)
        room, ready, most = room + number * (size or 0), ready + node.low * (size or 0), most - number
    if room < high:
        fix = f"raise max_workers, here and of the types, or run with --run.workers {min(low, room)}:{room}"
        yield document.mistake(("max_workers",), f"room for {room} workers", growth_rule(low, high), fix)
    if ready > high:
        rule = f"a run with --run.workers {low}:{high} uses at most {high}: the others are paid for and idle"
        yield document.mistake((TYPES,), f"{ready} workers always there", rule, "lower min_workers")


def _enough_local_machines(document: Document) -> Iterator[Mistake]:
    command, _ = start_commands(document, "worker")
    each = flag_of(command, "--num-gpus") or flag_of(command, "--num-cpus") or ""
    if document.provider != "local" or document.facts.workers is None or not each.isdigit():
        return
    (low, high), room = document.facts.workers, len(document.items("provider", "worker_ips")) * int(each)
    if room < high:
        fix = f"add machines, or run with --run.workers {min(low, room)}:{room}"
        yield document.mistake(("provider", "worker_ips"), f"room for {room} workers", growth_rule(low, high), fix)


def growth_rule(low: int, high: int) -> str:
    """The rule that the largest number of workers fits."""
    return f"a run with --run.workers {low}:{high} can grow to {high} workers"


def _head_command(document: Document) -> Iterator[Mistake]:
    command, path = start_commands(document, "head")
    if "ray start" not in command or "--head" not in command:
        yield document.mistake(path, command, "one command is ray start --head", "see what raytrain cluster render writes")
    elif "--autoscaling-config" not in command:
        rule = "without it the head starts no workers, and `ray up` succeeds all the same"
        fix = "add it to ray start --head: --autoscaling-config=~/ray_bootstrap_config.yaml"
        yield document.mistake(path, "no --autoscaling-config", rule, fix)
    if document.provider == "local" and variable_of(command, "RAY_enable_autoscaler_v2") != "0":
        rule = "Ray's autoscaler v2, which `ray up` asks for, starts one worker too few with type: local"
        yield document.mistake(path, "autoscaler v2", rule, "add before ray start: export RAY_enable_autoscaler_v2=0;")
    host, mode = flag_of(command, "--dashboard-host"), variable_of(command, "RAY_AUTH_MODE")
    if host not in (None, "127.0.0.1", "localhost") and mode != "token":
        rule = "the dashboard runs any code for whoever reaches it"
        yield document.mistake(path, f"--dashboard-host={host}", rule, "write 127.0.0.1, and use `ray dashboard FILE`")


def _workers_find_head(document: Document) -> Iterator[Mistake]:
    command, path = start_commands(document, "worker")
    wanted = f"$RAY_HEAD_IP:{flag_of(start_commands(document, 'head')[0], '--port') or PORT}"
    address = flag_of(command, "--address")
    if "ray start" not in command:
        yield document.mistake(path, command, "one command is ray start", f"add: ray start --address={wanted}")
    elif address is None or address.replace("${RAY_HEAD_IP}", "$RAY_HEAD_IP") != wanted:
        rule = "workers join the head, whose address is in $RAY_HEAD_IP"
        yield document.mistake(
            path, f"--address={address}" if address else "no --address", rule, f"write --address={wanted}"
        )


def _can_start_again(document: Document) -> Iterator[Mistake]:
    for kind, key in START.items():
        command, path = start_commands(document, kind)
        before, start, _ = command.partition("ray start")
        if start and "ray stop" not in before and document.get(key) is not None:
            rule = "Ray does not start beside one that runs, so a second `ray up` would fail"
            yield document.mistake(path, "no ray stop before ray start", rule, "add a command before it: ray stop")


def _token_required(document: Document) -> Iterator[Mistake]:
    commands = {kind: start_commands(document, kind) for kind in START}
    modes = {kind: variable_of(command, "RAY_AUTH_MODE") for kind, (command, _) in commands.items()}
    for kind, mode in modes.items():
        if mode != "token":
            rule = "needs a token: without one, whoever reaches a port of Ray's can run any code there"
            value, fix = f"RAY_AUTH_MODE={mode}" if mode else "no RAY_AUTH_MODE", "export RAY_AUTH_MODE=token;"
            yield document.mistake(commands[kind][1], value, rule, f"add before ray start: {fix}")
    is_given = any("RAY_AUTH_TOKEN" in command for command, _ in commands.values())  # as a value, or as another path
    is_mounted = any(target.endswith(TOKEN_FILE.removeprefix("~")) for target in document.mapping("file_mounts"))
    if "token" in modes.values() and not is_given and not is_mounted:
        rule = f"each node finds the token in {TOKEN_FILE}, or Ray does not start there"
        yield document.mistake(("file_mounts",), "no token", rule, f"add to file_mounts: {TOKEN_FILE}: {TOKEN_FILE}")


def _ports_private(document: Document) -> Iterator[Mistake]:
    path: KeyPath = ("provider", "security_group", "IpPermissions")
    for index, rule in enumerate(document.items(*path)):
        if not isinstance(rule, dict) or rule.get("FromPort") == SSH_PORT == rule.get("ToPort"):
            continue
        ranges = [each for kind in ("IpRanges", "Ipv6Ranges") for each in document.items(*path, index, kind)]
        if any(each.get(key) in WORLD for each in ranges if isinstance(each, dict) for key in ("CidrIp", "CidrIpv6")):
            ports = f"ports {rule.get('FromPort', 'all')} to {rule.get('ToPort', 'all')} for the whole world"
            fix = "remove it and use `ray dashboard FILE`, or name your own network as CidrIp"
            yield document.mistake((*path, index), ports, "only ssh is open to everybody", fix)


def _files_exist(document: Document) -> Iterator[Mistake]:
    for name, kind in (("ssh_private_key", "private"), ("ssh_public_key", "public")):
        path = document.text("auth", name)
        if path and not document.facts.exists(path):
            fix = f"give the path of your {kind} key, or make a pair with ssh-keygen"
            yield document.mistake(("auth", name), path, "is a file on this machine", fix)
    for target, source in document.mapping("file_mounts").items():
        if isinstance(source, str) and not document.facts.exists(source):
            is_token, fix = source == TOKEN_FILE, "run this where the path is right, or correct it"
            fix = "run: ray get-auth-token --generate" if is_token else fix
            yield document.mistake(("file_mounts", target), source, "is a file or directory on this machine", fix)


def _aws(document: Document) -> Iterator[Mistake]:
    for name in document.mapping(TYPES) if document.provider == "aws" else ():
        path: KeyPath = (TYPES, name, "node_config")
        config = document.mapping(*path)
        for key in config.keys() - EC2_KEYS:
            fix = did_you_mean(key, EC2_KEYS, "", cutoff=0.9)
            if fix:
                yield document.mistake((*path, key), "no such key", "is a parameter of EC2's RunInstances", fix)
        if not config.get("ImageId") and not config.get("LaunchTemplate"):
            rule = "without it Ray takes an image with Ubuntu 18.04 (glibc 2.27), where torch 2.6 and newer do not install"
            fix = "name one with NVIDIA's driver, as raytrain cluster render --provider aws does"
            yield document.mistake((*path, "ImageId"), None, rule, fix)
        if document.get("auth", "ssh_private_key") and not config.get("KeyName"):
            fix = "add KeyName: the key pair's name at EC2, or remove ssh_private_key: Ray makes a pair"
            yield document.mistake((*path, "KeyName"), None, "is required with auth.ssh_private_key", fix)


def _gcp_and_azure(document: Document) -> Iterator[Mistake]:
    if document.provider == "gcp" and not document.get("provider", "project_id"):
        fix = "add the id that `gcloud projects list` shows"
        yield document.mistake(("provider", "project_id"), None, "is required with type: gcp", fix)
    missing = [name for name in ("ssh_private_key", "ssh_public_key") if not document.get("auth", name)]
    if document.provider == "azure" and len(missing) == 1:
        rule, fix = "on Azure both keys are given, or none", f"add {missing[0]}, or remove the other: Ray makes both"
        yield document.mistake(("auth", missing[0]), None, rule, fix)


FORM = (_provider_known, _local_hosts, _head_type_known, _limits)
"""What Ray refuses."""

MEANING = (
    *(_head_stays, _head_never_trains, _workers_used, _enough_for_the_run, _enough_local_machines, _head_command),
    *(_workers_find_head, _can_start_again, _token_required, _ports_private, _files_exist, _aws, _gcp_and_azure),
)
"""What Ray accepts, and a person finds out later."""
