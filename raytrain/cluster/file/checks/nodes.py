"""Do the machines do what an elastic run needs? A head that stays and never trains, workers that can, and enough of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raytrain.cluster.file.checks.commands import flag_of, start_commands
from raytrain.cluster.file.document import Document, Mistake
from raytrain.cluster.file.machines import BY_PROVIDER

RESOURCES = ("CPU", "GPU")


@dataclass(frozen=True)
class NodeType:
    """One of the file's `available_node_types`.

    Args:
        low, high: its min_workers and max_workers.
        has: what the file says that its machines have, by resource.
        real: what machines of this type have, as far as is known.
        machine: name of the machine type at the provider.
    """

    name: str
    is_head: bool
    is_spot: bool
    low: int
    high: int
    has: dict[str, Any]
    real: dict[str, int]
    machine: str

    def amount(self, resource: str) -> int | None:
        """How much of it Ray will count on; None if that is not known."""
        stated = self.has.get(resource, self.real.get(resource))
        return stated if isinstance(stated, int) else None


def node_types(document: Document) -> list[NodeType]:
    """All of the file's, in its order; machines of one's own have none."""
    if document.provider == "local":
        return []
    return [_node_type(document, str(name)) for name in document.mapping("available_node_types")]


def head_type(document: Document) -> str | None:
    """Which type is meant for the head; the nearest one, where its name is misspelt."""
    name, types = str(document.get("head_node_type")), [str(name) for name in document.mapping("available_node_types")]
    near = difflib.get_close_matches(name, types, n=1, cutoff=0.4)
    return name if name in types else (near[0] if near else None)


def _node_type(document: Document, name: str) -> NodeType:
    place = ("available_node_types", name)
    config = document.mapping(*place, "node_config")
    machine = _machine(config)
    real = BY_PROVIDER.get(document.provider, {}).get(machine)
    is_head = name == head_type(document)
    most = document.number("max_workers", default=document.facts.defaults.get(document.provider, {}).get("max_workers", 0))
    return NodeType(
        *(name, is_head, _is_spot(config)),
        low=document.number(*place, "min_workers"),
        high=document.number(*place, "max_workers", default=0 if is_head else most),
        has=document.mapping(*place, "resources"),
        real=dict(zip(RESOURCES, real, strict=True)) if real else {},
        machine=machine,
    )


def _machine(config: dict[str, Any]) -> str:
    arm = config.get("azure_arm_parameters")
    inner = arm if isinstance(arm, dict) else {}
    return str(config.get("InstanceType") or config.get("machineType") or inner.get("vmSize") or "").rpartition("/")[2]


def _is_spot(config: dict[str, Any]) -> bool:
    arm, market, scheduling = (config.get(key) for key in ("azure_arm_parameters", "InstanceMarketOptions", "scheduling"))
    parts = scheduling if isinstance(scheduling, list) else [scheduling]  # Ray's own example writes a list
    return (
        (isinstance(market, dict) and market.get("MarketType") == "spot")
        or (isinstance(arm, dict) and str(arm.get("priority")).lower() == "spot")
        or any(isinstance(p, dict) and (p.get("preemptible") is True or p.get("provisioningModel") == "SPOT") for p in parts)
    )


def head_stays(document: Document) -> Iterator[Mistake]:
    """The head is not a machine that is taken away: the cluster would go with it."""
    for node in node_types(document):
        if node.is_head and node.is_spot:
            place, rule = (
                ("available_node_types", node.name, "node_config"),
                "the head is never taken away: all runs go with it",
            )
            yield document.mistake(
                _spot_place(document, place), "a spot machine", rule, "remove this: use on-demand for the head"
            )


def _spot_place(document: Document, place: tuple[str, ...]) -> tuple[str, ...]:
    for keys in (("InstanceMarketOptions",), ("scheduling",), ("azure_arm_parameters", "priority")):
        if document.get(*place, *keys) is not None:
            return (*place, *keys)
    return place


def head_never_trains(document: Document) -> Iterator[Mistake]:
    """Ray places nothing on the head: a worker there would take its time, and could take it down."""
    start, place = start_commands(document, "head")
    flags = {resource: flag_of(start, f"--num-{resource.lower()}s") for resource in RESOURCES}
    head = next((node for node in node_types(document) if node.is_head), None)
    for resource, flag in flags.items():
        stated = head.has.get(resource) if head else None
        here = place if stated is None or head is None else ("available_node_types", head.name, "resources", resource)
        value = flag if stated is None else stated
        has_some = resource == "CPU" or (head is not None and bool(head.real.get("GPU")))
        if str(value) != "0" and (value is not None or has_some):
            fix = (
                f"write {resource}: 0 in the head's resources"
                if head
                else f"start Ray there with --num-{resource.lower()}s=0"
            )
            found = f"{value} {resource}s" if value is not None else f"all of its {resource}s"
            yield document.mistake(here, found, "the head never trains, so that nothing can harm it", fix)


def workers_exist(document: Document) -> Iterator[Mistake]:
    """Some type of worker may be started at all."""
    types = [node for node in node_types(document) if not node.is_head]
    if node_types(document) and not any(node.high > 0 for node in types):
        rule, fix = (
            "some type besides the head has a max_workers above 0",
            "add a type for workers, or raise its max_workers",
        )
        yield document.mistake(("available_node_types",), "no workers", rule, fix)


def resources_true(document: Document) -> Iterator[Mistake]:
    """A worker has what the file says: the autoscaler would start machines for ever for what none of them has."""
    for node in node_types(document):
        for resource, real in node.real.items():
            stated = node.has.get(resource)
            if not node.is_head and isinstance(stated, int) and stated != real:
                place = ("available_node_types", node.name, "resources", resource)
                rule = f"{node.machine} has {real} {resource}s; Ray counts on what stands here"
                yield document.mistake(place, stated, rule, f"write {real}, or choose another machine type")


def gpus_everywhere(document: Document) -> Iterator[Mistake]:
    """Where some workers have GPUs, a run takes one GPU per worker, and machines without one stay idle."""
    workers = [node for node in node_types(document) if not node.is_head and node.high > 0]
    if any((node.amount("GPU") or 0) > 0 for node in workers):
        for node in (node for node in workers if node.amount("GPU") == 0):
            rule = "workers are placed on GPUs where there are any, so this type would be paid for and stay idle"
            fix = "give it GPUs, or max_workers: 0"
            yield document.mistake(("available_node_types", node.name), "0 GPUs", rule, fix)


def default_limit(document: Document) -> Iterator[Mistake]:
    """The file says how many workers there may be: Ray's own limit is 2, whatever the types say."""
    most = document.facts.defaults.get(document.provider, {}).get("max_workers")
    wanted = sum(node.high for node in node_types(document) if not node.is_head)
    if document.get("max_workers") is None and most is not None and wanted > most:
        rule = f"without it Ray starts at most {most} workers, whatever the types say"
        yield document.mistake(("max_workers",), None, rule, f"add max_workers: {wanted}")


def enough_for_the_run(document: Document) -> Iterator[Mistake]:
    """The run's workers fit: its largest number on all machines, and its largest is not below what is always there."""
    if document.facts.workers is None:
        return
    (low, high), types = document.facts.workers, [node for node in node_types(document) if not node.is_head]
    each = {node.name: _slots(node, types) for node in types}
    if any(slots is None for slots in each.values()) or not types:
        return
    ready = sum(node.low * (each[node.name] or 0) for node in types)
    room = _room(types, each, document.number("max_workers", default=sum(node.high for node in types)))
    if room < high:
        rule = f"a run with --run.workers {low}:{high} can grow to {high} workers"
        yield document.mistake(("max_workers",), f"room for {room} workers", rule, _more(room, low, high))
    if ready > high:
        rule = f"a run with --run.workers {low}:{high} uses at most {high}: the others are paid for and idle"
        yield document.mistake(("available_node_types",), f"{ready} workers always there", rule, "lower min_workers")


def enough_local_machines(document: Document) -> Iterator[Mistake]:
    """The same for machines of one's own, where the command that starts a worker says what one has."""
    hosts, (command, _) = document.items("provider", "worker_ips"), start_commands(document, "worker")
    each = flag_of(command, "--num-gpus") or flag_of(command, "--num-cpus") or ""
    if document.provider != "local" or document.facts.workers is None or not each.isdigit():
        return
    (low, high), room = document.facts.workers, len(hosts) * int(each)
    if room < high:
        rule = f"a run with --run.workers {low}:{high} can grow to {high} workers"
        fix = f"add machines, or run with --run.workers {min(low, room)}:{room}"
        yield document.mistake(("provider", "worker_ips"), f"room for {room} workers", rule, fix)


def _more(room: int, low: int, high: int) -> str:
    return f"raise max_workers, here and of the types, or run with --run.workers {min(low, room)}:{room}"


def _slots(node: NodeType, types: list[NodeType]) -> int | None:
    has_gpus = any((other.amount("GPU") or 0) > 0 for other in types)
    return node.amount("GPU" if has_gpus else "CPU")


def _room(types: list[NodeType], each: dict[str, int | None], most: int) -> int:
    room = 0
    for node in sorted(types, key=lambda node: -(each[node.name] or 0)):  # the largest machines first
        number = min(node.high, most)
        room, most = room + number * (each[node.name] or 0), most - number
    return room
