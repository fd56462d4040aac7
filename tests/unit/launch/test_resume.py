"""A run is resumed only if `run.resume` allows it and its result is unchanged; the differences are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.config import RunConfig
from raytrain.data import arrays
from raytrain.errors import ResumeError
from raytrain.launch.resume import check_resumable, complete_settings, list_differences, read_metadata, run_metadata
from raytrain.launch.schedule import build_schedule
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


def metadata(task: Task | None = None, **settings: Any) -> dict[str, Any]:
    task, config = task or Line(), RunConfig(**{"global_batch": 4, "workers": (1, 2), **settings})
    return run_metadata(task, config, build_schedule(task, config))


def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "line")


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    run_dir(tmp_path).write_json(metadata(), RUN)
    return run_dir(tmp_path)


@pytest.mark.parametrize("mode", ["auto", "new", "must"])
def test_r10_the_mode_decides_whether_a_run_starts_or_is_resumed(begun: RunDir, tmp_path: Path, mode: str) -> None:
    for exists, directory in ((True, begun), (False, run_dir(tmp_path / "elsewhere"))):
        if (exists, mode) in ((True, "new"), (False, "must")):
            with pytest.raises(ResumeError, match="there is no run at" if exists else "there is a run at"):
                read_metadata(directory, mode)
        else:
            before = read_metadata(directory, mode)
            check_resumable(directory, before, metadata(), fewest_steps=None)
            assert before == (metadata() if exists else None)


def test_r7_an_invalid_run_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / RUN).write_text('{"half')
    with pytest.raises(ResumeError) as caught:
        read_metadata(run_dir(tmp_path), "auto")
    assert caught.value.where == str(tmp_path / "line" / RUN)


def test_r10_changes_that_change_the_result_are_named_and_refused(begun: RunDir) -> None:
    other = metadata(Line(lr=0.2, num_rows=9), seed=3, global_batch=5, precision="bf16", clip_norm=1.0, micro_batch=2)
    with pytest.raises(ResumeError) as caught:
        check_resumable(begun, read_metadata(begun, "auto"), other, fewest_steps=None)
    shown = str(caught.value).replace(begun.path, "RUN")
    check("errors/changed_settings.txt", shown + "\n")


@pytest.mark.parametrize(
    "settings",
    [{"workers": 1, "logical_workers": 2}, {"max_failures": 1}, {"checkpoint_every": 3}, {"keep_best": 0}, {"audit": True}],
)
def test_r3_changes_that_keep_the_result_are_allowed(begun: RunDir, settings: dict[str, Any]) -> None:
    check_resumable(begun, metadata(), metadata(**settings), fewest_steps=None)


def test_r10_the_number_of_steps_changes_only_if_no_schedule_depends_on_it() -> None:
    shorter, longer = metadata(epochs=2), metadata(epochs=3)
    assert list_differences(shorter, longer, fewest_steps=4) == list_differences(longer, shorter, fewest_steps=4) == []
    assert list_differences(shorter, longer, fewest_steps=None) == ["number of steps: 4 -> 6"]
    for fewest_steps in (5, None):
        assert list_differences(longer, shorter, fewest_steps) == ["number of steps: 6 -> 4"]


def test_r3_a_resumed_run_keeps_its_logical_workers_name_and_storage() -> None:
    before = metadata(workers=(1, 2))
    config = complete_settings(RunConfig(workers=1), "line", "/runs", before)
    assert (config.workers, config.num_logical, config.name, config.storage) == ((1, 1), 2, "line", "/runs")
    assert complete_settings(RunConfig(workers=1), "line", "/runs", None).logical_workers is None
    assert complete_settings(RunConfig(logical_workers=3), "line", "/runs", before).num_logical == 3


def test_more_workers_than_logical_workers_are_refused() -> None:
    with pytest.raises(ResumeError) as caught:
        complete_settings(RunConfig(workers="1:8"), "line", "/runs", metadata(workers=(1, 2)))
    check("errors/more_workers.txt", f"{caught.value}\n")
