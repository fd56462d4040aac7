"""A canned sweep in which most trials are stopped early, one fails and workers move, for the demos of its viewers.

Also what the golden frames of the tests are made of. No clock, no randomness: always the same sweep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from raytrain.events.sweep import COMPLETED, FAILED, RUNNING, STOPPED, SweepView, TrialView

START = 1_700_000_000.0
"""Unix time in seconds at which the canned sweep begins."""

METRIC = "valid/accuracy"
NUM_STEPS = 460
RUNGS = (92, 230)
"""Steps at which trials below the median are stopped."""

STEPS_PER_EVALUATION = 23
NUM_WORKERS, NUM_AT_A_TIME = 8, 4
STEPS_PER_S = 5
"""Steps that one worker does in a second."""

NUM_DOOMED, DOOMED_STEP = 6, 46
FAILURE = (
    'Traceback (most recent call last):\n  File "digits.py", line 41, in loss\nValueError: the loss is not finite\n'
    "raised by loss at step 46 on rank 0"
)


def demo_views(num_trials: int = 20) -> Iterator[tuple[float, SweepView]]:
    """(Unix time, the sweep at that time), one a second from its start to its end."""
    view = SweepView(
        name="digits", directory="/home/me/runs/digits", metric=METRIC, mode="max", num_trials=num_trials, started=START
    )
    now = START
    while not view.outcome:
        yield now, view
        now += 1
        view = _second_later(view)
    yield now, view


def _second_later(view: SweepView) -> SweepView:
    trials = [_trained(trial) for trial in view.trials]
    trials = [_judged(trial, trials) for trial in trials]
    running = [trial for trial in trials if trial.state == RUNNING]
    num_new = min(NUM_AT_A_TIME - len(running), view.num_trials - len(trials))
    trials += [_new(number) for number in range(len(trials), len(trials) + num_new)]
    trials = _shared_out(trials)
    done = len(trials) == view.num_trials and not any(trial.state == RUNNING for trial in trials)
    return replace(view, trials=tuple(trials), outcome="completed" if done else "")


def _new(number: int) -> TrialView:
    even = (number * 0.618034) % 1  # the golden ratio spreads them evenly
    values: dict[str, Any] = {"lr": 10 ** (even * 3 - 3.5), "hidden": (64, 128, 256)[number % 3]}
    return TrialView(name=f"trial-{number:04d}", state=RUNNING, values=values, num_steps=NUM_STEPS)


def _trained(trial: TrialView) -> TrialView:
    if trial.state != RUNNING:
        return trial
    limit = next((rung for rung in RUNGS if trial.step < rung), NUM_STEPS)
    step = min(trial.step + STEPS_PER_S * trial.workers, limit)
    at = range(trial.step // STEPS_PER_EVALUATION + 1, step // STEPS_PER_EVALUATION + 1)
    points = [(STEPS_PER_EVALUATION * i, _accuracy(trial, STEPS_PER_EVALUATION * i)) for i in at]
    return replace(trial, step=step, curve=(*trial.curve, *points))


def _accuracy(trial: TrialView, step: int) -> float:
    rate = math.log10(trial.values["lr"]) + 1.2  # 0 for the best learning rate
    top: float = 0.98 - 0.15 * rate * rate - 4 / trial.values["hidden"]
    return top * (1 - math.exp(-step / 60)) + 0.01 * math.sin(step * 1.7) * math.exp(-step / 200)


def _judged(trial: TrialView, trials: list[TrialView]) -> TrialView:
    if trial.state != RUNNING:
        return trial
    if trial.step >= DOOMED_STEP and trial.name == f"trial-{NUM_DOOMED:04d}":
        return replace(trial, state=FAILED, step=DOOMED_STEP, workers=0, message=FAILURE)
    if trial.step == NUM_STEPS:
        return replace(trial, state=COMPLETED, workers=0)
    if trial.step in RUNGS:
        others = sorted(dict(other.curve)[trial.step] for other in trials if trial.step in dict(other.curve))
        if dict(trial.curve)[trial.step] < others[len(others) // 2]:
            return replace(trial, state=STOPPED, workers=0)
    return trial


def _shared_out(trials: list[TrialView]) -> list[TrialView]:
    """All workers go to the trials that run, as evenly as it goes, more to the earlier ones."""
    names = [trial.name for trial in trials if trial.state == RUNNING]
    shares = {name: (NUM_WORKERS + len(names) - 1 - i) // len(names) for i, name in enumerate(names)}
    return [replace(trial, workers=shares.get(trial.name, 0)) for trial in trials]
