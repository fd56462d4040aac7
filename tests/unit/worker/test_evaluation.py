"""Evaluation gives the value of a plain loop over all rows, whatever the shares and the number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raytrain
from raytrain.errors import TaskError
from raytrain.plan import logical_workers_of
from raytrain.rendezvous.health import READING, WAITING
from raytrain.rendezvous.state import Signals
from raytrain.worker.context import WorkerContext
from raytrain.worker.evaluation import IN_EVALUATION, EvaluationInterrupted, evaluate
from tests.support.tasks import NUM_VALID, Regression, WithAugmentation, WithDropout, WithTokenWeights
from tests.unit.worker.stubs import CPU, context_of, spec_of

NUM_LOGICAL = 4


class Ranks:
    """A group whose ranks run one after the other in one process."""

    device, rank, is_leader = CPU, 0, True

    def __init__(self) -> None:
        self.values: list[Any] = []

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    def all_gather_object(self, value: Any) -> list[Any]:
        self.values.append(value)
        return self.values

    def broadcast_object(self, value: Any) -> Any:
        return value


def context(task: Any, **settings: Any) -> WorkerContext:
    return context_of(spec_of(task, **{"logical_workers": NUM_LOGICAL, "global_batch": 10} | settings))


def evaluated(context: WorkerContext, model: nn.Module, num_ranks: int = 1) -> dict[str, float]:
    ranks: Any = Ranks()
    for rank in range(num_ranks):
        metrics = evaluate(context, model, ranks, "valid", logical_workers_of(rank, num_ranks, NUM_LOGICAL))
    return metrics


def model_of(task: Any) -> nn.Module:
    torch.manual_seed(3)
    return task.model()  # type: ignore[no-any-return]


def valid_rows(task: Any) -> dict[str, torch.Tensor]:
    columns = task.data()["valid"].take(np.arange(NUM_VALID))
    return {name: torch.from_numpy(values) for name, values in columns.items()}


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_r5_every_row_counts_once_in_means_of_uneven_shares(num_ranks: int, micro_batch: int | None) -> None:
    task = Regression()
    model, rows = model_of(task), valid_rows(task)
    metrics = evaluated(context(task, micro_batch=micro_batch), model, num_ranks)
    with torch.no_grad():
        output = model(rows["x"])
    expected = {"valid/loss": F.mse_loss(output, rows["y"]).item(), "valid/mae": F.l1_loss(output, rows["y"]).item()}
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_r5_r4_tokens_are_the_weights_of_uneven_rows_to_the_bit_for_any_ranks() -> None:
    task = WithTokenWeights()
    model, rows = model_of(task), valid_rows(task)
    first, *others = [evaluated(context(task), model, num_ranks) for num_ranks in (1, 2, 3, 4)]
    with torch.no_grad():
        each = (model(rows["x"]) - rows["y"]).pow(2).sum(1)
    expected = float((each * rows["length"]).sum() / rows["length"].sum())
    assert first["valid/loss"] == pytest.approx(expected, rel=1e-6)
    assert others == [first] * 3


def test_dropout_is_off_and_no_gradient_is_left() -> None:
    task = WithDropout()
    model = model_of(task).train()
    assert evaluated(context(task), model) == evaluated(context(task), model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_r5_rows_that_draw_random_numbers_are_alike_in_each_evaluation_for_any_ranks() -> None:
    task = WithAugmentation()
    model, of_run = model_of(task), context(task)
    first, *others = [evaluated(of_run, model, num_ranks) for num_ranks in (1, 1, 2, 3)]
    assert others == [first] * 3


class Forces(Regression):
    """Compares the gradient of the model's output with respect to its input."""

    def forces(self, model: nn.Module, batch: Any) -> torch.Tensor:
        at = batch["x"].requires_grad_()
        (found,) = torch.autograd.grad(model(at).sum(), at, create_graph=model.training)
        return found

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (self.forces(model, batch) - batch["y"]).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"force": self.forces(model, batch).square().sum(1)}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_loss_and_a_metric_that_differentiate_are_those_of_a_plain_loop(num_ranks: int) -> None:
    task = Forces()
    model = model_of(task).eval()
    metrics = evaluated(context(task, global_batch=32), model, num_ranks)
    rows = valid_rows(task)
    force = task.forces(model, rows).square().sum(1).mean()
    expected = {"valid/loss": float(task.loss(model, rows).detach()), "valid/force": float(force)}
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert evaluated(context(task, global_batch=32), model, num_ranks) == metrics


class Counting(Regression):
    """The share of rows as a metric; the mean of a bool per row, and a Python number."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"even": batch["row"] % 2 == 0, "one": 1, "length": raytrain.Loss(batch["length"].sum(), len(batch["row"]))}


def test_metrics_have_the_forms_of_a_loss() -> None:
    task = Counting()
    rows = valid_rows(task)
    metrics = evaluated(context(task), model_of(task), 2)
    assert metrics["valid/one"] == 1.0
    assert metrics["valid/even"] == pytest.approx(float((rows["row"] % 2 == 0).double().mean()))
    assert metrics["valid/length"] == pytest.approx(float(rows["length"].double().mean()))


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (lambda model, batch: {"accuracy": "high"}, "accuracy returned str"),
        (lambda model, batch: {"first": {}["missing"]}, "KeyError: 'missing'\nraised by metrics in evaluation"),
    ],
)
def test_r17_a_wrong_metric_is_named(metrics: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Regression()
    monkeypatch.setattr(Regression, "metrics", staticmethod(metrics))
    with pytest.raises(TaskError) as caught:
        evaluated(context(task), model_of(task))
    assert text in str(caught.value)


class FewInBf16(Regression):
    """Fewer rows than logical workers; notes the types of the outputs."""

    def data(self) -> dict[str, Any]:
        sources = super().data()
        return sources | {"valid": raytrain.arrays(**sources["valid"].take(np.arange(3)))}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(batch["x"])
        assert output.dtype == torch.bfloat16
        return (output - batch["y"]).pow(2).sum(1)


def test_fewer_rows_than_logical_workers_in_the_precision_of_the_run() -> None:
    task = FewInBf16()
    model, rows = model_of(task), task.data()["valid"].take(np.arange(3))
    metrics = evaluated(context(task, precision="bf16"), model, 4)
    with torch.no_grad():
        expected = F.mse_loss(model(torch.from_numpy(rows["x"])), torch.from_numpy(rows["y"]))
    assert metrics["valid/loss"] == pytest.approx(float(expected), rel=0.02)


def test_r6_the_activity_says_whether_it_reads_computes_or_waits() -> None:
    """Nothing is gathered before all rows are seen: a rank must not wait for one that has more to read."""
    task, group = Regression(), Ranks()
    of_run = context(task)
    evaluate(of_run, model_of(task), group, "valid", range(NUM_LOGICAL))  # type: ignore[arg-type]
    assert len(group.values) == 1
    places = of_run.heartbeat.activities  # type: ignore[attr-defined]
    assert (places[:3], places[-1]) == ([WAITING, READING, IN_EVALUATION], WAITING)
    num_calls = NUM_LOGICAL * places.count(READING) + 1  # of each micro-batch, and for the values at the end
    assert places.count(IN_EVALUATION) == num_calls


@pytest.mark.parametrize("pending", [Signals(stop=True), Signals(regroup=True, save=True, drain=True)])
def test_r16_a_signal_of_one_rank_interrupts_the_evaluation_on_all(pending: Signals) -> None:
    class Others(Ranks):
        """One of the others hears it after a while."""

        num_sums = 0

        def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
            self.num_sums += 1
            theirs = torch.tensor([pending.save, pending.stop, pending.drain, False], dtype=torch.float64)
            return vector + theirs if self.num_sums == 2 else vector

    task, others = Regression(), Others()
    of_run, group = context(task, global_batch=4), others
    with pytest.raises(EvaluationInterrupted) as broken:
        evaluate(of_run, model_of(task), group, "valid", range(NUM_LOGICAL))  # type: ignore[arg-type]
    assert broken.value.signals == pending
    assert others.num_sums == 2
    assert not others.values, "nothing is gathered"
