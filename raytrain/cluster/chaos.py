"""Which fault happens when, and to whom? A schedule from a script or from a seed, and the choice of a victim.

Pure: the same script or seed gives the same schedule, and the same members the same victim. `rehearsal` acts on it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raytrain.errors import ConfigError
from raytrain.events.kinds import Member

KINDS = ("kill", "stop", "drain", "node")
"""SIGKILL and SIGSTOP for a worker's process, an announcement that its node goes away, SIGKILL for its node."""

GRAMMAR = "is 'after SECONDS FAULT TARGET' or 'step NUMBER FAULT TARGET', with a FAULT of " + ", ".join(KINDS)
_LINE = re.compile(
    rf"(?:after (?P<after>\d+(?:\.\d+)?)|step (?P<step>\d+)) (?P<kind>{'|'.join(KINDS)}) (?P<target>\S+)", re.ASCII
)
_RANK = re.compile(r"rank(\d+)", re.ASCII)
_WORKER = re.compile(r"w\d+", re.ASCII)


@dataclass(frozen=True)
class Fault:
    """A fault that is to happen.

    Args:
        kind: one of `KINDS`.
        target: "w1" a worker, "rank0" who has that rank by then, an address of a node, or "" for any worker.
        after_s: due so many seconds after the workers began to train; or else
        step: due when so many steps are finished.
        draw: in [0, 1), which worker it is where the target is "".
    """

    kind: str
    target: str = ""
    after_s: float | None = None
    step: int | None = None
    draw: float = 0.0

    @property
    def names_a_node(self) -> bool:
        """Whether the target is the address of a node."""
        return bool(self.target) and not _RANK.fullmatch(self.target) and not _WORKER.fullmatch(self.target)

    def __str__(self) -> str:
        when = f"step {self.step}" if self.after_s is None else f"after {self.after_s:g}"
        return f"{when} {self.kind} {self.target or 'any worker'}"


def parse_script(text: str, name: str) -> list[Fault]:
    """The faults of a script, in its order; '#' begins a comment.

    Args:
        text: of the script.
        name: of its file, for errors.

    Raises:
        ConfigError: a line is not understood, or there is none.
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
        ConfigError: one of them is unknown, or there is none.
    """
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(where, kind or "nothing", "is some of " + ", ".join(KINDS), "write it like: kill,stop")
    return kinds


def drawn(every_s: float, for_s: float, kinds: Sequence[str], seed: int) -> list[Fault]:
    """Faults at random: one every `every_s` seconds, up to `for_s`; kinds and victims follow from the seed."""
    source = random.Random(seed)
    count = int(for_s / every_s + 1e-9)
    return [
        Fault(kinds[int(source.random() * len(kinds))], after_s=every_s * (i + 1), draw=source.random())
        for i in range(count)
    ]


def is_due(fault: Fault, elapsed_s: float, step: int) -> bool:
    """Whether its time has come.

    Args:
        elapsed_s: seconds since the workers began to train.
        step: finished steps.
    """
    if fault.after_s is not None:
        return elapsed_s >= fault.after_s
    return fault.step is not None and step >= fault.step


def victim(fault: Fault, members: Iterable[Member]) -> Member | None:
    """The member of the generation that a fault is meant for; None if there is none like that."""
    by_rank = sorted(members, key=lambda member: member.rank)
    if not fault.target:
        return by_rank[int(fault.draw * len(by_rank))] if by_rank else None
    rank = _RANK.fullmatch(fault.target)
    wanted = (m for m in by_rank if (m.rank == int(rank[1]) if rank else m.worker == fault.target))
    return next(wanted, None)
