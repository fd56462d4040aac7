"""Judges what the probes found: one pure function for each row of the report.

Mappings are keyed by the node's name. `examine` gathers the values and calls the verdicts, `table` shows the rows.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from raytrain.events.messages import count_of
from raytrain.units import format_bytes, format_count, format_seconds

MAX_DISK_USED = 0.95
"""Share of a disk; above it Ray stops spilling objects (its local_fs_capacity_threshold)."""
MIN_FILES, RECOMMENDED_FILES = 8192, 65536
"""ray.init recommends at least the first; the cluster files that Ray ships set the second."""
MAX_CLOCK_SKEW_S = 1.0
"""Events of a run are ordered by their times."""
MAX_SHOWN = 3
PHASES = ("starting", "finding the first node", "connecting", "summing")
"""Of an all-reduce, in order."""

# What a node reports when another one is the cause; and gloo's '[enforce fail at /where/device.cc:84] ifa != nullptr. '.
_SECONDARY = re.compile(r"timed? ?out|closed by peer|connection reset|broken pipe|connection refused", re.IGNORECASE)
_SOURCE_PLACE = re.compile(r"^\w+Error: |\[[^\]]*\.(?:cc|cpp|h):\d+\] (?:\S+ [!=]= \S+\. )?")


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Args:
        name: of the check.
        state: "-" where there is nothing to check.
        found: what was found.
        fix: what to do about it, if it is red.
    """

    name: str
    state: Literal["ok", "red", "-"]
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Node:
    """A living node, as the cluster knows it.

    Args:
        name: its address, with the first digits of its id where several nodes share the address.
        node_id: hexadecimal.
        drains_in_s: seconds until the deadline of its drain, 0 for a drain without one; None if it is not draining.
    """

    name: str
    node_id: str
    address: str
    gpus: float
    object_store_bytes: int
    drains_in_s: float | None = None


@dataclass(frozen=True)
class Disk:
    """Space of the filesystem that holds `path`, for a user without privileges."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Facts:
    """What a node reports about itself.

    Args:
        versions: of Python, raytrain and its dependencies; "" for a missing package.
        raytrain_digest: of raytrain's source files; "" if it cannot be imported.
        gpu_drivers: version of the driver, one per GPU.
        interface: the network interface that gloo is told to use; "" if it uses the hostname.
        interface_address: the address of that; "" if there is no such interface.
        open_files: soft limit of a process, negative for no limit.
        session_disk: where Ray keeps its logs and spilled objects.
        object_store: the directory of Ray's object store; "" if not known.
        shm_bytes: size of /dev/shm; 0 if there is none.
    """

    hostname: str
    versions: Mapping[str, str]
    raytrain_digest: str
    gpu_drivers: tuple[str, ...]
    interface: str
    interface_address: str
    open_files: int
    session_disk: Disk
    object_store: str
    shm_bytes: int


@dataclass(frozen=True)
class Torch:
    """What torch reports on a node: visible GPUs, NCCL's version ("" without NCCL), and why it cannot be imported, or ""."""

    gpus: int
    nccl: str
    error: str


@dataclass(frozen=True)
class AllReduce:
    """A node's part in an all-reduce between all nodes.

    Args:
        phase: how far it got.
        error: why it failed; "" if it did not, or gave no answer.
        done: whether it got all sums, and they were right.
        latency_s: of a small tensor.
        bytes_per_s: bus bandwidth with a large one.
    """

    phase: str
    error: str = ""
    done: bool = False
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Clock:
    """How far a node's clock is ahead of the driver's, and the error of that measurement."""

    offset_s: float
    uncertainty_s: float


def nodes(here: Mapping[str, Node], silent: Mapping[str, str]) -> Row:
    """Are all nodes responding, and none draining?

    Args:
        silent: nodes that did not answer, or died meanwhile, and why.
    """
    deadlines = {name: node.drains_in_s for name, node in here.items() if node.drains_in_s is not None}
    draining = {n: f"draining, terminates in {format_seconds(s)}" if s > 0 else "draining" for n, s in deadlines.items()}
    if silent:
        fix = "see `ray list nodes` and the logs of its raylet; restart Ray on it, or remove it"
        return Row("nodes", "red", summarize({**silent, **draining}), fix)
    if draining:
        return Row("nodes", "red", summarize(draining), "replace the node; it was not examined")
    return Row("nodes", "ok", f"{count_of(len(here), 'node')}, all responding, none draining")


def packages(driver: Facts, facts: Mapping[str, Facts], torches: Mapping[str, Torch]) -> Row:
    """Does each node have the driver's versions, the driver's raytrain, and a torch that can be imported?"""
    wrong = {name: f"torch cannot be imported ({torch.error})" for name, torch in torches.items() if torch.error}
    wrong |= {name: differences for name, fact in facts.items() if (differences := _differences(driver, fact))}
    if wrong:
        fix = "install the same versions on all nodes (one image, or setup_commands); --working-dir brings raytrain too"
        return Row("packages", "red", summarize(wrong), fix)
    shown = ", ".join(f"{name} {driver.versions[name]}" for name in ("python", "ray", "torch"))
    return Row("packages", "ok", f"{shown}, {len(driver.versions) - 3} more match")


def _differences(driver: Facts, fact: Facts) -> str:
    found = []
    for name, wanted in driver.versions.items():
        if (version := fact.versions.get(name, "")) != wanted:
            found.append(f"{f'{name} {version}' if version else f'no {name}'} (driver: {wanted or 'none'})")
    if not found and fact.raytrain_digest != driver.raytrain_digest:
        found = ["raytrain's files differ from the driver's"]
    return join_names(found)


def gpus(nodes: Mapping[str, Node], torches: Mapping[str, Torch]) -> Row:
    """Does torch see the GPUs that Ray offers?"""
    seen = {name: (nodes[name].gpus, torch.gpus) for name, torch in torches.items() if not torch.error}
    wrong = {name: f"Ray offers {ray:g}, torch sees {torch}" for name, (ray, torch) in seen.items() if ray != torch}
    if not wrong:
        total = sum(torch for _, torch in seen.values())
        return Row("GPUs", "ok", f"{total} {_on_all(len(seen))}") if total else Row("GPUs", "-", "no node has any")
    fix = "start the node with --num-gpus set to what torch sees: Ray schedules only on GPUs that it knows"
    if any(ray > torch for ray, torch in seen.values()):
        fix = "install a torch with CUDA that fits the driver of nvidia-smi, or start the node with its true --num-gpus"
    return Row("GPUs", "red", summarize(wrong), fix)


def drivers(facts: Mapping[str, Facts], torches: Mapping[str, Torch]) -> Row:
    """Do all nodes with NVIDIA GPUs have the same version of the driver, and of NCCL?"""
    found = {}
    for name, fact in facts.items():
        nccl = torches[name].nccl if name in torches else ""
        if fact.gpu_drivers or nccl:
            driver = " and ".join(dict.fromkeys(fact.gpu_drivers)) or "unknown"
            found[name] = f"driver {driver}" + (f", NCCL {nccl}" if nccl else "")
    if not found:
        return Row("GPU drivers", "-", "nvidia-smi shows no GPU on any node")
    if len(set(found.values())) == 1:
        return Row("GPU drivers", "ok", f"{next(iter(found.values()))} {_on_all(len(found))}")
    return Row("GPU drivers", "red", summarize(found), "use one machine image, so that driver and torch match everywhere")


def storage(where: str, faults: Mapping[str, str], num_nodes: int) -> Row:
    """Can the driver and each node read what the other writes?

    Args:
        faults: what failed, by the node's name or "driver".
    """
    if not faults:
        return Row("storage", "ok", f"{where}: written and read by the driver and {count_of(num_nodes, 'node')}")
    fix = "set --storage to a directory that all nodes share and may write, or to a URI such as s3://bucket/runs"
    return Row("storage", "red", f"{where}: {summarize({name: _short(fault) for name, fault in faults.items()})}", fix)


def all_reduce(parts_by_backend: Mapping[str, Mapping[str, AllReduce]], timeout_s: float) -> Row:
    """Do all nodes complete an all-reduce, and how fast?

    Args:
        parts_by_backend: each node's part, by backend and node.
        timeout_s: of each backend.
    """
    for backend, parts in parts_by_backend.items():
        if not all(part.done for part in parts.values()):
            variable = f"{backend.upper()}_SOCKET_IFNAME"
            fix = f"set {variable} to the interface of each node's address; open all TCP ports between the nodes"
            return Row("all-reduce", "red", f"{backend}: {summarize(_culprits(parts, timeout_s))}", fix)
    if not any(parts_by_backend.values()):
        return _no_answer("all-reduce")
    most = max(map(len, parts_by_backend.values()))
    if most == 1:
        return Row("all-reduce", "ok", f"{' and '.join(parts_by_backend)}: works on the only node")
    speeds = "; ".join(_speed(backend, parts) for backend, parts in parts_by_backend.items())
    return Row("all-reduce", "ok", f"{most} nodes: {speeds}")


def _culprits(parts: Mapping[str, AllReduce], timeout_s: float) -> dict[str, str]:
    """The nodes that caused a failure: those with an error of their own, else those that got least far."""
    failed = {name: part for name, part in parts.items() if not part.done}
    if own := {name: _short(part.error) for name, part in failed.items() if is_cause(part)}:
        return own
    progress = {name: PHASES.index(part.phase) if part.phase in PHASES else 0 for name, part in failed.items()}
    late = [name for name in failed if progress[name] == min(progress.values())]
    return {name: f"no answer after {timeout_s:g} s while {failed[name].phase}" for name in late}


def is_cause(part: AllReduce) -> bool:
    """Whether a node failed for a reason of its own, and not because another one did not answer."""
    return bool(not part.done and part.error and not _SECONDARY.search(part.error))


def _speed(backend: str, parts: Mapping[str, AllReduce]) -> str:
    latency_s, rate = max(part.latency_s for part in parts.values()), min(part.bytes_per_s for part in parts.values())
    latency = f"{1e6 * latency_s:.0f} µs" if latency_s < 1e-3 else f"{1e3 * latency_s:.1f} ms"
    return f"{backend} {latency}, {format_bytes(rate)}/s"


def interfaces(here: Mapping[str, Node], facts: Mapping[str, Facts]) -> Row:
    """Does each node offer its peers an address that they can reach?"""
    if len({node.address for node in here.values()}) < 2:
        return Row("interfaces", "ok", "all nodes are on one machine")
    loopback = {
        name: f"offers {fact.interface_address} ({fact.interface or f'of its hostname {fact.hostname}'})"
        for name, fact in facts.items()
        if fact.interface_address and ipaddress.ip_address(fact.interface_address).is_loopback
    }
    if loopback:
        fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there to an interface that the others reach, or fix /etc/hosts"
        return Row("interfaces", "red", summarize(loopback), fix)
    used = sorted({fact.interface or "by hostname" for fact in facts.values()})
    return Row("interfaces", "ok", f"{join_names(used)}; none is loopback")


def clocks(found: Mapping[str, Clock]) -> Row:
    """Do the clocks agree, within the error of the measurement?"""
    if not found:
        return _no_answer("clocks")
    skewed = {name: _offset(c) for name, c in found.items() if abs(c.offset_s) - c.uncertainty_s > MAX_CLOCK_SKEW_S}
    if skewed:
        return Row("clocks", "red", summarize(skewed), "run chrony or ntpd on all nodes: a run's events are ordered by time")
    worst = max(abs(clock.offset_s) + clock.uncertainty_s for clock in found.values())
    return Row("clocks", "ok", f"within {format_seconds(worst)} of the driver's")


def _offset(clock: Clock) -> str:
    return f"{format_seconds(abs(clock.offset_s))} {'ahead of' if clock.offset_s > 0 else 'behind'} the driver's"


def disk(storage: Disk | None, facts: Mapping[str, Facts], min_bytes: float) -> Row:
    """Is there space for checkpoints, and for the objects that Ray spills?

    Args:
        storage: of the runs, if that is a local path.
        min_bytes: that must be free.
    """
    disks = {name: fact.session_disk for name, fact in facts.items()} | ({"storage": storage} if storage else {})
    wrong = {name: _free(disk) for name, disk in disks.items() if _is_full(disk, min_bytes)}
    if wrong:
        fix = f"free some space, or change --storage and Ray's --temp-dir: Ray stops spilling at {100 * MAX_DISK_USED:.0f} %"
        return Row("disk", "red", summarize(wrong), fix)
    least = min((disk.free_bytes for disk in disks.values()), default=None)
    return _no_answer("disk") if least is None else Row("disk", "ok", f"at least {format_bytes(least)} free")


def _is_full(disk: Disk, min_bytes: float) -> bool:
    return disk.free_bytes < min_bytes or disk.free_bytes < (1 - MAX_DISK_USED) * disk.total_bytes


def _free(disk: Disk) -> str:
    return f"{format_bytes(disk.free_bytes)} of {format_bytes(disk.total_bytes)} free at {disk.path}"


def shared_memory(nodes: Mapping[str, Node], facts: Mapping[str, Facts]) -> Row:
    """Is each object store in memory? Ray puts it on the disk where /dev/shm is smaller than the store."""
    linux = {name: fact for name, fact in facts.items() if fact.shm_bytes}
    if not linux:
        return Row("shared memory", "-", "no node has /dev/shm")
    wrong = {}
    for name, fact in linux.items():
        size_bytes, where = nodes[name].object_store_bytes, fact.object_store or "/dev/shm"
        if where != "/dev/shm" or fact.shm_bytes < size_bytes:
            wrong[name] = f"store of {format_bytes(size_bytes)} in {where}, /dev/shm has {format_bytes(fact.shm_bytes)}"
    if wrong:
        fix = "enlarge it (docker run --shm-size), or start the node with a smaller --object-store-memory: data pass there"
        return Row("shared memory", "red", summarize(wrong), fix)
    smallest = min(nodes[name].object_store_bytes for name in linux)
    return Row("shared memory", "ok", f"object stores of {format_bytes(smallest)} or more, in /dev/shm")


def open_files(facts: Mapping[str, Facts]) -> Row:
    """May Ray's processes open enough files? Each connection to a worker is one."""
    limits = {name: fact.open_files for name, fact in facts.items() if fact.open_files >= 0}
    low = {name: f"limit {format_count(limit)}" for name, limit in limits.items() if limit < MIN_FILES}
    if low:
        fix = f"ulimit -n {RECOMMENDED_FILES} before ray start: workers and connections use them up, and Ray fails at random"
        return Row("open files", "red", summarize(low), fix)
    return Row("open files", "ok", f"limit {format_count(min(limits.values()))} or more" if limits else "no limit")


def cpus(free: float, workers: int, cpus_per_worker: float) -> Row:
    """Are there CPUs for the workers, and one more for Ray Data?

    Args:
        free: CPUs of the cluster that are not reserved.
        workers: of the run; 0 to check the CPU for reading only.
    """
    needed = workers * cpus_per_worker + 1
    plan = f"{count_of(workers, 'worker')} and reading need {needed:g}" if workers else "reading needs 1"
    if free >= needed:
        return Row("free CPUs", "ok", f"{free:g} free; {plan}")
    fix = "wait, add nodes, or lower --run.workers or --run.cpus-per-worker: without a CPU for reading a run waits for data"
    return Row("free CPUs", "red", f"{free:g} free; {plan}", fix)


def access(address: str, has_token: bool) -> Row:
    """Is the head closed to strangers? Whoever reaches it can run code on all nodes.

    Args:
        address: of the head, host and port.
        has_token: whether Ray requires a token (RAY_AUTH_MODE=token).
    """
    if has_token:
        return Row("access", "ok", "Ray requires a token")
    try:
        is_public = ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_global
    except ValueError:  # a name
        is_public = False
    if is_public:
        fix = "set RAY_AUTH_MODE=token on all nodes, or close the ports: whoever reaches them runs code on every node"
        return Row("access", "red", f"{address} is a public address, and Ray requires no token", fix)
    return Row("access", "ok", f"no token, but {address} is not a public address")


def join_names(names: Iterable[str]) -> str:
    """'a, b, c and 4 more'."""
    found = list(names)
    return ", ".join(found[:MAX_SHOWN]) + (f" and {more} more" if (more := len(found) - MAX_SHOWN) > 0 else "")


def summarize(findings: Mapping[str, str]) -> str:
    """'a, b: not there; c: too small': findings with the nodes that have them."""
    grouped: dict[str, list[str]] = {}
    for name, finding in findings.items():
        grouped.setdefault(finding, []).append(name)
    parts = [f"{join_names(names)}: {finding}" for finding, names in grouped.items()]
    return "; ".join(parts[:MAX_SHOWN]) + (f"; and {more} more" if (more := len(parts) - MAX_SHOWN) > 0 else "")


def _on_all(count: int) -> str:
    return "on the only node" if count == 1 else f"on all {count} nodes"


def _no_answer(name: str) -> Row:
    return Row(name, "-", "no node answered")


def _short(error: str) -> str:
    """The first line of an error without the place in gloo's source."""
    return _SOURCE_PLACE.sub("", error.strip().split("\n")[0]).strip()[:160]
