"""Is each machine fit for a run? One pure function for each row of the answer, over what the nodes say of themselves.

Mappings are by the node's name. `verdicts_network` judges what is between the machines.
"""

from __future__ import annotations

from collections.abc import Mapping

from raytrain.cluster.doctor.facts import Disk, Facts, Node, Row, Torch
from raytrain.cluster.doctor.wording import listed, on_all, told
from raytrain.events.words import count_of
from raytrain.units import format_bytes, format_count

FULLEST = 0.95
"""Of a disk: beyond, Ray makes no more objects that it would spill (its local_fs_capacity_threshold)."""
LEAST_FILES, GOOD_FILES = 8192, 65536
"""Ray's ray.init recommends the first at least; the cluster files that it ships set the second."""
SHOWN_DIFFERENCES = 3


def gpus(nodes: Mapping[str, Node], torches: Mapping[str, Torch]) -> Row:
    """Does torch see the GPUs that Ray gives to workers?"""
    seen = {name: (nodes[name].gpus, torch.gpus) for name, torch in torches.items() if not torch.error}
    wrong = {name: f"Ray offers {ray:g}, torch sees {torch}" for name, (ray, torch) in seen.items() if ray != torch}
    if not wrong:
        total = sum(torch for _, torch in seen.values())
        return Row("GPUs", "ok", f"{total} {on_all(len(seen))}") if total else Row("GPUs", "-", "no node has any")
    if any(ray > torch for ray, torch in seen.values()):
        fix = "install a torch with CUDA that fits the driver of nvidia-smi, or start the node with its true --num-gpus"
    else:
        fix = "start the node with --num-gpus set to what torch sees: work goes only to GPUs that Ray knows"
    return Row("GPUs", "red", told(wrong), fix)


def drivers(facts: Mapping[str, Facts], torches: Mapping[str, Torch]) -> Row:
    """Do nodes with NVIDIA GPUs have one version of the driver, and of NCCL?"""
    found = {}
    for name, fact in facts.items():
        nccl = torches[name].nccl if name in torches else ""
        if fact.gpu_drivers or nccl:
            driver = " and ".join(dict.fromkeys(fact.gpu_drivers)) or "unknown"
            found[name] = f"driver {driver}" + (f", NCCL {nccl}" if nccl else "")
    if not found:
        return Row("GPU drivers", "-", "nvidia-smi shows no GPU on any node")
    if len(set(found.values())) == 1:
        return Row("GPU drivers", "ok", f"{next(iter(found.values()))} {on_all(len(found))}")
    return Row("GPU drivers", "red", told(found), "use one machine image, so that driver and torch are the same everywhere")


def packages(driver: Facts, facts: Mapping[str, Facts], torches: Mapping[str, Torch]) -> Row:
    """Has each node the versions of the driver, raytrain itself, and a torch that can be imported?"""
    wrong = {name: f"torch cannot be imported ({torch.error})" for name, torch in torches.items() if torch.error}
    wrong |= {name: differences for name, fact in facts.items() if (differences := _differences(driver, fact))}
    if wrong:
        fix = "install the same versions on all nodes (one image, or setup_commands); raytrain also comes with --working-dir"
        return Row("packages", "red", told(wrong), fix)
    shown = ", ".join(f"{name} {driver.versions[name]}" for name in ("python", "ray", "torch"))
    return Row("packages", "ok", f"{shown}, {len(driver.versions) - 3} more alike")


def _differences(driver: Facts, fact: Facts) -> str:
    found = []
    for name, wanted in driver.versions.items():
        if (version := fact.versions.get(name, "")) != wanted:
            have = f"{name} {version}" if version else f"no {name}"
            found.append(f"{have} (driver: {wanted or 'none'})")
    if not found and fact.raytrain_files != driver.raytrain_files:
        found = ["raytrain's files are not those of the driver"]
    return listed(found, SHOWN_DIFFERENCES)


def disk(storage: Disk | None, facts: Mapping[str, Facts], least_bytes: float) -> Row:
    """Is there room for checkpoints, and for what Ray spills?

    Args:
        storage: where runs are kept, if that is a local path.
        least_bytes: that must be free.
    """
    disks = {name: fact.temp for name, fact in facts.items()} | ({"storage": storage} if storage else {})
    wrong = {name: _room(disk) for name, disk in disks.items() if _is_short(disk, least_bytes)}
    if wrong:
        fix = f"free some space, or choose another --storage and Ray --temp-dir: Ray stops spilling at {100 * FULLEST:.0f} %"
        return Row("disk", "red", told(wrong), fix)
    least = min(disks.values(), key=lambda disk: disk.free_bytes, default=None)
    return Row("disk", "ok", f"at least {format_bytes(least.free_bytes)} free") if least else _nobody("disk")


def _is_short(disk: Disk, least_bytes: float) -> bool:
    return disk.free_bytes < least_bytes or disk.free_bytes < (1 - FULLEST) * disk.total_bytes


def _room(disk: Disk) -> str:
    return f"{format_bytes(disk.free_bytes)} of {format_bytes(disk.total_bytes)} free at {disk.path}"


def shared_memory(nodes: Mapping[str, Node], facts: Mapping[str, Facts]) -> Row:
    """Is each object store in memory? Ray puts it on the disk where /dev/shm is smaller than the store."""
    linux = {name: fact for name, fact in facts.items() if fact.shm_bytes}
    if not linux:
        return Row("shared memory", "-", "no node has /dev/shm")
    wrong = {}
    for name, fact in linux.items():
        store = nodes[name].object_store_bytes
        if fact.object_store not in ("", "/dev/shm") or fact.shm_bytes < store:
            where = fact.object_store or "/dev/shm"
            wrong[name] = f"store of {format_bytes(store)} in {where}, /dev/shm has {format_bytes(fact.shm_bytes)}"
    if wrong:
        fix = "enlarge it (docker run --shm-size), or start the node with a smaller --object-store-memory: data pass there"
        return Row("shared memory", "red", told(wrong), fix)
    sizes = [nodes[name].object_store_bytes for name in linux]
    return Row("shared memory", "ok", f"object stores of {format_bytes(min(sizes))} or more, in /dev/shm")


def open_files(facts: Mapping[str, Facts]) -> Row:
    """May processes of Ray open enough files? Each connection to a worker is one."""
    low = {n: f"limit {format_count(fact.open_files)}" for n, fact in facts.items() if 0 <= fact.open_files < LEAST_FILES}
    if low:
        fix = f"ulimit -n {GOOD_FILES} before ray start: each worker and connection takes some, then Ray fails at random"
        return Row("open files", "red", told(low), fix)
    limits = [fact.open_files for fact in facts.values() if fact.open_files >= 0]
    return Row("open files", "ok", f"limit {format_count(min(limits))} or more" if limits else "no limit")


def cpus(free: float, workers: int, cpus_per_worker: float) -> Row:
    """Are there CPUs for the workers, and at least one more for Ray Data, which reads for them?

    Args:
        free: CPUs of the cluster that nobody has reserved.
        workers: that are to run; 0 to ask about reading alone.
    """
    needed = workers * cpus_per_worker + 1
    plan = f"{count_of(workers, 'worker')} and reading need {needed:g}" if workers else "reading needs 1"
    if free >= needed:
        return Row("free CPUs", "ok", f"{free:g} free; {plan}")
    fix = "wait, add nodes, or lower --run.workers or --run.cpus-per-worker: without a CPU for reading a run waits for data"
    return Row("free CPUs", "red", f"{free:g} free; {plan}", fix)


def _nobody(name: str) -> Row:
    return Row(name, "-", "no node answered")
