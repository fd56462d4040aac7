"""A job's command line: help, what reaches the run or sweep, exit codes, and mistakes answered before Ray starts."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import BaseModel, Field
from ray.tune import ResultGrid
from ray.tune.search.sample import Categorical, Float, Integer

from raytrain.cli.job import main, parse, run, show, split_space
from raytrain.config import RunConfig
from raytrain.data import arrays, parquet
from raytrain.errors import ConfigError, ResumeError, WorkersLostError
from raytrain.events.sweep import SweepView, TrialView
from raytrain.launch import cluster
from raytrain.launch.trainer import Trainer
from raytrain.rundir import RUN, RunDir
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune.results import SweepResult
from raytrain.tune.sweep import Sweep
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


class Adam(BaseModel):
    lr: float
    beta: float = 0.9


class Tuned(Digits):
    adam: Adam


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are answered before Ray starts: starting it is an error here."""
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(sys, "argv", ["jobs/digits.py"])


def test_the_help_of_a_job_is_as_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Digits, ["-h"], {"epochs": 20, "workers": (1, 2), "audit": True}) == 0
    check("help_job.txt", capsys.readouterr().out)


def test_a_field_without_a_default_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    run(Needs, ["--help"], {})
    run(Needs, ["--sweep.space.depth", "2:4", "--help"], {})
    assert len(re.findall(r"Layers\.\s+\[required\]\n", capsys.readouterr().out)) == 2
    assert run(Needs, [], {}) == 2
    assert capsys.readouterr().err.startswith("error: --depth\n  value: not given\n")


def test_flags_reach_the_task_and_the_run() -> None:
    line = "--hidden 7 --no-with-bias --activation=gelu --dropout 0.5 --run.workers 1:4 --run.global-batch=8 --run.audit"
    fields, config, _, space = parse(Digits, line.split(), {"seed": 3, "epochs": 2})
    assert Digits(**fields) == Digits(hidden=7, with_bias=False, activation="gelu", dropout=0.5)
    assert config == RunConfig(seed=3, epochs=2, workers=(1, 4), global_batch=8, audit=True)
    assert space == {}
    assert not parse(Digits, ["--no-run.audit"], {"audit": True}).config.audit


@pytest.mark.parametrize(
    ("default", "line", "epochs_and_steps"),
    [
        *(({"epochs": 20}, "--run.steps=10", (None, 10)), ({"steps": 100}, "--run.epochs 3", (3, None))),
        *(({"epochs": 20}, "--run.epochs 3", (3, None)), ({"epochs": 20}, "", (20, None))),
        ({"epochs": 20}, "--sweep.space.run.steps 10:20", (None, None)),
    ],
)
def test_a_flag_for_steps_or_epochs_makes_the_jobs_default_give_way(
    default: dict[str, int], line: str, epochs_and_steps: tuple[int | None, int | None]
) -> None:
    config = parse(Digits, line.split(), default).config
    assert (config.epochs, config.steps) == epochs_and_steps


def test_a_run_is_shown_from_its_earlier_events_on_and_the_viewer_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []

    class Viewer:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    def choose(out: Any, err: Any, view: Any) -> Viewer:
        chosen.extend([Viewer(), view.step])
        return chosen[0]

    def fit(self: Trainer, shown: Any) -> None:
        assert shown is chosen[0]
        raise KeyboardInterrupt

    monkeypatch.setattr("raytrain.console.viewer.choose", choose)
    monkeypatch.setattr(Trainer, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        show(Trainer(Digits(), RunConfig(storage=str(tmp_path))))
    assert (chosen[0].is_closed, chosen[1]) == (True, 0)


@dataclass
class Sweeps:
    """The sweeps that were started, and how the next one ends."""

    end: Any
    started: list[tuple[type[Task], dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    viewers: list[Any] = field(default_factory=list)
    sigterm: Any = None


def ended(outcome: str = "completed", states: str = "completed", stopped_by: int | None = None) -> SweepResult:
    """The result of a sweep whose trials have these states."""
    trials = tuple(TrialView(name=f"trial-{number}", state=state) for number, state in enumerate(states.split()))
    view = SweepView(name="s", directory="/runs/s", metric="loss", mode="min", num_trials=3, trials=trials)
    return SweepResult(view.name, view.directory, outcome, None, view, cast(ResultGrid, None), stopped_by)


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    """Real sweeps, except that they end at once."""
    seen, build = Sweeps(ended()), Sweep.__init__

    def note(self: Sweep, task: type[Task], space: dict[str, Any], **settings: Any) -> None:
        build(self, task, space, **settings)
        seen.started.append((task, space, settings))

    def fit(self: Sweep, viewer: Any) -> SweepResult:
        seen.sigterm = signal.getsignal(signal.SIGTERM)
        if isinstance(seen.end, BaseException):
            raise seen.end
        return cast(SweepResult, seen.end)

    class Viewer:
        def __init__(self, out: Any) -> None:
            self.out, self.num_closed = out, 0
            seen.viewers.append(self)

        def close(self) -> None:
            self.num_closed += 1

    monkeypatch.setattr(Sweep, "__init__", note)
    monkeypatch.setattr(Sweep, "fit", fit)
    monkeypatch.setattr("raytrain.console.viewer.choose_for_sweep", Viewer)
    return seen


def test_a_space_makes_the_job_a_sweep(sweeps: Sweeps) -> None:
    line = (
        "--sweep.space.lr log:1e-3:1 --depth 3 --sweep.space.run.global-batch=choice:32,64 --sweep.trials 20 "
        "--sweep.workers 1:8 --run.seed 5 --sweep.mode=max --sweep.metric valid/accuracy"
    )
    assert run(Needs, line.split(), {"epochs": 2}) == 0
    [(task, space, settings)] = sweeps.started
    assert task is Needs
    assert {name: type(domain) for name, domain in space.items()} == {"lr": Float, "run.global_batch": Categorical}
    assert (space["lr"].lower, space["run.global_batch"].categories) == (0.001, [32, 64])
    fixed = {"hidden": 128, "dropout": None, "with_bias": True, "activation": "relu", "path": "", "depth": 3}
    assert settings == {
        "config": RunConfig(seed=5, epochs=2),
        "sweep": SweepConfig(trials=20, workers=(1, 8), mode="max", metric="valid/accuracy"),
        "fixed": fixed,
    }


def test_a_required_field_in_the_space_needs_no_flag(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Needs, ["--sweep.space.depth", "2:4"], {}) == 0
    [(_, space, settings)] = sweeps.started
    assert isinstance(space["depth"], Integer)
    assert "depth" not in settings["fixed"]
    assert run(Needs, ["--sweep.space.lr", "0:1"], {}) == 2
    assert capsys.readouterr().err.startswith("error: --depth\n  value: not given\n")


def test_a_part_of_a_field_is_in_the_space_and_another_one_given(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Tuned, ["--sweep.space.adam.lr", "log:1e-3:1", "--adam.beta", "0.5"], {}) == 0
    [(_, space, settings)] = sweeps.started
    assert list(space) == ["adam.lr"]
    assert settings["fixed"]["adam"] == {"beta": "0.5"}
    assert run(Tuned, ["--sweep.space.adam.lr", "0:1", "--adam.lr", "0.5"], {}) == 2
    assert capsys.readouterr().err.startswith("error: adam.lr\n  value: given, and --sweep.space.adam.lr too\n")


def test_names_in_a_space_are_typed_as_their_flags_are() -> None:
    texts, others = split_space(["--sweep.space.with-bias", "choice:true,false", "--lr", "-1", "--sweep.space.lr=-1:1"])
    assert texts == {"with_bias": "choice:true,false", "lr": "-1:1"}
    assert others == ["--lr", "-1"]
    assert split_space(["--sweep.space.lr", "0:1", "--sweep.space.lr", "-2:0"]) == ({"lr": "-2:0"}, [])


@pytest.mark.parametrize(
    ("end", "code"),
    [
        *((ended(), 0), (ended("already complete"), 0), (ended("already complete", "failed"), 1)),
        *((ended("stopped", "failed running", signal.SIGINT), 130), (ResumeError("runs/digits", "a", "b", "c"), 2)),
        *((WorkersLostError("gone"), 1), (SystemExit(143), 143)),
    ],
)
def test_r16_the_end_of_a_sweep_becomes_the_exit_code(
    end: Any, code: int, sweeps: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps.end = end
    assert run(Digits, ["--sweep.space.lr", "0:1"], {}) == code
    [viewer] = sweeps.viewers
    assert viewer.num_closed == 1
    complete = "s: already complete, 1 trial in /runs/s\n"
    assert capsys.readouterr().out == (complete if getattr(end, "outcome", "") == "already complete" else "")


def test_r16_sigterm_ends_a_sweep_with_its_code_and_is_as_before_afterwards(sweeps: Sweeps) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(Digits, ["--sweep.space.lr", "0:1"])
    assert caught.value.code == 0
    with pytest.raises(SystemExit) as left:
        sweeps.sigterm(signal.SIGTERM, None)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def begun(path: Path) -> None:
    RunDir.at(str(path / "runs"), "digits").write_json({}, RUN)


def plain_file(path: Path) -> None:
    (path / "runs").write_text("a file")


def table(path: Path) -> None:
    pq.write_table(pa.table({"pixels": [1.0], "label": [1]}), path / "t.parquet")


def no_rows(path: Path) -> None:
    pq.write_table(pa.table({"pixels": pa.array([], pa.float64()), "lable": pa.array([], pa.int64())}), path / "t.parquet")


MISTAKES = [
    *(("unknown_flag", "--run.global-bach 3"), ("unknown_field", "--hiden 3"), ("field_value", "--hidden many")),
    *(("field_range", "--dropout 2"), ("word_too_many", "train"), ("flag_without_value", "--run.workers")),
    *(("choice", "--run.resume yes"), ("workers", "--run.workers 3:1"), ("global_batch", "--run.global-batch 0")),
    *(("small_batch", "--run.workers 8 --run.global-batch 4"), ("epochs_and_steps", "--run.epochs 3 --run.steps 4")),
    *(("name", "--run.name a/b"), ("missing_path", "--path TMP/no/such"), ("missing_column", "--path TMP/t.parquet")),
    *(("no_rows", "--path TMP/t.parquet"), ("empty_arrays", "--path empty"), ("no_train", "--path none")),
    *(("drop_last", "--run.drop-last"), ("storage", ""), ("storage_scheme", "--run.storage s4://bucket/runs")),
    *(("resume_must", "--run.resume must"), ("resume_new", "--run.resume new")),
    *(("sweep_without_space", "--sweep.trials 20"), ("sweep_space_name", "--sweep.space.lrr 0:1")),
    *(("sweep_space_setting", "--sweep.space.run.global-bach 1:2"), ("sweep_space_value", "--sweep.space.lr log:0:1")),
    ("sweep_space_kind", "--sweep.space.activation choice:relu,tanh"),
    ("sweep_space_own", "--sweep.space.run.storage choice:a,b"),
    *(("sweep_space_without_text", "--sweep.space.lr --sweep.trials 3"), ("sweep_space_without_name", "--sweep.space 0:1")),
    ("sweep_given_twice", "--no-with-bias --sweep.space.with-bias choice:true,false"),
    ("sweep_setting_given_twice", "--run.global-batch=32 --sweep.space.run.global-batch 16:64"),
    ("sweep_trials", "--sweep.trials 0 --sweep.space.lr 0:1"),
    ("sweep_workers", "--sweep.workers 4:1 --sweep.space.lr 0:1"),
    ("sweep_flag", "--sweep.trails 20 --sweep.space.lr 0:1"),
]
PREPARE = {"missing_column": table, "no_rows": no_rows, "storage": plain_file, "resume_new": begun}


@pytest.mark.parametrize(("mistake", "line"), MISTAKES)
def test_a_mistake_is_told_in_four_parts_before_ray_starts(
    mistake: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mistake in PREPARE:
        PREPARE[mistake](tmp_path)
    defaults = {"storage": str(tmp_path / "runs"), **({} if "steps" in line else {"epochs": 2})}
    assert run(Digits, line.replace("TMP", str(tmp_path)).split(), defaults) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [text.split(":")[0].strip() for text in shown.err.splitlines()[:4]] == ["error", "value", "rule", "fix"]
    check(f"errors/{mistake}.txt", shown.err.replace(str(tmp_path), "TMP"))


def test_r10_a_run_that_must_exist_leaves_no_directory_behind(tmp_path: Path) -> None:
    assert run(Digits, ["--run.resume", "must"], {"storage": str(tmp_path / "runs")}) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("task", "text"), [(Halves, "hooks"), (Taken, "field_name")])
def test_missing_hooks_and_a_field_named_like_our_flags_are_refused(
    task: type[Task], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(task, [], {"storage": str(tmp_path)}) == 2
    check(f"errors/{text}.txt", capsys.readouterr().err)


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
