"""Evaluation gives the value of a plain loop over all rows, whatever the shares and the number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raytrain
from raytrain.config import RunConfig
from raytrain.errors import TaskError
from raytrain.launch.work import schedule
from raytrain.plan.layout import held_by
from raytrain.rendezvous.generation import Signals
from raytrain.rendezvous.vitals import READING, WAITING
from raytrain.worker.evaluation import IN_EVALUATION, BrokenOff, evaluate
from raytrain.worker.surroundings import Surroundings
from tests.support.tasks import NUM_VALID, Regression, WithDropout, WithTokenWeights
from tests.unit.worker.marks import Marks

CPU = torch.device("cpu")
NUM_LOGICAL = 4


class Ranks:
    """Gathers what the ranks of a group have, one rank after the other in one process."""

    device, rank = CPU, 0

    def __init__(self) -> None:
        self.values: list[Any] = []

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    def gather(self, value: Any) -> list[Any]:
        self.values.append(value)
        return self.values


def surroundings(task: Any, **settings: Any) -> Surroundings:
    config = RunConfig(**{"logical_workers": NUM_LOGICAL, "global_batch": 10, "seed": 5} | settings)
    work = schedule(task, config)
    nobody: Any = None
    return Surroundings(
        task=task,
        config=config,
        sources=work.sources,
        plans=work.plans,
        num_steps=work.num_steps,
        run_facts={},
        rendezvous=nobody,
        store=nobody,
        telemetry=nobody,
        pulse=Marks(),
        worker="w0",
        host="127.0.0.1",
        node_id="",
        pid=1,
        device=CPU,
    )


def evaluated(around: Surroundings, model: nn.Module, num_ranks: int = 1) -> dict[str, float]:
    ranks: Any = Ranks()
    for rank in range(num_ranks):
        metrics = evaluate(around, model, ranks, "valid", held_by(rank, num_ranks, NUM_LOGICAL))
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
    metrics = evaluated(surroundings(task, micro_batch=micro_batch), model, num_ranks)
    model.eval()
    with torch.no_grad():
        output = model(rows["x"])
    assert metrics == pytest.approx(
        {
            "valid/loss": float(F.mse_loss(output, rows["y"])),
            "valid/mae": float(F.l1_loss(output, rows["y"])),
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_r5_r4_tokens_are_the_weights_of_uneven_rows(num_ranks: int) -> None:
    task = WithTokenWeights()
    model, rows = model_of(task), valid_rows(task)
    metrics = evaluated(surroundings(task), model, num_ranks)
    with torch.no_grad():
        each = (model(rows["x"]) - rows["y"]).pow(2).sum(1)
    expected = float((each * rows["length"]).sum() / rows["length"].sum())
    assert metrics["valid/loss"] == pytest.approx(expected, rel=1e-6)


def test_the_number_of_ranks_does_not_change_a_single_bit() -> None:
    task = WithTokenWeights()
    model = model_of(task)
    first, *others = [evaluated(surroundings(task), model, num_ranks) for num_ranks in (1, 2, 3, 4)]
    assert others == [first] * 3


def test_dropout_is_off_and_no_gradient_is_left() -> None:
    task = WithDropout()
    model = model_of(task).train()
    around = surroundings(task)
    assert evaluated(around, model) == evaluated(around, model)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


class Counting(Regression):
    """The share of rows as a metric; the mean of a bool per row, and a Python number."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"even": batch["row"] % 2 == 0, "one": 1, "length": raytrain.Loss(batch["length"].sum(), len(batch["row"]))}


def test_metrics_have_the_forms_of_a_loss() -> None:
    task = Counting()
    rows = valid_rows(task)
    metrics = evaluated(surroundings(task), model_of(task), 2)
    assert metrics["valid/one"] == 1.0
    assert metrics["valid/even"] == pytest.approx(float((rows["row"] % 2 == 0).double().mean()))
    assert metrics["valid/length"] == pytest.approx(float(rows["length"].double().mean()))


class WrongMetric(Regression):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"accuracy": "high"}


class FailingMetric(Regression):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        raise IndexError("out of range")


@pytest.mark.parametrize(
    ("task", "text"),
    [(WrongMetric(), "accuracy returned str"), (FailingMetric(), "out of range\nraised by metrics in evaluation")],
)
def test_r17_a_wrong_metric_is_named(task: Any, text: str) -> None:
    with pytest.raises(TaskError) as caught:
        evaluated(surroundings(task), model_of(task))
    assert text in str(caught.value)


def test_more_logical_workers_than_rows_are_no_problem() -> None:
    class Few(Regression):
        def data(self) -> dict[str, Any]:
            sources = super().data()
            return sources | {"valid": raytrain.arrays(**sources["valid"].take(np.arange(3)))}

    task = Few()
    model = model_of(task)
    metrics = evaluated(surroundings(task), model, 4)
    columns = task.data()["valid"].take(np.arange(3))
    with torch.no_grad():
        expected = F.mse_loss(model(torch.from_numpy(columns["x"])), torch.from_numpy(columns["y"]))
    assert metrics["valid/loss"] == pytest.approx(float(expected), rel=1e-6)


def test_evaluation_uses_the_precision_of_the_run() -> None:
    seen: list[torch.dtype] = []

    class Watching(Regression):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            output = model(batch["x"])
            seen.append(output.dtype)
            return (output - batch["y"]).pow(2).sum(1)

    task = Watching()
    evaluated(surroundings(task, precision="bf16"), model_of(task))
    assert set(seen) == {torch.bfloat16}


def test_nothing_is_gathered_before_all_rows_are_seen() -> None:
    """So that a rank does not gather before another one, which has more to read, has seen its last row."""
    gathered = SimpleNamespace(num=0)

    class Once(Ranks):
        def gather(self, value: Any) -> list[Any]:
            gathered.num += 1
            return super().gather(value)

    group: Any = Once()
    task = Regression()
    evaluate(surroundings(task), model_of(task), group, "valid", range(NUM_LOGICAL))
    assert gathered.num == 1


def test_r6_it_is_marked_whether_it_reads_computes_or_waits_for_others() -> None:
    task = Regression()
    around = surroundings(task)
    evaluated(around, model_of(task))
    places = around.pulse.places  # type: ignore[attr-defined]
    assert places[:3] == [WAITING, READING, IN_EVALUATION]
    assert places[-1] == WAITING
    assert places.count(READING) == places.count(IN_EVALUATION)


@pytest.mark.parametrize("heard", [Signals(stop=True), Signals(gather=True, save=True, leave=True)])
def test_r16_what_one_rank_hears_breaks_the_evaluation_off_on_all(heard: Signals) -> None:
    class Others(Ranks):
        """One of the others hears it after a while."""

        num_sums = 0

        def sum(self, vector: torch.Tensor) -> torch.Tensor:
            self.num_sums += 1
            theirs = torch.tensor([heard.save, heard.stop, heard.leave], dtype=torch.float64)
            return vector + theirs if self.num_sums == 2 else vector

    task, others = Regression(), Others()
    around, group = surroundings(task, global_batch=4), others
    with pytest.raises(BrokenOff) as broken:
        evaluate(around, model_of(task), group, "valid", range(NUM_LOGICAL))  # type: ignore[arg-type]
    assert broken.value.signals == heard
    assert others.num_sums == 2
    assert not others.values, "nothing is gathered"
