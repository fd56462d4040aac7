"""`--sweep.*` makes a job a sweep: what reaches it, how its end becomes an exit code, and what mistakes are answered."""

from __future__ import annotations

import io
import signal
import sys
from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest
from ray.tune import ResultGrid
from ray.tune.search.sample import Categorical, Float, Integer

from raytrain.cli.job import main, parse, run
from raytrain.cli.sweep import split_space
from raytrain.config import RunConfig
from raytrain.errors import ConfigError, ResumeError, WorkersLostError
from raytrain.events.sweep import SweepView, TrialView
from raytrain.launch import cluster, trainer
from raytrain.sweep_config import SweepConfig
from raytrain.task import Task
from raytrain.tune.outcome import SweepResult
from raytrain.tune.sweep import Sweep
from tests.golden import check


class Digits(Task):
    """Handwritten digits."""

    depth: int
    """Layers."""
    lr: float = 0.1
    """Learning rate."""
    with_bias: bool = True
    activation: Literal["relu", "gelu"] = "relu"


@dataclass
class Sweeps:
    """The sweeps that were started, and how the next one ends."""

    started: list[tuple[type[Task], dict[str, Any], dict[str, Any]]]
    end: SweepResult | BaseException
    viewer: Any = None
    sigterm: Any = None


def ended(outcome: str = "completed", states: str = "completed", stopped_by: int | None = None) -> SweepResult:
    """The result of a sweep whose trials have these states."""
    trials = tuple(TrialView(name=f"trial-{number}", state=state) for number, state in enumerate(states.split()))
    view = SweepView(
        name="digits-sweep", directory="/runs/digits-sweep", metric="loss", mode="min", num_trials=3, trials=trials
    )
    return SweepResult(view.name, view.directory, outcome, None, view, cast(ResultGrid, None), stopped_by)


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    """Real sweeps, but that they end at once."""
    seen, build = Sweeps([], ended()), Sweep.__init__

    def note(self: Sweep, task: type[Task], space: dict[str, Any], **settings: Any) -> None:
        build(self, task, space, **settings)
        seen.started.append((task, space, settings))

    def fit(self: Sweep, viewer: Any) -> SweepResult:
        seen.viewer, seen.sigterm = viewer, signal.getsignal(signal.SIGTERM)
        if isinstance(seen.end, BaseException):
            raise seen.end
        return seen.end

    monkeypatch.setattr(Sweep, "__init__", note)
    monkeypatch.setattr(Sweep, "fit", fit)
    return seen


@dataclass
class Shown:
    """A viewer that notes when it is closed."""

    out: Any
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(trainer.Trainer, "fit", lambda *_: pytest.fail("a training was started"))
    monkeypatch.setattr("raytrain.console.viewer.choose_for_sweep", Shown)
    monkeypatch.setattr(sys, "argv", ["jobs/digits.py"])


def test_a_space_makes_the_job_a_sweep(sweeps: Sweeps) -> None:
    line = (
        "--sweep.space.lr log:1e-3:1 --depth 3 --sweep.space.run.global-batch=choice:32,64 --sweep.trials 20 "
        "--sweep.workers 1:8 --run.seed 5 --sweep.mode=max --sweep.metric valid/accuracy"
    )
    assert run(Digits, line.split(), {"epochs": 2}) == 0
    [(task, space, settings)] = sweeps.started
    assert task is Digits
    assert {name: type(domain) for name, domain in space.items()} == {"lr": Float, "run.global_batch": Categorical}
    assert (space["lr"].lower, space["run.global_batch"].categories) == (0.001, [32, 64])
    assert settings == {
        "config": RunConfig(seed=5, epochs=2),
        "sweep": SweepConfig(trials=20, workers=(1, 8), mode="max", metric="valid/accuracy"),
        "fixed": {"depth": 3, "with_bias": True, "activation": "relu"},
    }


def test_a_required_field_in_the_space_needs_no_flag(sweeps: Sweeps) -> None:
    assert run(Digits, ["--sweep.space.depth", "2:4"], {}) == 0
    [(_, space, settings)] = sweeps.started
    assert isinstance(space["depth"], Integer)
    assert "depth" not in settings["fixed"]
    assert settings["fixed"]["lr"] == 0.1


def test_a_required_field_outside_the_space_does(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Digits, ["--sweep.space.lr", "0:1"], {}) == 2
    assert capsys.readouterr().err.startswith("error: --depth\n  value: not given\n")
    assert sweeps.started == []


def test_names_are_typed_as_their_flags_are() -> None:
    texts, others = split_space(["--sweep.space.with-bias", "choice:true,false", "--lr", "-1", "--sweep.space.lr=-1:1"])
    assert texts == {"with_bias": "choice:true,false", "lr": "-1:1"}
    assert others == ["--lr", "-1"]
    assert split_space(["--sweep.space.lr", "-2:0"]) == ({"lr": "-2:0"}, [])
    assert split_space(["--sweep.space.lr", "0:1", "--sweep.space.lr=0:2"]) == ({"lr": "0:2"}, [])


def test_a_number_of_steps_in_the_space_makes_the_jobs_default_give_way() -> None:
    command = parse(Digits, ["--depth", "1", "--sweep.space.run.steps", "10:20"], RunConfig(epochs=20))
    assert (command.config.epochs, command.config.steps) == (None, None)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (ended(), 0),
        (ended("already complete"), 0),
        (ended(states="completed failed stopped"), 1),
        (ended("already complete", "failed"), 1),
        (ended("stopped", "failed running", signal.SIGINT), 130),
        (ended("stopped", "paused", signal.SIGTERM), 143),
        (ResumeError("runs/digits", "a", "b", "c"), 2),
        (WorkersLostError("gone"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
    ],
)
def test_the_end_of_a_sweep_becomes_the_exit_code(end: Any, code: int, sweeps: Sweeps) -> None:
    sweeps.end = end
    assert run(Digits, ["--depth", "1", "--sweep.space.lr", "0:1"], {}) == code
    assert (sweeps.viewer.out, sweeps.viewer.closed) == (sys.stdout, 1)


def test_a_sweep_that_was_complete_says_so(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.end = ended("already complete", "completed stopped")
    run(Digits, ["--depth", "1", "--sweep.space.lr", "0:1"], {})
    assert capsys.readouterr().out == "digits-sweep: already complete, 2 trials in /runs/digits-sweep\n"


def test_sigterm_ends_a_sweep_with_its_code_and_is_as_before_afterwards(sweeps: Sweeps) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(Digits, ["--depth", "1", "--sweep.space.lr", "0:1"])
    assert caught.value.code == 0
    with pytest.raises(SystemExit) as left:
        sweeps.sigterm(signal.SIGTERM, None)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


MISTAKES = {
    "sweep_without_space": "--sweep.trials 20",
    "sweep_space_name": "--sweep.space.lrr 0:1",
    "sweep_space_setting": "--sweep.space.run.global-bach 1:2",
    "sweep_space_value": "--sweep.space.lr log:0:1",
    "sweep_space_kind": "--sweep.space.activation choice:relu,tanh",
    "sweep_space_own": "--sweep.space.run.storage choice:a,b",
    "sweep_space_without_text": "--sweep.space.lr --sweep.trials 3",
    "sweep_space_without_name": "--sweep.space 0:1",
    "sweep_given_twice": "--with-bias --sweep.space.with-bias choice:true,false",
    "sweep_setting_given_twice": "--run.global-batch=32 --sweep.space.run.global-batch 16:64",
    "sweep_trials": "--sweep.trials 0 --sweep.space.lr 0:1",
    "sweep_workers": "--sweep.workers 4:1 --sweep.space.lr 0:1",
    "sweep_flag": "--sweep.trails 20 --sweep.space.lr 0:1",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_four_parts_before_the_sweep_starts(
    mistake: str, sweeps: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Digits, ["--depth", "1", *MISTAKES[mistake].split()], {}) == 2
    shown = capsys.readouterr()
    assert (shown.out, sweeps.started) == ("", [])
    assert [text.split(":")[0].strip() for text in shown.err.splitlines()] == ["error", "value", "rule", "fix"]
    check(f"errors/{mistake}.txt", shown.err)


def test_the_negative_of_a_flag_is_the_flag_given_too() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Digits, ["--depth", "1", "--no-run.audit", "--sweep.space.run.audit", "choice:true,false"], RunConfig())
    assert caught.value.where == "run.audit"


def test_the_help_is_shown_with_a_space_too(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run(Digits, ["--sweep.space.depth", "2:4", "--help"], {}) == 0
    assert "Layers. (required)" in sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert sweeps.started == []
