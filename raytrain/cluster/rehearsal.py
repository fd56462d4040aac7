"""Carries a schedule of faults out against a run that goes on, and writes each into the run's events.

Runs in a process of its own beside the run, on the machine whose processes it signals. What is due when, and to whom,
`chaos` decides. A fault that finds no victim is tried again for a while, since workers come and go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from raytrain.cluster import processes
from raytrain.cluster.chaos import Fault, is_due, victim
from raytrain.cluster.processes import Processes, Raylet
from raytrain.cluster.record import Record
from raytrain.errors import ResourceError
from raytrain.events.kinds import FaultInjected, Member
from raytrain.events.view import RunView

LOOK_EVERY_S = 0.1
START_PATIENCE_S = 300.0
PATIENCE_S = 30.0


class Missed(Exception):
    """A fault could not be caused now; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """How a rehearsal went.

    Args:
        fired, missed: faults that were caused, and that found no victim in time.
        view: the run, as it was at the end.
    """

    fired: int
    missed: int
    view: RunView


@dataclass
class Hands:
    """What causes the faults.

    Args:
        cluster: address of the cluster, for drains; "" if not known.
        deadline_s: seconds between the announcement of a drain and the time at which the node is said to go.
        there: the processes of this machine.
    """

    cluster: str = ""
    deadline_s: float = 30.0
    there: Processes = field(default_factory=Processes)

    def cause(self, fault: Fault, view: RunView) -> str:
        """Causes a fault; the worker's name or the node's address that it hit.

        Raises:
            Missed: it cannot be done now.
        """
        if fault.names_a_node:
            self._at_node(fault)
            return fault.target
        member = self._victim(fault, view)
        if fault.kind == "drain":
            self._drain(self._node_id(member))
        elif fault.kind == "node":
            _kill_node(self._raylet(member))
        else:
            _signal(fault.kind, member.pid)
        return member.worker

    def _victim(self, fault: Fault, view: RunView) -> Member:
        present = [member for member in view.members if member.worker not in view.lost]
        named = victim(fault, present if fault.target else filter(self._is_reachable, present))
        if named is None:
            raise Missed("no such worker trains here now")
        if fault.kind != "drain" and not self._is_reachable(named):
            raise Missed(f"{named.worker} is no running worker process of this machine")
        return named

    def _is_reachable(self, member: Member) -> bool:
        return processes.is_own_address(member.node) and self.there.is_running_worker(member.pid)

    def _raylet(self, member: Member) -> Raylet:
        raylet = self.there.raylet_of(member.pid)
        if raylet is None:
            raise Missed(f"the node of {member.worker} is not a process of this machine")
        return raylet

    def _node_id(self, member: Member) -> str:
        """Several nodes of one machine have one address, so a process of this machine is asked first."""
        if self._is_reachable(member):
            return self._raylet(member).node_id
        return self._only_node_at(member.node)

    def _at_node(self, fault: Fault) -> None:
        if fault.kind == "drain":
            self._drain(self._only_node_at(fault.target))
            return
        here = [raylet for raylet in self.there.raylets() if raylet.address == fault.target]
        if not processes.is_own_address(fault.target) or len(here) != 1:
            raise Missed(f"this machine has {len(here)} nodes with that address, and exactly one is needed")
        _kill_node(here[0])

    def _only_node_at(self, address: str) -> str:
        from raytrain.cluster.draining import workers_nodes_at

        nodes = workers_nodes_at(self.cluster, address)
        if len(nodes) != 1:
            raise Missed(f"{len(nodes)} nodes besides the head have that address, and exactly one is needed")
        return nodes[0]

    def _drain(self, node_id: str) -> None:
        from raytrain.cluster.draining import drain

        try:
            drain(self.cluster, node_id, self.deadline_s, "a rehearsal by raytrain chaos")
        except ResourceError as error:
            raise Missed(error.rule) from error


def _kill_node(raylet: Raylet) -> None:
    if raylet.is_head:
        raise Missed("that node is the head: the run and the cluster would end with it")
    _signal("kill", raylet.pid)


def _signal(kind: str, pid: int) -> None:
    try:
        (processes.kill if kind == "kill" else processes.stop)(pid)
    except (ProcessLookupError, PermissionError) as error:
        raise Missed(str(error)) from error


class Rehearsal:
    """A schedule on its way.

    Args:
        record: of the run.
        faults: the schedule.
        cause: causes a fault, and returns what it hit; raises Missed.
        say: tells a person what happened.
        clock: Unix time in seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        record: Record,
        faults: Sequence[Fault],
        cause: Callable[[Fault, RunView], str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._record, self._cause, self._say, self._clock, self._sleep = record, cause, say, clock, sleep
        self._pending = list(faults)
        self._due_since: dict[int, float] = {}
        self._fired = self._missed = 0

    def run(self) -> Outcome:
        """Until all faults have fired or been given up, or the run has ended."""
        began = self._wait_for_workers()
        while self._pending and self._record.refresh().ended is None:
            now = self._clock()
            ready = partial(is_due, elapsed_s=now - began, step=self._record.view.step)
            for fault in list(filter(ready, self._pending)):
                self._try(fault, now, now - began)
            self._sleep(LOOK_EVERY_S)
        return Outcome(self._fired, self._missed, self._record.refresh())

    def _wait_for_workers(self) -> float:
        """The time at which workers train: the schedule's zero."""
        opened = self._clock()
        while not (view := self._record.refresh()).members and view.ended is None:
            if self._clock() - opened > START_PATIENCE_S:
                rule = "workers train, a while after the start of a run"
                raise ResourceError("the run", f"no workers in {START_PATIENCE_S:.0f} s", rule, "see what the run says")
            self._sleep(LOOK_EVERY_S)
        return self._clock()

    def _try(self, fault: Fault, now: float, elapsed_s: float) -> None:
        first_tried = self._due_since.setdefault(id(fault), now)
        try:
            target = self._cause(fault, self._record.view)
        except Missed as missed:
            if now - first_tried >= PATIENCE_S:
                self._missed += 1
                self._pending.remove(fault)
                self._say(f"{elapsed_s:6.1f} s  missed: {fault}: {missed}")
            return
        self._fired += 1
        self._pending.remove(fault)
        self._record.add(FaultInjected(time=now, fault=fault.kind, target=target))
        self._say(f"{elapsed_s:6.1f} s  {fault.kind} {target}")
