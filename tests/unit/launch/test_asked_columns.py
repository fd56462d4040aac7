"""Columns that hooks ask for are checked in the driver, where they are asked for in any case."""

from __future__ import annotations

from typing import Any

import pytest

import raytrain
from raytrain.config import RunConfig
from raytrain.data.in_memory import dataset
from raytrain.errors import DataError
from raytrain.launch.asked_columns import asked_columns
from raytrain.launch.schedule import build_schedule
from tests.unit.launch.test_resume import Line

PICTURES = [{"image": {"bytes": b"", "path": "a.png"}, "x": 1.0, "label": 1}] * 3


class Pictures(Line):
    def data(self) -> dict[str, Any]:
        return {"train": dataset(PICTURES), "valid": raytrain.arrays(x=[1.0], label=[1])}


class AsksInLoss(Pictures):
    def loss(self, model: Any, batch: Any) -> Any:
        """Of a picture."""
        import torch

        with torch.no_grad():
            return model(batch["x"] / batch["image"].max()).sum()


class AsksInTransform(Pictures):
    def transform(self, batch: Any) -> Any:
        label, pixels = batch["label"], [one["bytes"] for one in batch["image"]]
        return {"pixels": pixels, "label": label}


class Misspells(Pictures):
    def metrics(self, model: Any, batch: Any) -> Any:
        return {"accuracy": model(batch["lable"])}


@pytest.mark.parametrize("task", [AsksInLoss(), AsksInTransform()])
def test_r12_a_column_that_is_left_out_is_named_with_its_type_before_workers_start(task: Any) -> None:
    with pytest.raises(DataError) as caught:
        build_schedule(task, RunConfig())
    assert str(caught.value).startswith(f"{type(task).__name__}.")
    assert "source 'train'\n  value: column 'image' is left out: type object: {'bytes': b'', 'path': 'a.png'}" in str(
        caught.value
    )
    assert "raytrain.dataset(rows)" in caught.value.fix


def test_r12_a_misspelt_column_is_named_before_workers_start() -> None:
    with pytest.raises(DataError, match=r"Misspells.metrics, with source 'valid'\n.*'lable'\n.*\n.*did you mean 'label'"):
        build_schedule(Misspells(), RunConfig())


class MayAsk(Pictures):
    """Asks for columns that its data do not have only where that is never so, or in ways that cannot be judged."""

    def loss(self, model: Any, batch: Any) -> Any:
        x = batch["x"] if "image" not in batch else batch["image"]
        weight = hasattr(self, "never") and batch["weight"]
        first = (lambda: batch["first"], [batch["each"] for _ in ()])
        batch["made"] = x
        if weight:
            return batch["image"], first
        return model(batch["made"])

    def metrics(self, model: Any, batch: Any) -> Any:
        self.extend(batch)
        return {"made": batch["made"]}

    def extend(self, batch: Any) -> None:
        batch["made"] = batch["x"]


def test_columns_that_a_hook_may_not_ask_for_are_not_checked() -> None:
    assert build_schedule(MayAsk(), RunConfig()).num_steps == 1
    assert asked_columns(MayAsk().extend) == ["x"]
    assert asked_columns(eval("lambda model, batch: batch['x']")) == []
