"""A run goes on only where that was asked for, with what its result depends on unchanged; what differs is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.config import RunConfig
from raytrain.data import arrays
from raytrain.errors import ResumeError
from raytrain.launch.resume import (
    check_same,
    describe,
    differences,
    earlier_facts,
    list_differences,
    with_logical_workers,
)
from raytrain.launch.work import schedule
from raytrain.rundir import RUN, RunDir
from raytrain.task import Task
from tests.golden import check


class Line(Task):
    lr: float = 0.1
    num_rows: int = 8

    def data(self) -> Mapping[str, Any]:
        return {"train": arrays(x=torch.arange(float(self.num_rows)))}

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch["x"][:, None]).mean(1)
        return result


def facts(task: Task | None = None, **settings: Any) -> dict[str, Any]:
    task, config = task or Line(), RunConfig(**{"global_batch": 4, "workers": (1, 2), **settings})
    return describe(task, config, schedule(task, config))


def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "line")


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    run_dir(tmp_path).write_json(facts(), RUN)
    return run_dir(tmp_path)


@pytest.mark.parametrize("mode", ["auto", "new"])
def test_r10_a_run_that_is_not_there_begins(tmp_path: Path, mode: str) -> None:
    assert earlier_facts(run_dir(tmp_path), mode) is None


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_r10_a_run_that_is_there_goes_on(begun: RunDir, mode: str) -> None:
    before = earlier_facts(begun, mode)
    check_same(begun, before, facts(), fewest_steps=None)
    assert before == facts()


def test_r10_new_refuses_a_run_that_is_there_and_must_one_that_is_not(begun: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"there is no run at .* yet"):
        earlier_facts(begun, "new")
    with pytest.raises(ResumeError, match="there is a run at"):
        earlier_facts(run_dir(tmp_path / "elsewhere"), "must")


def test_r7_a_run_json_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / RUN).write_text('{"half')
    with pytest.raises(ResumeError) as caught:
        earlier_facts(run_dir(tmp_path), "auto")
    assert caught.value.where == str(tmp_path / "line" / RUN)


def test_r10_changes_that_alter_the_result_are_named_and_refused(begun: RunDir) -> None:
    other = facts(Line(lr=0.2, num_rows=9), seed=3, global_batch=5, precision="bf16", clip_norm=1.0, micro_batch=2)
    with pytest.raises(ResumeError) as caught:
        check_same(begun, earlier_facts(begun, "auto"), other, fewest_steps=None)
    shown = str(caught.value).replace(begun.path, "RUN")
    check("errors/changed_settings.txt", shown + "\n")


@pytest.mark.parametrize(
    "settings",
    [{"workers": 1, "logical_workers": 2}, {"max_failures": 1}, {"checkpoint_every": 3}, {"keep_best": 0}, {"audit": True}],
)
def test_r3_changes_that_do_not_alter_the_result_are_allowed(begun: RunDir, settings: dict[str, Any]) -> None:
    check_same(begun, facts(), facts(**settings), fewest_steps=None)


def test_r10_the_end_moves_only_if_no_schedule_depends_on_it_and_what_is_done_is_before_it() -> None:
    assert list_differences(facts(epochs=2), facts(epochs=3), fewest_steps=4) == []
    assert list_differences(facts(epochs=2), facts(epochs=3), fewest_steps=None) == ["number of steps: 4 -> 6"]
    assert list_differences(facts(epochs=3), facts(epochs=2), fewest_steps=4) == []
    assert list_differences(facts(epochs=3), facts(epochs=2), fewest_steps=5) == ["number of steps: 6 -> 4"]
    assert list_differences(facts(epochs=3), facts(epochs=2), fewest_steps=None) == ["number of steps: 6 -> 4"]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1, "b": [1]}, {"a": 1, "b": [1]}, []),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ["space.a.b.c: 1 -> 2"]),
        ({"a": 1}, {"b": 2}, ["space.a: 1 -> None", "space.b: None -> 2"]),
        ({"a": 1}, {"a": {"b": 1}}, ["space.a: 1 -> {'b': 1}"]),
        (None, {"a": 1}, ["space: None -> {'a': 1}"]),
        ("x" * 61, "y" * 60, [f"space: {'x' * 57}... -> {'y' * 60}"]),
    ],
)
def test_differences_name_the_place_and_both_values(old: Any, new: Any, lines: list[str]) -> None:
    assert differences("space", old, new) == lines


def test_r3_a_run_keeps_its_logical_workers_where_only_the_workers_change() -> None:
    before = facts(workers=(1, 2))
    config = with_logical_workers(RunConfig(workers=1), before)
    assert (config.workers, config.num_logical) == ((1, 1), 2)
    assert with_logical_workers(RunConfig(workers=1), None) == RunConfig(workers=1)
    assert with_logical_workers(RunConfig(logical_workers=3), before).num_logical == 3


def test_more_workers_than_the_run_has_logical_ones_are_refused_with_the_way_out() -> None:
    with pytest.raises(ResumeError) as caught:
        with_logical_workers(RunConfig(workers="1:8"), facts(workers=(1, 2)))
    check("errors/more_workers.txt", f"{caught.value}\n")
