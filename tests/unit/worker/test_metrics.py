"""Metrics that are not means of rows: exact for any ranks and micro-batches, or refused with what to write instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import raytrain
from raytrain.data.loader import Batch
from raytrain.errors import ConfigError, TaskError
from raytrain.worker.means import check_means
from raytrain.worker.scoring import Scorer, evaluation_mode
from tests.support.tasks import NUM_VALID, Regression
from tests.unit.worker.test_evaluation import context, evaluated, model_of, valid_rows

SPLITS = [(num_ranks, micro_batch) for num_ranks in (1, 3) for micro_batch in (None, 2)]


def predicted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and classes of rows, shape [rows] each: whether the target is above 0."""
    return model(batch["x"])[:, 0].sigmoid(), batch["y"][:, 0] > 0


def f1(true: Any, found: Any, wanted: Any) -> Any:
    return 2 * true / (found + wanted)


class BySums(Regression):
    """F1, perplexity, a count and a confusion matrix from sums over rows."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        score, is_true = predicted(model, batch)
        found = score > 0.5
        cells = F.one_hot(2 * found.long() + is_true, 4).sum(0)
        loss = F.binary_cross_entropy(score, is_true.float(), reduction="sum")
        return {"cells": raytrain.Sum(cells), "nats": raytrain.Sum(loss), "rows": raytrain.Sum(len(score))}

    def summarise(self, sums: Any) -> dict[str, Any]:
        _, fn, fp, tp = sums["cells"]
        return {"f1": f1(tp, fp + tp, fn + tp), "ppl": (sums["nats"] / sums["rows"]).exp(), "rows": int(sums["rows"])}


class ByObjects(Regression):
    """The same and more with torchmetrics: states that are sums, lists, maxima, and without a reduction."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        score, is_true = predicted(model, batch)
        kinds = torchmetrics.classification
        made = {"f1": kinds.BinaryF1Score(), "auroc": kinds.BinaryAUROC(), "pearson": torchmetrics.PearsonCorrCoef()}
        for metric in made.values():
            metric.update(score, is_true.float() if metric is made["pearson"] else is_true)
        made["max"] = torchmetrics.MaxMetric()
        made["max"].update(score)
        return made


def over_all_rows(task: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model, rows = model_of(task), valid_rows(task)
    with torch.no_grad():
        return model, *predicted(model, rows)


@pytest.mark.parametrize(("num_ranks", "micro_batch"), SPLITS)
def test_r5_sums_over_rows_give_f1_perplexity_and_counts_of_one_process(num_ranks: int, micro_batch: int | None) -> None:
    task = BySums()
    model, score, is_true = over_all_rows(task)
    metrics = evaluated(context(task, micro_batch=micro_batch), model, num_ranks)
    wanted = f1(int((is_true & (score > 0.5)).sum()), int((score > 0.5).sum()), int(is_true.sum()))
    loss = F.binary_cross_entropy(score, is_true.float()).item()
    expected = {"valid/f1": wanted, "valid/ppl": math.exp(loss), "valid/rows": NUM_VALID}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert "valid/cells" not in metrics


@pytest.mark.parametrize(("num_ranks", "micro_batch"), SPLITS)
def test_r5_torchmetrics_objects_give_the_value_of_one_process(num_ranks: int, micro_batch: int | None) -> None:
    task = ByObjects()
    model, score, is_true = over_all_rows(task)
    metrics = evaluated(context(task, micro_batch=micro_batch), model, num_ranks)
    kinds = torchmetrics.functional
    expected = {
        "valid/f1": kinds.classification.binary_f1_score(score, is_true),
        "valid/auroc": kinds.classification.binary_auroc(score, is_true),
        "valid/pearson": kinds.pearson_corrcoef(score, is_true.float()),
        "valid/max": score.max(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)


class Held(nn.Linear):
    """A model that holds its metric, as in Lightning."""

    def __init__(self) -> None:
        super().__init__(12, 1)
        self.f1, self.memory = torchmetrics.classification.BinaryF1Score(), Memory()


class Memory(nn.Identity):
    """A part of a model with methods of the same names."""

    def reset(self) -> None:
        raise AssertionError("it is not a metric")

    update = compute = reset


class ByHeld(Regression):
    def model(self) -> nn.Module:
        return Held()

    def metrics(self, model: Any, batch: Any) -> Any:
        model.f1.update(*predicted(model, batch))
        return {"f1": model.f1}


def test_an_object_that_the_model_holds_counts_no_rows_of_training_or_of_an_evaluation_before() -> None:
    task = ByHeld()
    model, score, is_true = over_all_rows(task)
    model.f1.update(torch.ones(50), torch.ones(50))  # type: ignore[operator,union-attr]
    expected = float(torchmetrics.functional.classification.binary_f1_score(score, is_true))
    for _ in range(2):
        assert evaluated(context(task), model, 2)["valid/f1"] == pytest.approx(expected)


def perplexity(model: nn.Module, batch: Any) -> Any:
    score, is_true = predicted(model, batch)
    return F.binary_cross_entropy(score, is_true.float()).exp()


def f1_score(model: nn.Module, batch: Any) -> Any:
    score, is_true = predicted(model, batch)
    return f1((is_true & (score > 0.5)).sum(), (score > 0.5).sum(), is_true.sum()).item()


def auc(model: nn.Module, batch: Any) -> Any:
    score, is_true = predicted(model, batch)
    if is_true.all() or not is_true.any():
        raise ValueError("Only one class present in y_true")
    return float(torchmetrics.functional.classification.binary_auroc(score, is_true))


def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
    """One value per row that depends on random numbers."""
    return (model(batch["x"])[:, 0] + torch.randn(len(batch["x"]))).square()


NOT_MEANS = {
    "f1": f1_score,
    "perplexity": perplexity,
    "auc": auc,
    "count": lambda model, batch: (model(batch["x"]) > 0).sum(),
    "maximum": lambda model, batch: model(batch["x"]).max(),
    "root": lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"]).sqrt(),
    "tokens": lambda model, batch: (model(batch["x"])[:, 0] * batch["length"]).sum() / batch["length"].sum(),
    "noisy sum": lambda model, batch: noisy(model, batch).sum(),
}


def checked(precision: str = "fp32", **hooks: Any) -> None:
    """Checks the scalars of a task named Mine with these hooks."""
    task = type("Mine", (Regression,), hooks)()
    model = model_of(task)
    with evaluation_mode(model):
        check_means(Scorer(context(task, precision=precision), model), Batch(valid_rows(task)), NUM_VALID)


@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in NOT_MEANS), ("f1", "bf16"), ("count", "bf16")])
def test_r5_a_scalar_that_is_not_the_mean_over_rows_is_refused(name: str, precision: str) -> None:
    scalar = NOT_MEANS[name]
    with pytest.raises(ConfigError) as caught:
        checked(precision, loss=lambda self, model, batch: scalar(model, batch))
    assert (caught.value.where, "raytrain.Loss(sum, weight)" in caught.value.fix) == ("Mine.loss", True)
    with pytest.raises(ConfigError) as caught:
        checked(precision, metrics=lambda self, model, batch: {"m": scalar(model, batch)})
    assert (caught.value.where, "summarise" in caught.value.fix) == ("Mine.metrics, m", True)


@pytest.mark.parametrize(("num_ranks", "settings"), [(1, {"global_batch": 32}), (3, {"micro_batch": 1, "global_batch": 8})])
def test_r5_an_evaluation_checks_scalars_in_its_first_rows_on_whichever_rank(num_ranks: int, settings: Any) -> None:
    class Mine(Regression):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"f1": f1_score(model, batch)}

    with pytest.raises(ConfigError, match=r"(?s)Mine.metrics, f1.*as the mean over 4 parts of the same 8 rows"):
        evaluated(context(Mine(), **settings), model_of(Mine()), num_ranks)


class AcrossRows(nn.Module):
    """Its output for a row depends on the other rows, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"score": self.last(self.norm(x)), "scale": 1.0}


MEANS = {
    "mean": lambda model, batch: F.l1_loss(model(batch["x"]), batch["y"]),
    "accuracy": lambda model, batch: ((model(batch["x"]) > 0) == (batch["y"] > 0)).float().mean(),
    "half": lambda model, batch: model(batch["x"]).bfloat16().abs().mean(),
    "with a penalty": lambda model, batch: model(batch["x"]).mean() + 0.1 * model[0].weight.square().sum(),
    "constant": lambda model, batch: 3,
    "one that needs two rows": lambda model, batch: batch["y"].squeeze().sum(0) / len(batch["y"].squeeze()),
    "noisy": lambda model, batch: noisy(model, batch).mean(),
    "not a number": lambda model, batch: batch["y"].mean() * math.nan,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MEANS)
def test_r5_a_scalar_that_is_the_mean_over_rows_is_taken(name: str, precision: str) -> None:
    checked(precision, metrics=lambda self, model, batch: {"m": MEANS[name](model, batch)})


def test_a_mean_over_outputs_that_depend_on_other_rows_is_a_mean() -> None:
    hooks = {"loss": lambda self, model, batch: F.mse_loss(model(batch["x"])["score"], batch["y"])}
    checked(model=lambda self: AcrossRows(), metrics=lambda self, model, batch: {}, **hooks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: raytrain.Sum("5"), r"m returned Sum\(str\); a Sum holds a number or a tensor"),  # type: ignore[arg-type]
        (lambda: raytrain.Sum(torch.ones(3)), r"summarise\['m'\] returned shape \(3,\); it returns one number: define"),
        (torchmetrics.MeanMetric, "m returned a MeanMetric without rows"),
        (lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()), "which is made of other metrics"),
        (lambda: torchmetrics.MetricCollection([torchmetrics.MeanMetric()]), "which is made of other metrics"),
    ],
)
def test_r17_what_cannot_be_added_up_is_refused_and_named(value: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Regression, "metrics", lambda self, model, batch: {"m": value()})
    task = Regression()
    with pytest.raises(TaskError, match=text):
        evaluated(context(task), model_of(task))
