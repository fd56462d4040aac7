"""Visits each node of the cluster with one actor that needs no CPU, asks, and has the answers judged.

Runs in the driver, which is connected to Ray. A node that does not answer, or dies meanwhile, is named; the others go on.
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

from raytrain.cluster.doctor import files, host, probe, ring, verdicts_machine, verdicts_network
from raytrain.cluster.doctor.facts import Clock, Disk, Facts, Node, Ring, Row, Torch
from raytrain.worker import network

SENT: tuple[ModuleType, ...] = (files, host, probe, ring, network)
"""Modules that travel to the nodes by value."""
ECHO_S = 2.0
"""How long others are waited for once one node has said why it cannot take part."""
PINGS = 3


@dataclass(frozen=True)
class Order:
    """What is to be examined.

    Args:
        storage: where runs are kept: an absolute path, or a URI.
        workers: that are to run; 0 if that is not known.
        cpus_per_worker: that each of them reserves.
        least_disk_bytes: that must be free.
        limit_s: of an all-reduce; a node that does not answer is given up after twice as long, since processes start slowly.
        variables: that workers take over from the driver.
        say: is told what happens now.
    """

    storage: str
    workers: int = 0
    cpus_per_worker: float = 1.0
    least_disk_bytes: float = 2.0**30
    limit_s: float = 15.0
    variables: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None


def examine(order: Order) -> list[Row]:
    """All rows, the reds among them."""
    nodes, free = living_nodes(), ray.available_resources().get("CPU", 0.0)
    order.say(f"asking {len(nodes)} nodes")
    with probes_on([node for node in nodes.values() if node.leaves_in_s is None], order.variables) as visit:
        facts = {name: _facts(said) for name, said in visit.ask("facts", limit_s=2 * order.limit_s).items()}
        clocks = {name: clock for name in facts if (clock := visit.clock(name, order.limit_s))}
        order.say("writing and reading the storage")
        faults = check_storage(visit, order)
        order.say("starting torch")
        torches = {name: Torch(**said) for name, said in visit.ask("torch", limit_s=2 * order.limit_s).items()}
        order.say("summing over all nodes")
        able = [name for name, torch in torches.items() if not torch.error]
        rings = {"gloo": all_reduce(visit, "gloo", able, order.limit_s)}
        if with_gpus := [name for name in visit.present() if name in able and torches[name].nccl]:
            rings["nccl"] = all_reduce(visit, "nccl", with_gpus, order.limit_s)
    machine, between = verdicts_machine, verdicts_network
    return [
        between.nodes(nodes, visit.silent),
        machine.packages(_facts(host.gather(_temp(), os.getppid())), facts, torches),
        machine.gpus(nodes, torches),
        machine.drivers(facts, torches),
        between.storage(order.storage, faults, len(facts)),
        between.all_reduce(rings, order.limit_s),
        between.interfaces(nodes, facts),
        between.clocks(clocks),
        machine.disk(_storage_disk(order.storage), facts, order.least_disk_bytes),
        machine.shared_memory(nodes, facts),
        machine.open_files(facts),
        machine.cpus(free, order.workers, order.cpus_per_worker),
        between.access(ray.get_runtime_context().gcs_address, is_token_auth_enabled()),
    ]


def living_nodes() -> dict[str, Node]:
    """The nodes that the cluster takes for alive, by name, the driver's first."""
    mine = ray.get_runtime_context().get_node_id()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != mine)
    leaving, now_s = ray._private.state.state.get_draining_nodes(), time.time()
    addresses = [node["NodeManagerAddress"] for node in alive]
    found = {}
    for node in alive:
        node_id, address = node["NodeID"], node["NodeManagerAddress"]
        name = address if addresses.count(address) == 1 else f"{address} ({node_id[:6]})"
        deadline_ms = leaving.get(node_id)
        found[name] = Node(
            name,
            node_id,
            address,
            node["Resources"].get("GPU", 0.0),
            int(node["Resources"].get("object_store_memory", 0)),
            None if deadline_ms is None else max(0.0, deadline_ms / 1000 - now_s),
        )
    return found


class Visit:
    """The probes on all nodes, and who has fallen silent.

    Args:
        probes: actor handles by the node's name.
    """

    def __init__(self, probes: Mapping[str, Any]) -> None:
        self._probes, self.silent = dict(probes), dict[str, str]()

    def present(self) -> list[str]:
        return [name for name in self._probes if name not in self.silent]

    def ask(self, method: str, *args: Any, limit_s: float) -> dict[str, Any]:
        """What each node answers that has answered so far; those that do not are silent from then on."""
        return self.ask_each(method, dict.fromkeys(self.present(), args), limit_s)

    def ask_each(
        self, method: str, args: Mapping[str, tuple[Any, ...]], limit_s: float, enough: Callable[[Any], bool] | None = None
    ) -> dict[str, Any]:
        """As `ask`, with arguments for each node; after an answer that is `enough` the others have little time."""
        asked = {getattr(self._probes[name], method).remote(*given): name for name, given in args.items()}
        waiting, answers, until = list(asked), dict[str, Any](), time.monotonic() + limit_s
        while waiting and (left_s := until - time.monotonic()) > 0:
            done, waiting = ray.wait(waiting, timeout=left_s)
            for reference in done:
                self._take(asked[reference], reference, answers)
                if enough and asked[reference] in answers and enough(answers[asked[reference]]):
                    until = min(until, time.monotonic() + ECHO_S)
        for reference in waiting if enough is None else []:
            self.silent[asked[reference]] = f"no answer in {limit_s:g} s"
        return {name: answers[name] for name in args if name in answers}

    def _take(self, name: str, reference: Any, answers: dict[str, Any]) -> None:
        try:
            answers[name] = ray.get(reference)
        except ray.exceptions.RayError as error:
            self.silent[name] = str(error).strip().splitlines()[-1]

    def clock(self, name: str, limit_s: float) -> Clock | None:
        """From the quickest of a few exchanges: an answer is as old as half of the way there and back."""
        found = []
        for _ in range(PINGS):
            began = time.time()
            answer = self.ask_each("now", {name: ()}, limit_s)
            ended = time.time()
            if name in answer:
                found.append(Clock(answer[name] - (began + ended) / 2, (ended - began) / 2))
        return min(found, key=lambda clock: clock.uncertainty_s, default=None)


@contextlib.contextmanager
def probes_on(nodes: list[Node], variables: Mapping[str, str]) -> Iterator[Visit]:
    """One probe on each node; they are gone afterwards."""
    with by_value():
        build = ray.remote(num_cpus=0, max_restarts=0)(probe.Probe)
        probes = {
            node.name: build.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
                dict(variables)
            )
            for node in nodes
        }
    try:
        yield Visit(probes)
    finally:
        for handle in probes.values():
            ray.kill(handle)


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """What is pickled in the block carries the code of the probe with it."""
    for module in SENT:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in SENT:
            ray.cloudpickle.unregister_pickle_by_value(module)


def check_storage(visit: Visit, order: Order) -> dict[str, str]:
    """The driver writes, each node reads and writes, the driver reads; what went wrong, by node or "driver"."""
    directory, name = f"{order.storage.rstrip('/')}/.doctor-{uuid.uuid4().hex}", "driver"
    is_new, error = probe.within(order.limit_s, files.make, directory)
    error = error or probe.within(order.limit_s, files.write, directory, name)[1]
    if error:
        return {name: f"cannot write ({error})"}
    try:
        names = {node: f"node-{number}" for number, node in enumerate(visit.present())}
        arguments = {node: (directory, name, mine, order.limit_s) for node, mine in names.items()}
        faults = {node: said for node, said in visit.ask_each("storage", arguments, 3 * order.limit_s).items() if said}
        for node in [node for node in visit.present() if node in names and node not in faults]:
            if error := probe.within(order.limit_s, files.read, directory, names[node])[1]:
                faults[node] = f"the driver cannot read what it wrote ({error})"
        return faults
    finally:
        probe.within(order.limit_s, files.remove, directory, is_new)


def all_reduce(visit: Visit, backend: str, names: list[str], limit_s: float) -> dict[str, Ring]:
    """Each node's part in an all-reduce between the nodes."""
    if not names:
        return {}
    first = names[0]
    host, port, error = visit.ask_each("serve_store", {first: (limit_s,)}, 2 * limit_s).get(first, ("", 0, "no answer"))
    if error:
        return {first: Ring("starting", error)}
    arguments = {name: (backend, rank, len(names), (host, port), limit_s) for rank, name in enumerate(names)}

    def is_enough(part: Mapping[str, Any]) -> bool:
        return verdicts_network.is_own(Ring(**part))

    said = visit.ask_each("all_reduce", arguments, limit_s + ECHO_S, is_enough)
    return {name: Ring(**said[name]) if name in said else Ring("starting", visit.silent.get(name, "")) for name in names}


def _facts(said: Mapping[str, Any]) -> Facts:
    return Facts(**{**said, "temp": Disk(*said["temp"])})


def _temp() -> str:
    return str(ray._private.worker._global_node.get_session_dir_path())


def _storage_disk(storage: str) -> Disk | None:
    return None if "://" in storage else Disk(*host.disk(storage))
