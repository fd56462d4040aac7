"""Evaluation on the current weights: every row of a source once, weighted, the same value for any number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from raytrain.data.loader import MicroBatch
from raytrain.errors import FourPartError, RaytrainError, TaskError
from raytrain.rendezvous.health import READING, WAITING
from raytrain.rendezvous.state import Signals
from raytrain.worker.context import WorkerContext
from raytrain.worker.group import Group
from raytrain.worker.heartbeat import HeartbeatSender
from raytrain.worker.hooks import shapes_of, user_code
from raytrain.worker.means import FirstRows
from raytrain.worker.metrics import Tallies, add_all, scalars_in, values_of
from raytrain.worker.scoring import Scorer, copied, evaluation_mode

SYNC_EVERY_STEPS = 4
"""The ranks wait for each other this often: a slow one does not run into a timeout, a lost one and signals are noticed."""

IN_EVALUATION = "in an evaluation"

Failure = TaskError | FourPartError
"""What the user's code or data may raise."""


class EvaluationInterrupted(RaytrainError):
    """All ranks have interrupted an evaluation because some drain or the run stops; it is repeated later."""

    def __init__(self, signals: Signals) -> None:
        super().__init__("an evaluation was interrupted")
        self.signals = signals


def evaluate(
    context: WorkerContext,
    model: torch.nn.Module,
    group: Group,
    name: str,
    assigned: range,
    pending: Callable[[], Signals] = Signals,
) -> dict[str, float]:
    """The metrics of one source, "<name>/loss" and "<name>/<metric>", the same on all ranks.

    The tallies of the logical workers are added in their order, so the values do not depend on how those are assigned to
    ranks, not even in the last bit.

    Args:
        pending: the signals of this rank so far; a stop or a drain interrupts the evaluation.

    Raises:
        EvaluationInterrupted: on all ranks.
        TaskError, FourPartError: on all ranks, if the user's code failed on one of them, or the data could not be read.
    """
    scorer, num_steps = Scorer(context, model), context.spec.plans[name].steps_per_epoch
    tallies: dict[int, Tallies] = defaultdict(dict)
    first_rows = FirstRows()
    failure: Failure | None = None
    with evaluation_mode(model), closing(context.loader(name, assigned, 0, num_steps)) as loader:
        for step in range(num_steps):
            if step % SYNC_EVERY_STEPS == 0:
                context.heartbeat.set_activity(WAITING)
                _check_signals(group, pending(), failure)
            if failure is not None:
                continue  # until all ranks know of it
            try:
                context.heartbeat.set_activity(READING)
                with user_code(f"transform, or reading, of {name!r} on rank {group.rank}"):
                    batches = loader.step(step)
                _score(context.heartbeat, scorer, first_rows, step, batches, tallies)
            except (TaskError, FourPartError) as error:
                failure = error
    values = _agree_on_values(context, group, scorer, dict(tallies), failure)
    return {f"{name}/{key}": value for key, value in values.items()}


def _agree_on_values(
    context: WorkerContext, group: Group, scorer: Scorer, tallies: dict[int, Tallies], failure: Failure | None
) -> dict[str, float]:
    """The values over all ranks, computed by the leader; raises on all ranks what failed on one."""
    context.heartbeat.set_activity(WAITING)
    of_ranks = group.all_gather_object((tallies, failure))
    _raise_first([failed for _, failed in of_ranks])
    values: dict[str, float] = {}
    if group.is_leader:
        context.heartbeat.set_activity(IN_EVALUATION)
        try:
            total = _added_up({logical: each for of_rank, _ in of_ranks for logical, each in of_rank.items()})
            values = values_of(context.spec.task, total, scorer.objects)
        except TaskError as error:
            failure = error
        context.heartbeat.set_activity(WAITING)
    values, failure = group.broadcast_object((values, failure))
    _raise_first([failure])
    return values


def _score(
    heartbeat: HeartbeatSender,
    scorer: Scorer,
    first_rows: FirstRows,
    step: int,
    batches: Mapping[int, Sequence[MicroBatch]],
    tallies: dict[int, Tallies],
) -> None:
    """Adds the micro-batches of one step. Scalars are checked on the first rows of logical worker 0, on whichever rank."""
    for logical, micros in batches.items():
        for number, micro in enumerate(micros):
            heartbeat.set_activity(IN_EVALUATION, shapes_of(micro.columns))
            is_first = logical == 0 and not first_rows.is_complete
            columns = copied(micro.columns) if is_first else micro.columns
            more = scorer(columns, len(micro.row_ids), (step, logical, number))
            add_all(tallies[logical], more)
            if is_first and scalars_in(more):
                first_rows.add(scorer, micro.columns, len(micro.row_ids))


def _check_signals(group: Group, pending: Signals, failure: Failure | None) -> None:
    mine = [pending.save, pending.stop, pending.drain, failure is not None]
    flags = torch.tensor(mine, dtype=torch.float64, device=group.device)
    save, stop, drain, failed = (value > 0 for value in group.all_reduce(flags).tolist())
    if failed:
        _raise_first(group.all_gather_object(failure))
    if stop or drain:
        raise EvaluationInterrupted(Signals(regroup=drain, save=save, stop=stop, drain=drain))


def _raise_first(failures: Sequence[Failure | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


def _added_up(of_logical: Mapping[int, Tallies]) -> Tallies:
    total: Tallies = {}
    for logical in sorted(of_logical):
        add_all(total, of_logical[logical])
    return total
