"""A job's command line: its help, which default gives way, and what each mistake is answered before Ray starts."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import Field

from raytrain.cli.flags import flag_of, with_flags
from raytrain.cli.help import SUBJECTS, SWEEP, typed
from raytrain.cli.job import error_text, main, parse, run
from raytrain.config import RunConfig
from raytrain.data import arrays, parquet
from raytrain.errors import ConfigError, InternalError, TaskError
from raytrain.launch import cluster
from raytrain.rundir import RUN, RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from tests.golden import check


class Digits(Task):
    """Handwritten digits, 8x8 pixels.

    100% of them.
    """

    hidden: int = 128
    """Width of the hidden layer, 100% of it."""
    lr: float = 0.1
    """Learning rate."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Share of the units that are dropped."""
    with_bias: bool = True
    """Add a bias."""
    activation: Literal["relu", "gelu"] = "relu"
    """Between the layers."""
    path: str = ""
    """Where the data are."""

    def data(self) -> Mapping[str, Any]:
        if self.path == "empty":
            return {"train": arrays(pixels=np.zeros((0, 64)))}
        if self.path == "none":
            return {"valid": arrays(pixels=np.zeros((3, 64)))}
        if self.path == "raises":
            raise KeyError("pixels")
        if self.path == "exits":
            sys.exit("no data today")
        if self.path:
            return {"train": parquet(self.path, columns=["pixels", "lable"])}
        return {"train": arrays(pixels=np.zeros((3, 64)))}

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(64, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch["pixels"]).mean(1)
        return result


class Halves(Task):
    """Has half of its hooks."""

    def data(self) -> Mapping[str, Any]:
        return {}

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.zeros(1)


class Taken(Digits):
    sweep: int = 3


class Needs(Digits):
    depth: int
    """Layers."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are answered before Ray starts: starting it is an error here."""
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(sys, "argv", ["jobs/digits.py"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_the_help_of_a_job_is_as_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Digits, ["--help"], {"epochs": 20, "workers": (1, 2), "audit": True}) == 0
    check("help_job.txt", capsys.readouterr().out)


def test_every_setting_stands_in_one_section_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run(Digits, ["--help"], {})
    text = capsys.readouterr().out
    names = [*(f"run.{name}" for name in RunConfig.model_fields), *(f"sweep.{name}" for name in SweepConfig.model_fields)]
    for name in names:
        assert len(re.findall(rf"\n  {flag_of(name)}\b", text)) == 1, name
    assert all(f"\n{title}:\n" in text for title in (*SUBJECTS.values(), SWEEP))


def test_a_field_without_a_default_is_shown_as_required(capsys: pytest.CaptureFixture[str]) -> None:
    run(Needs, ["--help"], {})
    assert "Layers. (required)" in capsys.readouterr().out
    assert run(Needs, [], {}) == 2
    assert capsys.readouterr().err.startswith("error: --depth\n  value: not given\n")
    assert parse(Needs, ["--depth", "3"], RunConfig()).fields["depth"] == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [((1, 2), "1:2"), (60.0, "60"), (2.5, "2.5"), (None, ""), (False, ""), (True, "True"), ("a", "a"), (0, "0")],
)
def test_defaults_are_shown_as_one_types_them(value: Any, text: str) -> None:
    assert typed(value) == text


def test_flags_reach_the_task_and_the_run() -> None:
    line = "--hidden 7 --no-with-bias --activation=gelu --dropout 0.5 --run.workers 1:4 --run.global-batch=8 --run.audit"
    fields, config, _, space = parse(Digits, line.split(), RunConfig(seed=3, epochs=2))
    assert Digits(**fields) == Digits(hidden=7, with_bias=False, activation="gelu", dropout=0.5)
    assert config == RunConfig(seed=3, epochs=2, workers=(1, 4), global_batch=8, audit=True)
    assert space == {}


def test_variables_to_forward_are_a_list() -> None:
    line = "--run.forward-env WANDB_API_KEY --run.forward-env HF_TOKEN"
    assert parse(Digits, line.split(), RunConfig()).config.forward_env == ("WANDB_API_KEY", "HF_TOKEN")


@pytest.mark.parametrize(
    ("default", "line", "epochs_and_steps"),
    [
        ({"epochs": 20}, "--run.steps 10", (None, 10)),
        ({"epochs": 20}, "--run.steps=10", (None, 10)),
        ({"steps": 100}, "--run.epochs 3", (3, None)),
        ({"epochs": 20}, "--run.epochs 3", (3, None)),
        ({"epochs": 20}, "", (20, None)),
        ({}, "--run.steps 10", (None, 10)),
    ],
)
def test_a_flag_for_steps_or_epochs_makes_the_jobs_default_give_way(
    default: dict[str, int], line: str, epochs_and_steps: tuple[int | None, int | None]
) -> None:
    config = parse(Digits, line.split(), RunConfig(**default)).config
    assert (config.epochs, config.steps) == epochs_and_steps


Wrong = tuple[str, Callable[[Path], None] | None]


def begun(path: Path) -> None:
    RunDir.at(str(path / "runs"), "digits").write_json({}, RUN)


def plain_file(path: Path) -> None:
    (path / "runs").write_text("a file")


def table(path: Path) -> None:
    pq.write_table(pa.table({"pixels": [1.0], "label": [1]}), path / "t.parquet")


def no_rows(path: Path) -> None:
    pq.write_table(pa.table({"pixels": pa.array([], pa.float64()), "lable": pa.array([], pa.int64())}), path / "t.parquet")


MISTAKES: dict[str, Wrong] = {
    "unknown_flag": ("--run.global-bach 3", None),
    "unknown_field": ("--hiden 3", None),
    "field_value": ("--hidden many", None),
    "field_range": ("--dropout 2", None),
    "word_too_many": ("train", None),
    "flag_without_value": ("--run.workers", None),
    "choice": ("--run.resume yes", None),
    "workers": ("--run.workers 3:1", None),
    "global_batch": ("--run.global-batch 0", None),
    "small_batch": ("--run.workers 8 --run.global-batch 4", None),
    "epochs_and_steps": ("--run.epochs 3 --run.steps 4", None),
    "name": ("--run.name a/b", None),
    "missing_path": ("--path TMP/no/such", None),
    "missing_column": ("--path TMP/t.parquet", table),
    "no_rows": ("--path TMP/t.parquet", no_rows),
    "empty_arrays": ("--path empty", None),
    "no_train": ("--path none", None),
    "drop_last": ("--run.drop-last", None),
    "storage": ("", plain_file),
    "storage_scheme": ("--run.storage s4://bucket/runs", None),
    "resume_must": ("--run.resume must", None),
    "resume_new": ("--run.resume new", begun),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_four_parts_before_ray_starts(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, prepare = MISTAKES[mistake]
    if prepare:
        prepare(tmp_path)
    defaults = {"storage": str(tmp_path / "runs"), "epochs": None if "steps" in line else 2}
    assert run(Digits, line.replace("TMP", str(tmp_path)).split(), defaults) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [text.split(":")[0].strip() for text in shown.err.splitlines()[:4]] == ["error", "value", "rule", "fix"]
    check(f"errors/{mistake}.txt", shown.err.replace(str(tmp_path), "TMP"))


def test_r10_a_run_that_must_exist_leaves_no_directory_behind(tmp_path: Path) -> None:
    assert run(Digits, ["--run.resume", "must"], {"storage": str(tmp_path / "runs")}) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_task_without_its_hooks_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Halves, [], {"storage": str(tmp_path)}) == 2
    check("errors/hooks.txt", capsys.readouterr().err)


def test_a_field_named_like_our_flags_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Taken, [], {}) == 2
    check("errors/field_name.txt", capsys.readouterr().err)


def test_a_wrong_field_in_python_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        Digits(hiden=3)
    check("errors/python_field.txt", f"{caught.value}\n")


def test_a_wrong_default_of_the_job_is_refused_like_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Digits, [], {"globl_batch": 3}) == 2
    assert "did you mean --run.global-batch?" in capsys.readouterr().err


def test_r16_an_error_of_the_data_hook_is_shown_from_the_users_frame_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Digits, ["--path", "raises"], {"storage": str(tmp_path)}) == 1
    first, frame, *_, last, where = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert f'File "{__file__}"' in frame
    assert frame.endswith("in data")
    assert (last, where) == ("KeyError: 'pixels'", "error: raised by data")


def test_r16_a_task_that_calls_exit_has_not_succeeded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Digits, ["--path", "exits"], {"storage": str(tmp_path)}) == 1
    assert capsys.readouterr().err.endswith("SystemExit: no data today\nerror: raised by data\n")


def test_an_answer_of_the_wrong_form_has_no_traceback_to_show() -> None:
    error = TaskError("loss returned str for 4 rows; it returns a tensor", "loss")
    assert error_text(error, Digits) == "error: loss returned str for 4 rows; it returns a tensor\n"
    assert error_text(InternalError("odd"), Digits) == "error: odd\n"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("run.global_batch", "--run.global-batch"),
        ("raise run.workers, or run.logical_workers.", "raise --run.workers, or --run.logical-workers."),
        ("--run.name stays", "--run.name stays"),
        ("give sweep.trials, or sweep.space.run.global_batch", "give --sweep.trials, or --sweep.space.run.global-batch"),
        ("sweep.space.with_bias.\nsweep.json", "--sweep.space.with-bias.\nsweep.json"),
        ("run.json and raytrain.run.name and run.unknown", "run.json and raytrain.run.name and run.unknown"),
        ("with_bias\n  value: 3", "--with-bias\n  value: 3"),
        ("with_bias is in a text", "with_bias is in a text"),
    ],
)
def test_settings_are_named_as_flags_in_a_shell(text: str, flags: str) -> None:
    assert with_flags(text, Digits.model_fields) == flags


def test_main_exits_with_the_code_and_leaves_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(Digits, ["--run.workers", "0"])
    assert caught.value.code == 2
    assert signal.getsignal(signal.SIGTERM) is before
