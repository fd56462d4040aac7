"""What would fail long after the start is tried at the start: evaluations, and saving and loading the state.

Runs in the worker's training thread, after the warm-up pass; leaves no trace in the state.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator

import numpy as np

from raytrain.checkpoint.state import check_restorable, check_savable
from raytrain.config import RunConfig
from raytrain.errors import ConfigError, TaskError, UnsavableError
from raytrain.worker.buffers import unchanged_buffers
from raytrain.worker.context import RunSpec, WorkerContext
from raytrain.worker.hooks import user_code
from raytrain.worker.means import FEW_ROWS, check_means
from raytrain.worker.metrics import scalars_in, values_of
from raytrain.worker.scoring import Scorer, copied, evaluation_mode
from raytrain.worker.state import TrainState, first_batch


def sanity_check(context: WorkerContext, state: TrainState) -> None:
    """Evaluates the first rows of each source, and saves and loads the state in memory.

    Raises:
        TaskError: `loss` or `metrics` raised in evaluation.
        ConfigError: a scalar is not a mean, a metric that decides something is not evaluated, or the state cannot be saved.
    """
    with unchanged_buffers(state.model), evaluation_mode(state.model):
        names = [name for source in context.spec.eval_names for name in _evaluate(context, state, source)]
        _check_means(context, Scorer(context, state.model), "train")
    state.clear_gradients()
    _check_metric_names(context.spec.config, state, names)
    with _savable(context.spec), user_code("load_state_dict of the optimizer or the scheduler"):
        check_restorable(state.model, state.optimizer, state.scheduler)


def check_savable_state(spec: RunSpec, state: TrainState) -> None:
    """Checks that a checkpoint can hold the state, without copying it.

    Raises:
        ConfigError: it cannot.
    """
    with _savable(spec):
        check_savable(state.model, state.optimizer, state.scheduler)


@contextlib.contextmanager
def _savable(spec: RunSpec) -> Iterator[None]:
    try:
        yield
    except UnsavableError as error:
        where, rule = f"state of {type(spec.task).__name__}", "what training needs can be saved and loaded"
        raise ConfigError(where, f"{error.where} {error.what}", rule, error.fix) from None


def _evaluate(context: WorkerContext, state: TrainState, source: str) -> list[str]:
    """Scores the first micro-batch of a source; returns the names of its metrics, as far as they can be known from it."""
    plan, size = context.spec.plans[source], context.spec.config.micro_batch
    if not plan.num_rows:
        return []
    rows = plan.row_ids(0, 0)[:size]
    scorer, columns = Scorer(context, state.model), first_batch(context.spec, source, rows)
    tallies = scorer(copied(columns), len(rows), (0, 0))
    if scalars_in(tallies):
        _check_means(context, scorer, source)
    with contextlib.suppress(TaskError):  # so few rows may be too few
        names = list(values_of(context.spec.task, tallies, scorer.objects))
        return [f"{source}/{kind}{name}" for kind in (("", "ema/") if state.ema else ("",)) for name in names]
    return []


def _check_means(context: WorkerContext, scorer: Scorer, source: str) -> None:
    """Checks scalars on the first micro-batch of a source, or on more rows if that has few."""
    plan, size = context.spec.plans[source], context.spec.config.micro_batch
    rows = plan.row_ids(0, 0)[:size]
    if len(rows) < FEW_ROWS:
        rows = np.arange(min(FEW_ROWS, plan.num_rows))
    with contextlib.suppress(TaskError):  # so many rows may be too many, and a loss need not work in evaluation mode
        check_means(scorer, first_batch(context.spec, source, rows), len(rows), with_metrics=source != "train")


def _check_metric_names(config: RunConfig, state: TrainState, names: list[str]) -> None:
    """Checks that the metrics that decide something are evaluated. `names` is empty if they are not known."""
    needed = {}
    if config.best != RunConfig.model_fields["best"].default:
        needed["run.best"] = config.best_metric
    if state.schedule is not None and state.schedule.metric:
        needed["scheduler"] = state.schedule.metric
    for where, metric in needed.items():
        if names and metric not in names:
            near = difflib.get_close_matches(metric, names, n=1, cutoff=0.0)
            rule = "is a metric of an evaluation: " + ", ".join(names)
            raise ConfigError(where, metric, rule, f"did you mean {near[0]}?" if near else "choose one of them")
