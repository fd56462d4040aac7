"""One run for `exactness.py`: on a fixed number of workers, or on nodes that are killed and added while it goes on.

A story is played to the elastic run: so many workers train, one of them gets `kill -9` and is replaced, then the number of
nodes changes. It goes on when the run's events say that it may, never after a time. While a worker is awaited the task
slows down, so that it joins in its stage; how many steps each number of workers really took is read from the events
afterwards. Runs in the benchmark's process, as the run's viewer. Judges nothing.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from exact_models import GLOBAL_BATCH, NUM_LOGICAL, Exact
from machine import Machine, parent_of
from workload import median_of

import raytrain
from raytrain.checkpoint.store import CheckpointStore
from raytrain.events.curve import curve
from raytrain.events.kinds import Event, GenerationFormed, StateRestored, StepsDone, WorkerLost
from raytrain.events.log import read
from raytrain.launch.monitor import NullViewer, Viewer
from raytrain.report.outcome import digests

MOST_NODES = 4
STAGES = (4, 2, 3)
"""Workers of the stages of an elastic run, each a third of the steps."""
RANKS_TAKEN, RANKS_KILLED = (0, 3), (1, 0, 2)
"""Whose nodes go between the first two stages; and whose process is killed in each stage."""
STAGE_S, AWAITED_S, LONGEST_S = 3.0, 30.0, 3.0
"""Sleeps of a pass: so long over the passes of a stage, since events come with a delay; so long over what is left of the
stage while a worker is awaited; and at most."""
SETTLED_STEPS = 2


@dataclass(frozen=True)
class Told:
    """What a run has told."""

    digests: dict[int, str]
    """By finished steps."""
    losses: np.ndarray
    weights: dict[str, torch.Tensor]
    """The entries of the model's `state_dict`, from the last checkpoint."""
    steps_on: dict[int, int]
    """Steps by the number of workers that took them."""
    planned: int
    """Workers that were killed on purpose, with their nodes or alone."""
    lost: int
    """Workers that the run told as lost."""
    joined: int
    """Workers that came after the first ones, replacements included."""
    restores: int
    """Starts from a checkpoint."""
    is_played: bool
    """Whether the story came to its end before the run did."""
    step_ms: float
    """Median; with the sleeps, where there are any."""


class Story(NullViewer):
    """Does to a run what belongs to its three stages.

    Args:
        machine: has as many nodes of one CPU as the first stage has workers.
        pace: file that holds the sleep of a pass.
        num_steps: of the run.
    """

    def __init__(self, machine: Machine, pace: Path, num_steps: int) -> None:
        self._machine, self._pace, self._third = machine, pace, num_steps // len(STAGES)
        self.planned, self.is_played, self._awaits, self._stage = 0, False, False, 1
        self._finished, self._newest, self._since = 0, None, 0
        self._gone: set[str] = set()
        self._slow_down()
        self._parts = self._told()
        self._holds = next(self._parts)

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StepsDone):
                self._finished = max(self._finished, event.first_step + len(event.losses))
            elif isinstance(event, GenerationFormed):
                self._newest = event
            elif isinstance(event, WorkerLost):
                self._gone.add(event.worker)
        if self._awaits:
            self._slow_down()

    def tick(self, now: float) -> None:
        while not self.is_played and self._holds():
            following = next(self._parts, None)
            self.is_played = following is None
            self._holds = following or self._holds

    def _told(self) -> Iterator[Callable[[], bool]]:
        """What is done, and between two things what is waited for."""
        yield self._trains(STAGES[0])
        self._kill(RANKS_KILLED[0])
        yield self._trains(STAGES[0])
        yield self._finishes_stage()
        self._take(RANKS_TAKEN)
        yield self._trains(STAGES[1])
        self._kill(RANKS_KILLED[1])
        yield self._trains(STAGES[1])
        yield self._finishes_stage()
        self._since = self._newest.generation
        self._slow_down()
        self._machine.add()
        yield self._trains(STAGES[2])
        self._kill(RANKS_KILLED[2])
        yield self._trains(STAGES[2])
        self._hurry(0.0)

    def _trains(self, num_workers: int) -> Callable[[], bool]:
        """So many workers, all still there, have taken some steps together since the last change."""

        def check() -> bool:
            formed = self._newest
            if formed is None or formed.generation <= self._since or len(formed.members) != num_workers:
                return False
            is_whole = not any(member.worker in self._gone for member in formed.members)
            return is_whole and self._finished >= formed.step + SETTLED_STEPS

        return check

    def _finishes_stage(self) -> Callable[[], bool]:
        self._hurry(STAGE_S / self._third)
        end, self._stage = self._stage * self._third, self._stage + 1
        return lambda: self._finished >= end

    def _kill(self, rank: int) -> None:
        self._since, self.planned = self._newest.generation, self.planned + 1
        self._slow_down()
        os.kill(self._newest.members[rank].pid, signal.SIGKILL)

    def _take(self, ranks: Sequence[int]) -> None:
        self._since, self.planned = self._newest.generation, self.planned + len(ranks)
        self._slow_down()
        for raylet in [parent_of(self._newest.members[rank].pid) for rank in ranks]:
            self._machine.take(raylet)

    def _slow_down(self) -> None:
        self._awaits = True
        left = max(1, self._stage * self._third - self._finished)
        self._write_pace(min(LONGEST_S, AWAITED_S / left))

    def _hurry(self, pass_s: float) -> None:
        self._awaits = False
        self._write_pace(pass_s)

    def _write_pace(self, seconds: float) -> None:
        fresh = self._pace.with_suffix(".new")
        fresh.write_text(f"{seconds:.3f}")
        fresh.rename(self._pace)


class Runs:
    """Takes the runs of a benchmark one after the other, on one cluster of this machine.

    Args:
        machine: a head without CPUs; this process is connected to it.
        scratch: directory for what the runs write.
        num_steps: of each run; a multiple of three.
    """

    def __init__(self, machine: Machine, scratch: Path, num_steps: int) -> None:
        self._machine, self._scratch, self._num_steps = machine, scratch, num_steps
        self._num_nodes = 0

    def elastic(self, kind: str, mode: str) -> Told:
        self._fill()
        pace = self._scratch / "pace"
        story = Story(self._machine, pace, self._num_steps)
        try:
            return self._run(kind, mode, (1, MOST_NODES), story, str(pace))
        finally:
            self._num_nodes = STAGES[-1]
            pace.unlink(missing_ok=True)

    def fixed(self, kind: str, mode: str, num_workers: int) -> Told:
        self._fill()
        return self._run(kind, mode, (num_workers, num_workers), NullViewer())

    def _fill(self) -> None:
        while self._num_nodes < MOST_NODES:
            self._machine.add()
            self._num_nodes += 1

    def _run(self, kind: str, mode: str, workers: tuple[int, int], viewer: Viewer, pace: str = "") -> Told:
        config = raytrain.RunConfig(
            name=f"{kind}-{mode}-{workers[0]}-{workers[1]}",
            storage=str(self._scratch),
            workers=workers,
            logical_workers=NUM_LOGICAL,
            global_batch=GLOBAL_BATCH,
            steps=self._num_steps,
            checkpoint_every=self._num_steps,
            exactness=mode,
            digest=f"every:{self._num_steps // len(STAGES)}",
            threads_per_worker=1,
        )
        trainer = raytrain.Trainer(Exact(kind=kind, pace=pace), config)
        trainer.fit(viewer)
        events, store = list(read(trainer.run_dir)), CheckpointStore(trainer.run_dir)
        records = curve(events).values()
        return Told(
            digests={step: told.digest for step, told in digests(events).items()},
            losses=np.array([record.loss for record in records]),
            weights=dict(safetensors.torch.load(store.read(store.newest_verified(), "model.safetensors"))),
            steps_on=steps_on(events, self._num_steps),
            planned=getattr(viewer, "planned", 0),
            lost=sum(isinstance(event, WorkerLost) for event in events),
            joined=num_joined(events),
            restores=sum(isinstance(event, StateRestored) and bool(event.checkpoint) for event in events),
            is_played=getattr(viewer, "is_played", True),
            step_ms=1000 * median_of(list(np.diff([record.finished for record in records]))),
        )


def steps_on(events: Sequence[Event], num_steps: int) -> dict[int, int]:
    """How many of the steps each number of workers took, the largest number first; for a run that never went back."""
    formed = [event for event in events if isinstance(event, GenerationFormed)]
    counts: Counter[int] = Counter()
    for event, following in itertools.pairwise([*formed, None]):
        counts[len(event.members)] += (following.step if following else num_steps) - event.step
    return {size: counts[size] for size in sorted(counts, reverse=True) if counts[size]}


def num_joined(events: Sequence[Event]) -> int:
    """How many workers trained that were not there at the beginning."""
    formed = [event for event in events if isinstance(event, GenerationFormed)]
    workers = [{member.worker for member in event.members} for event in formed]
    return len(set().union(*workers) - workers[0])
