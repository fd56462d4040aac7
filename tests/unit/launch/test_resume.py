"""A run is resumed only if `run.resume` allows it and its result is unchanged; the differences are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.data import arrays
from raytrain.errors import ResumeError, RunInUseError
from raytrain.events.kinds import CheckpointSaved
from raytrain.events.log import EventLog
from raytrain.launch import lock
from raytrain.launch.lock import locked
from raytrain.launch.resume import (
    FACTS,
    check_resumable,
    complete_settings,
    list_differences,
    read_metadata,
    run_metadata,
    step_to_resume,
)
from raytrain.launch.schedule import build_schedule
from raytrain.launch.trainer import Trainer
from raytrain.rundir import CHECKPOINTS, RUN, RunDir
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


def save(directory: RunDir, *steps: int, facts: dict[str, Any] | None = None) -> None:
    for step in steps:
        CheckpointStore(directory).write(step, {"state.pt": b"all" * 9}, {}, metadata() if facts is None else facts)


@pytest.mark.parametrize("damage", [b'{"half', b"\xff\xfe", b"[]", b"{}", None])
def test_r7_a_damaged_run_json_beside_a_checkpoint_does_not_cost_the_run(begun: RunDir, damage: bytes | None) -> None:
    save(begun, 2)
    save(begun, 4, facts={"name": "line", "cloned_from": "other/step-000000004"})
    path = Path(begun.child(RUN))
    path.unlink() if damage is None else path.write_bytes(damage)
    assert read_metadata(begun, "must") == metadata()
    with pytest.raises(ResumeError, match=r"0\.1 -> 0\.2"):
        check_resumable(begun, read_metadata(begun, "auto"), metadata(Line(lr=0.2)), fewest_steps=None)
    with pytest.raises(ResumeError, match="there is no run at"):
        read_metadata(begun, "new")


def test_r7_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(begun: RunDir) -> None:
    save(begun, 2, 4)
    assert step_to_resume(begun) == 4
    Path(begun.child(CHECKPOINTS, "step-000000004", "state.pt")).write_bytes(b"al1" * 9)
    assert step_to_resume(begun) == 2
    Path(begun.child(CHECKPOINTS, "step-000000002", "manifest.json")).write_bytes(b'{"half')
    Path(begun.child(CHECKPOINTS, "step-000000009")).mkdir()  # of a save that was killed
    with pytest.raises(ResumeError) as caught:
        Trainer(Line(), RunConfig(name="line", storage=str(Path(begun.path).parent), global_batch=4, workers=(1, 2))).fit()
    check("errors/all_damaged.txt", str(caught.value).replace(begun.path, "RUN") + "\n")


def test_r7_a_run_whose_checkpoints_are_gone_does_not_begin_anew(begun: RunDir) -> None:
    assert step_to_resume(begun) == 0
    EventLog(begun).append([CheckpointSaved(step=4, checkpoint="step-000000004", size_bytes=1, seconds=1.0, stall_s=0.0)])
    with pytest.raises(ResumeError) as caught:
        step_to_resume(begun)
    check("errors/no_checkpoint_left.txt", str(caught.value).replace(begun.path, "RUN") + "\n")


def test_r10_a_second_driver_is_refused_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.1)
    with locked(run_dir(tmp_path)), pytest.raises(RunInUseError, match="in use by the driver with process"):
        Trainer(Line(), RunConfig(name="line", storage=str(tmp_path))).fit()


def test_r7_checkpoints_carry_the_content_of_run_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task, config = Line(), RunConfig(name="line", storage=str(tmp_path), global_batch=4)
    schedule = build_schedule(task, config)
    now = run_metadata(task, config, schedule)
    facts = Trainer(task, config)._spec(config, schedule, "cpu", now).manifest_facts
    assert ({name: facts[name] for name in FACTS}, set(FACTS)) == (now, set(now))


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
