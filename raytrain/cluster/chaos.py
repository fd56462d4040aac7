"""Injects faults into a running training run on a schedule, and records each in the run's events.

The schedule comes from a script or a seed: the same seed gives the same faults, and the same members the same victims.
`ChaosRunner` runs in a process beside the run, on the same machine. How a fault is caused is in `fault_injection`.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raytrain.errors import ConfigError, ResourceError, StorageError
from raytrain.events.kinds import Event, FaultInjected, Member, to_json
from raytrain.events.lines import parse_line
from raytrain.events.view import RunView, reduce
from raytrain.rundir import EVENTS, RunDir

POLL_S = 0.1
START_TIMEOUT_S = 300.0
RETRY_S = 30.0
"""How long a fault without a victim is retried: workers come and go."""

KINDS = ("kill", "stop", "drain", "node")
"""SIGKILL and SIGSTOP for a worker's process, a drain of its node, SIGKILL for its node."""

GRAMMAR = "is 'after SECONDS FAULT TARGET' or 'step NUMBER FAULT TARGET', with a FAULT of " + ", ".join(KINDS)
_LINE = re.compile(
    rf"(?:after (?P<after>\d+(?:\.\d+)?)|step (?P<step>\d+)) (?P<kind>{'|'.join(KINDS)}) (?P<target>\S+)", re.ASCII
)
_RANK = re.compile(r"rank(\d+)", re.ASCII)
_WORKER = re.compile(r"w\d+", re.ASCII)


@dataclass(frozen=True)
class Fault:
    """A scheduled fault, due either by time or by step.

    Args:
        kind: one of `KINDS`.
        target: a worker ("w1"), a rank ("rank0"), the address of a node, or "" for a random worker.
        after_s: seconds since the workers began to train.
        step: number of finished steps.
        draw: in [0, 1), selects the random worker.
    """

    kind: str
    target: str = ""
    after_s: float | None = None
    step: int | None = None
    draw: float = 0.0

    @property
    def names_a_node(self) -> bool:
        return bool(self.target) and not _RANK.fullmatch(self.target) and not _WORKER.fullmatch(self.target)

    def __str__(self) -> str:
        when = f"step {self.step}" if self.after_s is None else f"after {self.after_s:g}"
        return f"{when} {self.kind} {self.target or 'any worker'}"


def parse_script(text: str, name: str) -> list[Fault]:
    """The faults of a script, in order; '#' starts a comment.

    Args:
        name: of the script's file, for errors.

    Raises:
        ConfigError: a line does not match the grammar, or there is no line.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        words = " ".join(line.partition("#")[0].split())
        if words:
            faults.append(_parse_line(words, f"{name}, line {number}"))
    if not faults:
        raise ConfigError(name, "no faults", f"each line {GRAMMAR}", "write a line such as: after 30 kill w1")
    return faults


def _parse_line(words: str, where: str) -> Fault:
    found = _LINE.fullmatch(words)
    if found is None:
        raise ConfigError(where, words, f"a line {GRAMMAR}", "write it like: after 30 kill w1")
    after, step = found["after"], found["step"]
    fault = Fault(found["kind"], found["target"], float(after) if after else None, int(step) if step else None)
    if fault.kind in ("kill", "stop") and fault.names_a_node:
        raise ConfigError(where, fault.target, f"{fault.kind} is for a worker", "name one like w1 or rank0")
    return fault


def parse_kinds(text: str, where: str) -> list[str]:
    """'kill,stop' -> ["kill", "stop"].

    Raises:
        ConfigError: a kind is unknown, or there is none.
    """
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(where, kind or "nothing", "is some of " + ", ".join(KINDS), "write it like: kill,stop")
    return kinds


def random_schedule(every_s: float, for_s: float, kinds: Sequence[str], seed: int) -> list[Fault]:
    """One fault every `every_s` seconds, up to `for_s`; the seed determines kinds and victims."""
    source = random.Random(seed)
    count = int(for_s / every_s + 1e-9)
    return [
        Fault(kinds[int(source.random() * len(kinds))], after_s=every_s * (i + 1), draw=source.random())
        for i in range(count)
    ]


def is_due(fault: Fault, elapsed_s: float, step: int) -> bool:
    """Whether a fault is due, given the seconds since the workers began to train and the finished steps."""
    if fault.after_s is not None:
        return elapsed_s >= fault.after_s
    return fault.step is not None and step >= fault.step


def victim(fault: Fault, members: Iterable[Member]) -> Member | None:
    """The member that a fault hits; None if no member matches its target."""
    by_rank = sorted(members, key=lambda member: member.rank)
    if not fault.target:
        return by_rank[int(fault.draw * len(by_rank))] if by_rank else None
    rank = _RANK.fullmatch(fault.target)
    matching = (m for m in by_rank if (m.rank == int(rank[1]) if rank else m.worker == fault.target))
    return next(matching, None)


class RunEvents:
    """The events of a run on this machine: follows them, and appends to them.

    The run's own writer appends with O_APPEND as well, so whole lines of both do not mix.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.view = RunView()

    def refresh(self) -> RunView:
        """The view after all complete lines."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = parse_line(line)
            if event is not None:
                self.view = reduce(self.view, event)
        return self.view

    def append(self, event: Event) -> None:
        """Appends an event in one write; its time must be set."""
        line = (json.dumps(to_json(event)) + "\n").encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def open_running(run_dir: RunDir) -> RunEvents:
    """The events of a run that is in progress.

    Raises:
        StorageError: no such run, or its directory is not on this machine.
        ConfigError: the run has ended.
    """
    if not run_dir.is_local:
        rule = "chaos appends to the run's events, so the run directory must be on this machine"
        raise StorageError(run_dir.path, "not a local path", rule, "set --run.storage to a local directory")
    if not run_dir.exists(EVENTS):
        rule = f"a run directory contains {EVENTS}"
        raise StorageError(run_dir.path, f"no {EVENTS}", rule, "give the run directory: STORAGE/NAME")
    events = RunEvents(Path(run_dir.child(EVENTS)))
    ended = events.refresh().ended
    if ended is not None:
        found = f"{ended.outcome} at step {ended.step}"
        raise ConfigError(run_dir.path, found, "chaos needs a run in progress", "start the run first")
    return events


class NoVictimError(Exception):
    """A fault cannot be injected now; the message says why."""


@dataclass(frozen=True)
class ChaosResult:
    """How many faults were injected, how many found no victim in time, and the run as it was at the end."""

    injected: int
    missed: int
    view: RunView


class ChaosRunner:
    """Carries out a schedule.

    Args:
        events: of the run.
        faults: the schedule.
        inject: causes a fault and returns what it hit; raises NoVictimError.
        report: receives one line per fault.
        clock: Unix time in seconds.
        sleep: waits for that many seconds.
    """

    def __init__(
        self,
        events: RunEvents,
        faults: Sequence[Fault],
        inject: Callable[[Fault, RunView], str],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._events, self._inject, self._report, self._clock, self._sleep = events, inject, report, clock, sleep
        self._pending = list(faults)
        self._first_tried: dict[int, float] = {}
        self._injected = self._missed = 0

    def run(self) -> ChaosResult:
        """Returns when no fault is pending or the run has ended."""
        start = self._wait_for_workers()
        while self._pending and self._events.refresh().ended is None:
            now = self._clock()
            ready = partial(is_due, elapsed_s=now - start, step=self._events.view.step)
            for fault in list(filter(ready, self._pending)):
                self._try(fault, now, now - start)
            self._sleep(POLL_S)
        return ChaosResult(self._injected, self._missed, self._events.refresh())

    def _wait_for_workers(self) -> float:
        """The time at which workers train, from which the schedule counts."""
        opened = self._clock()
        while not (view := self._events.refresh()).members and view.ended is None:
            if self._clock() - opened > START_TIMEOUT_S:
                found = f"no workers in {START_TIMEOUT_S:.0f} s"
                raise ResourceError("the run", found, "must have started its workers", "see the run's output")
            self._sleep(POLL_S)
        return self._clock()

    def _try(self, fault: Fault, now: float, elapsed_s: float) -> None:
        first_tried = self._first_tried.setdefault(id(fault), now)
        try:
            target = self._inject(fault, self._events.view)
        except NoVictimError as error:
            if now - first_tried >= RETRY_S:
                self._missed += 1
                self._pending.remove(fault)
                self._report(f"{elapsed_s:6.1f} s  missed: {fault}: {error}")
            return
        self._injected += 1
        self._pending.remove(fault)
        self._events.append(FaultInjected(time=now, fault=fault.kind, target=target))
        self._report(f"{elapsed_s:6.1f} s  {fault.kind} {target}")
