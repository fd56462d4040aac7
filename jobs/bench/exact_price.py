"""What does `--run.exactness bitwise` cost in each step, and where does the time go? Measured for `exactness.py`.

Without Ray: as many processes as workers take steps of the product's own `TrainStep`, in a gloo group, in all modes in turn,
some steps of each and again. So all modes see the same minutes of the machine, and the same two processes. Left out is what
is the same in all modes: reading, telemetry, checkpoints. What part of a step takes how long is measured in steps of its
own, since that costs time, too.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from exact_models import GLOBAL_BATCH, NUM_LOGICAL, Exact
from workload import median_of

from raytrain.config import RunConfig
from raytrain.data.loader import MicroBatch, to_tensors
from raytrain.launch.schedule import build_schedule
from raytrain.plan import logical_workers_of
from raytrain.rendezvous.state import Generation, JoinRequest, Signals
from raytrain.worker.bitwise import ExactSum
from raytrain.worker.context import RunSpec
from raytrain.worker.group import Group
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.state import build_state
from raytrain.worker.step import StepBatches, TrainStep

DEFAULT, KERNELS, BITWISE = MODES = ("default", "deterministic kernels", "bitwise")
BLOCK, WARM_UP = 8, 2
"""Steps of a mode until the next one has its turn; and those before them that do not count."""
REST = "the rest"
PARTS = {
    (TrainStep, "_forward"): "passes",
    (TrainStep, "_backward"): "passes",
    (TrainStep, "_run_passes"): "seeds and small sums",
    (ExactSum, "begin"): "quantising",
    (ExactSum, "collect"): "quantising",
    (ExactSum, "reduce"): "reducing",
    (ExactSum, "_set_gradients"): "back to floats",
    (TrainStep, "_commit"): "optimizer",
    (TrainStep, "run"): REST,
}
"""Methods of the product by the part of a step that they are; what a method calls of the others is not counted to it."""


@dataclass(frozen=True)
class Price:
    """Of one model on one number of workers; milliseconds on rank 0."""

    step_ms: dict[str, float]
    """Median of all steps, by mode."""
    ratios: dict[str, list[float]]
    """To the default mode, by mode: of the medians of each turn, sorted."""
    parts_ms: dict[str, dict[str, float]]
    """Mean of each part of a step, by mode."""

    def ratio(self, mode: str) -> float:
        return median_of(self.ratios[mode])


def measure(kind: str, num_workers: int, num_turns: int) -> Price:
    """Takes `num_turns` turns of each mode, in as many new processes as there are workers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="exactness-") as scratch:
        arguments = (num_workers, os.path.join(scratch, "store"), kind, num_turns, theirs)
        processes = [context.Process(target=_work, args=(rank, *arguments)) for rank in range(num_workers)]
        for process in processes:
            process.start()
        theirs.close()
        try:
            times, parts = ours.recv()
        except EOFError:
            raise RuntimeError(f"{kind} on {num_workers}: a process has ended without a result") from None
        finally:
            for process in processes:
                process.join(60)
                process.kill()
    medians = {mode: [median_of(turn) for turn in times[mode]] for mode in MODES}
    ratios = {
        mode: sorted(ours / base for ours, base in zip(medians[mode], medians[DEFAULT], strict=True)) for mode in MODES
    }
    return Price({mode: median_of([time for turn in times[mode] for time in turn]) for mode in MODES}, ratios, parts)


def _work(rank: int, num_workers: int, store: str, kind: str, num_turns: int, result) -> None:
    """One worker; the first one sends (milliseconds of each step by mode and turn, milliseconds of parts by mode)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers)
    members = tuple(JoinRequest(f"w{number}", 0, ("", 0)) for number in range(num_workers))
    group = Group(Generation(1, members, "start"), rank, torch.device("cpu"))
    runners = {mode: Runner(kind, mode, group) for mode in MODES}
    times, parts = defaultdict(list), defaultdict(list)
    for turn in range(-1, num_turns):  # the first one is for the caches
        for mode in _rotated(turn):
            took = runners[mode].block()
            if turn >= 0:
                times[mode].append(took)
    watch = Stopwatch()
    for turn in range(max(2, num_turns // 3)):
        for mode in _rotated(turn):
            parts[mode].append(runners[mode].parts(watch))
    if rank == 0:
        result.send((dict(times), {mode: _means(some) for mode, some in parts.items()}))
    dist.barrier()
    os._exit(0)  # all is said; taking gloo's threads down now and then aborts the process (torch 2.13)


def _rotated(turn: int) -> list[str]:
    """The modes, each as often the first as the others."""
    first = turn % len(MODES)
    return [*MODES[first:], *MODES[:first]]


class Runner:
    """Takes steps in one mode.

    Args:
        kind: the model.
        mode: one of `MODES`.
        group: of the processes that do the same.
    """

    def __init__(self, kind: str, mode: str, group: Group) -> None:
        self._is_deterministic = mode != DEFAULT
        task = Exact(kind=kind)
        config = RunConfig(
            exactness="bitwise" if mode == BITWISE else "default", logical_workers=NUM_LOGICAL, global_batch=GLOBAL_BATCH
        )
        planned = build_schedule(task, config)
        spec = RunSpec(task, config, planned.sources, planned.plans, planned.num_steps, {}, "cpu")
        state = build_state(spec, group.device)
        state.step = 0
        self._train_step = TrainStep(spec, state, group, HeartbeatSender(NoRendezvous(), "", every_s=3600))
        assigned = logical_workers_of(group.rank, group.size, NUM_LOGICAL)
        epoch = [{logical: [_micro(spec, step, logical)] for logical in assigned} for step in range(spec.num_steps)]
        self._batches: Iterator[StepBatches] = itertools.cycle(epoch)

    def block(self) -> list[float]:
        """Milliseconds of each step that counts."""
        torch.use_deterministic_algorithms(self._is_deterministic)
        return [self._step() for _ in range(WARM_UP + BLOCK)][WARM_UP:]

    def parts(self, watch: Stopwatch) -> dict[str, float]:
        """Milliseconds of a step by its parts, the mean of a block."""
        torch.use_deterministic_algorithms(self._is_deterministic)
        for _ in range(WARM_UP):
            self._step()
        watch.clear()
        for _ in range(BLOCK):
            self._step()
        return {part: 1000 * seconds / BLOCK for part, seconds in watch.spent_s.items()}

    def _step(self) -> float:
        started = time.perf_counter()
        self._train_step.run(next(self._batches), GLOBAL_BATCH, Signals())
        return 1000 * (time.perf_counter() - started)


def _micro(spec: RunSpec, step: int, logical: int) -> MicroBatch:
    rows = spec.plan.row_ids(step, logical)
    return MicroBatch(to_tensors(spec.sources["train"].take(rows)), rows)


class NoRendezvous:
    """Stands in for the rendezvous: ignores heartbeats."""

    def heartbeat(self, heartbeat: object) -> bool:
        return False


class Stopwatch:
    """Seconds that the methods in `PARTS` take themselves, from now on, in this process."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self._inner_s = [0.0]
        """Of the methods that are running, the time of those that they called."""
        for (owner, name), part in PARTS.items():
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def clear(self) -> None:
        self.spent_s.clear()

    def _timed(self, method, part: str):
        @functools.wraps(method)
        def timed(*arguments):
            started = time.perf_counter()
            self._inner_s.append(0.0)
            try:
                return method(*arguments)
            finally:
                whole_s = time.perf_counter() - started
                self.spent_s[part] = self.spent_s.get(part, 0.0) + whole_s - self._inner_s.pop()
                self._inner_s[-1] += whole_s

        return timed


def _means(blocks: list[dict[str, float]]) -> dict[str, float]:
    """Mean over the blocks, in the order of `PARTS`."""
    known = dict.fromkeys(part for part in PARTS.values() if any(part in block for block in blocks))
    return {part: sum(block.get(part, 0.0) for block in blocks) / len(blocks) for part in known}
