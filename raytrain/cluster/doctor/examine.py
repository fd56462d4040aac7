"""Starts one probe on each node of the cluster, queries them, and has the answers judged.

Runs in the driver, which is connected to Ray. A node that does not answer, or dies meanwhile, is reported; the others go on.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.cluster.doctor import probe, verdicts
from raytrain.cluster.doctor.verdicts import AllReduce, Clock, Disk, Facts, Node, Row, Torch
from raytrain.worker import network

BY_VALUE: tuple[ModuleType, ...] = (probe, network)
"""Modules that are sent to the nodes by value."""
GRACE_S = 2.0
"""For the other nodes, once one has reported why it cannot take part."""
NUM_PINGS = 3


@dataclass(frozen=True)
class DoctorConfig:
    """What to examine.

    Args:
        storage: of the runs: an absolute path, or a URI.
        workers: of a run; 0 if not known.
        cpus_per_worker: that each of them reserves.
        min_disk_bytes: that must be free.
        timeout_s: of an all-reduce; a node may take twice as long to answer, since processes start slowly.
        variables: environment variables that workers take over from the driver.
        on_progress: receives the name of each stage.
    """

    storage: str
    workers: int = 0
    cpus_per_worker: float = 1.0
    min_disk_bytes: float = 2.0**30
    timeout_s: float = 15.0
    variables: Mapping[str, str] = field(default_factory=dict)
    on_progress: Callable[[str], None] = lambda stage: None


def examine(config: DoctorConfig) -> list[Row]:
    """All rows of the report."""
    nodes, free_cpus = living_nodes(), ray.available_resources().get("CPU", 0.0)
    config.on_progress(f"asking {len(nodes)} nodes")
    with probes_on([node for node in nodes.values() if node.drains_in_s is None], config.variables) as probes:
        facts = {name: _facts(values) for name, values in probes.call("facts", timeout_s=2 * config.timeout_s).items()}
        clocks = {name: clock for name in facts if (clock := probes.clock(name, config.timeout_s))}
        config.on_progress("writing and reading the storage")
        faults = check_storage(probes, config)
        config.on_progress("starting torch")
        torches = {name: Torch(**values) for name, values in probes.call("torch", timeout_s=2 * config.timeout_s).items()}
        config.on_progress("summing over all nodes")
        parts = all_reduces(probes, torches, config.timeout_s)
    driver = _facts(probe.host_facts(_session_dir(), os.getppid()))
    return [
        verdicts.nodes(nodes, probes.silent),
        verdicts.packages(driver, facts, torches),
        verdicts.gpus(nodes, torches),
        verdicts.drivers(facts, torches),
        verdicts.storage(config.storage, faults, len(facts)),
        verdicts.all_reduce(parts, config.timeout_s),
        verdicts.interfaces(nodes, facts),
        verdicts.clocks(clocks),
        verdicts.disk(_storage_disk(config.storage), facts, config.min_disk_bytes),
        verdicts.shared_memory(nodes, facts),
        verdicts.open_files(facts),
        verdicts.cpus(free_cpus, config.workers, config.cpus_per_worker),
        verdicts.access(ray.get_runtime_context().gcs_address, is_token_auth_enabled()),
    ]


def living_nodes() -> dict[str, Node]:
    """The nodes that the cluster considers alive, by name, the driver's first."""
    own = ray.get_runtime_context().get_node_id()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != own)
    draining, now_s = ray._private.state.state.get_draining_nodes(), time.time()
    addresses = [node["NodeManagerAddress"] for node in alive]
    found = {}
    for node in alive:
        node_id, address, resources = node["NodeID"], node["NodeManagerAddress"], node["Resources"]
        name = address if addresses.count(address) == 1 else f"{address} ({node_id[:6]})"
        deadline_ms = draining.get(node_id)
        drains_in_s = None if deadline_ms is None else max(0.0, deadline_ms / 1000 - now_s)
        store_bytes = int(resources.get("object_store_memory", 0))
        found[name] = Node(name, node_id, address, resources.get("GPU", 0.0), store_bytes, drains_in_s)
    return found


class Probes:
    """The probes on all nodes, and which nodes do not answer any more.

    Args:
        actors: handles by the node's name.
    """

    def __init__(self, actors: Mapping[str, Any]) -> None:
        self._actors, self.silent = dict(actors), dict[str, str]()

    def responding(self) -> list[str]:
        return [name for name in self._actors if name not in self.silent]

    def call(self, method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
        """The answer of each node that has answered so far; a node that does not is silent from then on."""
        return self.call_each(method, dict.fromkeys(self.responding(), args), timeout_s)

    def call_each(
        self,
        method: str,
        args: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
        is_final: Callable[[Any], bool] | None = None,
    ) -> dict[str, Any]:
        """Like `call`, with arguments for each node; after a final answer the other nodes have `GRACE_S`."""
        calls = {getattr(self._actors[name], method).remote(*given): name for name, given in args.items()}
        waiting, answers, deadline = list(calls), dict[str, Any](), time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            done, waiting = ray.wait(waiting, timeout=left_s)
            for reference in done:
                self._take(calls[reference], reference, answers)
                if is_final and calls[reference] in answers and is_final(answers[calls[reference]]):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for reference in waiting if is_final is None else []:
            self.silent[calls[reference]] = f"no answer in {timeout_s:g} s"
        return {name: answers[name] for name in args if name in answers}

    def _take(self, name: str, reference: Any, answers: dict[str, Any]) -> None:
        try:
            answers[name] = ray.get(reference)
        except ray.exceptions.RayError as error:
            self.silent[name] = str(error).strip().splitlines()[-1]

    def clock(self, name: str, timeout_s: float) -> Clock | None:
        """From the fastest of a few round trips; an answer is half a round trip old, as in NTP."""
        found = []
        for _ in range(NUM_PINGS):
            sent = time.time()
            answer = self.call_each("now", {name: ()}, timeout_s)
            received = time.time()
            if name in answer:
                found.append(Clock(answer[name] - (sent + received) / 2, (received - sent) / 2))
        return min(found, key=lambda clock: clock.uncertainty_s, default=None)


@contextlib.contextmanager
def probes_on(nodes: list[Node], variables: Mapping[str, str]) -> Iterator[Probes]:
    """One probe on each node, for as long as the block lasts."""
    with by_value():
        build = ray.remote(num_cpus=0, max_restarts=0)(probe.Probe)
        strategies = {node.name: NodeAffinitySchedulingStrategy(node.node_id, soft=False) for node in nodes}
        actors = {
            name: build.options(scheduling_strategy=strategy).remote(dict(variables))
            for name, strategy in strategies.items()
        }
    try:
        yield Probes(actors)
    finally:
        for actor in actors.values():
            ray.kill(actor)


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """What is pickled in the block carries the code of the probe."""
    for module in BY_VALUE:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in BY_VALUE:
            ray.cloudpickle.unregister_pickle_by_value(module)


def check_storage(probes: Probes, config: DoctorConfig) -> dict[str, str]:
    """The driver writes, each node reads and writes, the driver reads; what failed, by node or "driver"."""
    directory, timeout_s = f"{config.storage.rstrip('/')}/.doctor-{uuid.uuid4().hex}", config.timeout_s
    is_new, error = probe.with_timeout(timeout_s, probe.make_directory, directory)
    error = error or probe.with_timeout(timeout_s, probe.write_file, directory, "driver")[1]
    if error:
        return {"driver": f"cannot write ({error})"}
    try:
        files = {node: f"node-{number}" for number, node in enumerate(probes.responding())}
        arguments = {node: (directory, "driver", name, timeout_s) for node, name in files.items()}
        faults = {node: fault for node, fault in probes.call_each("storage", arguments, 3 * timeout_s).items() if fault}
        for node in [node for node in probes.responding() if node in files and node not in faults]:
            if error := probe.with_timeout(timeout_s, probe.read_file, directory, files[node])[1]:
                faults[node] = f"the driver cannot read what it wrote ({error})"
        return faults
    finally:
        probe.with_timeout(timeout_s, probe.remove_directory, directory, is_new)


def all_reduces(probes: Probes, torches: Mapping[str, Torch], timeout_s: float) -> dict[str, dict[str, AllReduce]]:
    """Each node's part in an all-reduce, by backend: gloo on all nodes with torch, NCCL on those with GPUs."""
    able = [name for name, torch in torches.items() if not torch.error]
    parts = {"gloo": all_reduce(probes, "gloo", able, timeout_s)}
    if with_nccl := [name for name in probes.responding() if name in able and torches[name].nccl]:
        parts["nccl"] = all_reduce(probes, "nccl", with_nccl, timeout_s)
    return parts


def all_reduce(probes: Probes, backend: str, names: list[str], timeout_s: float) -> dict[str, AllReduce]:
    """Each node's part in an all-reduce between the nodes `names`."""
    if not names:
        return {}
    first = names[0]
    answer = probes.call_each("serve_store", {first: (timeout_s,)}, 2 * timeout_s)
    host, port, error = answer.get(first, ("", 0, "no answer"))
    if error:
        return {first: AllReduce("starting", error)}
    arguments = {name: (backend, rank, len(names), (host, port), timeout_s) for rank, name in enumerate(names)}

    def is_final(values: Mapping[str, Any]) -> bool:
        return verdicts.is_cause(AllReduce(**values))

    answers = probes.call_each("all_reduce", arguments, timeout_s + GRACE_S, is_final)
    missing = {name: AllReduce("starting", probes.silent.get(name, "")) for name in names if name not in answers}
    return {name: missing[name] if name in missing else AllReduce(**answers[name]) for name in names}


def _facts(values: Mapping[str, Any]) -> Facts:
    return Facts(**{**values, "session_disk": Disk(*values["session_disk"])})


def _session_dir() -> str:
    return str(ray._private.worker._global_node.get_session_dir_path())


def _storage_disk(storage: str) -> Disk | None:
    return None if "://" in storage else Disk(*probe.disk_usage(storage))
