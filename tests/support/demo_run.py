"""Canned events of a run that loses a worker and gains one, for the demos at the end of each console module.

Also what the golden frames of the tests are made of. No clock, no randomness: always the same run.
"""

from __future__ import annotations

import math

from raytrain.events import kinds

START = 1_700_000_000.0
"""Unix time in seconds at which the canned run begins."""


def demo_events(num_steps: int = 412, ended: bool = False) -> list[kinds.Event]:
    """The run up to `num_steps` finished steps; with its end if `ended`. A step takes 50 ms."""
    events: list[kinds.Event] = [_started(), kinds.StateRestored(time=START + 4, step=0, checkpoint="")]
    events.append(_formed(1, 0, [0, 1], "start", 0.0))
    for step in range(0, num_steps, 4):
        events += _happened_before(step)
        events.append(_steps(step, min(step + 4, num_steps)))
    if ended:
        events.append(kinds.RunEnded(time=_time(num_steps) + 0.5, outcome="completed", step=num_steps))
    return events


def _started() -> kinds.RunStarted:
    return kinds.RunStarted(
        time=START,
        name="digits",
        directory="/home/me/runs/digits",
        num_steps=460,
        steps_per_epoch=23,
        rows_per_epoch=1437,
        global_batch=64,
        num_logical=4,
        workers=(1, 2),
        num_parameters=9610,
    )


def _happened_before(step: int) -> list[kinds.Event]:
    now = _time(step)
    if step == 200:
        lost = kinds.WorkerLost(time=now, worker="w1", node="10.0.0.12", pid=4121, reason="killed (signal 9)")
        return [lost, _formed(2, step, [0], "loss", 0.012)]
    if step == 260:
        return [kinds.WorkerStarting(time=now, worker="w2", node="10.0.0.13", pid=5230)]
    if step == 320:
        return [_formed(3, step, [0, 2], "join", 0.034)]
    if step and step % 92 == 0:
        return [_evaluated(step), _saved(step)]
    if step == 404:
        return [kinds.OutputLine(time=now, rank=0, stream="stdout", text="[a line of the task's own]")]
    return []


def _evaluated(step: int) -> kinds.EvaluationDone:
    metrics = {"valid/loss": _loss(step) + 0.05, "valid/accuracy": 1 - _loss(step) / 8}
    return kinds.EvaluationDone(time=_time(step), step=step, metrics=metrics, rows=360, seconds=0.042, is_best=True)


def _saved(step: int) -> kinds.CheckpointSaved:
    return kinds.CheckpointSaved(
        time=_time(step), step=step, checkpoint=f"step-{step:08d}", size_bytes=78_336, seconds=0.021, stall_s=0.001
    )


def _formed(generation: int, step: int, workers: list[int], cause: str, pause_s: float) -> kinds.GenerationFormed:
    share = 4 // len(workers)
    members = [
        kinds.Member(
            worker=f"w{worker}",
            rank=rank,
            node=f"10.0.0.{11 + worker}",
            pid=(4120, 4121, 5230)[worker],
            logical=list(range(rank * share, (rank + 1) * share)),
        )
        for rank, worker in enumerate(workers)
    ]
    return kinds.GenerationFormed(
        time=_time(step), generation=generation, step=step, members=members, pause_s=pause_s, cause=cause
    )


def _steps(first: int, stop: int) -> kinds.StepsDone:
    steps = range(first, stop)
    return kinds.StepsDone(
        time=_time(stop),
        first_step=first,
        losses=[_loss(step) for step in steps],
        weights=[64.0] * len(steps),
        rows=[64 if step % 23 < 22 else 29 for step in steps],
        learning_rates=[0.05 * (1 + math.cos(math.pi * step / 460)) for step in steps],
        finished=[_time(step + 1) for step in steps],
    )


def _loss(step: int) -> float:
    return 2.3 * math.exp(-step / 70) + 0.08 + 0.04 * math.sin(step * 1.7) * math.exp(-step / 200)


def _time(step: int) -> float:
    return START + 5 + 0.05 * step
