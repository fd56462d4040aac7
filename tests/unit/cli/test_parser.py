"""Command lines of job scripts: only the command line counts, and mistakes name the nearest flag."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from pydantic_settings import CliApp

from raytrain.cli.parser import CommandLine, Parser, exit_code, settings_source
from raytrain.config import RunConfig
from raytrain.errors import ConfigError, InternalError, TaskError, WorkersLostError


class Run(BaseModel):
    workers: str = "1"
    """Range."""


class Job(CommandLine):
    """A job."""

    hidden: int = 128
    """Units."""
    run: Run = Run()


def parse(*arguments: str) -> Job:
    return CliApp.run(Job, list(arguments), cli_settings_source=settings_source(Job, prog="job.py"))


def test_nested_flags_are_read() -> None:
    job = parse("--hidden", "256", "--run.workers=1:8")
    assert (job.hidden, job.run.workers) == (256, "1:8")


def test_r10_the_environment_changes_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", "7")
    monkeypatch.setenv("hidden", "7")
    assert parse().hidden == 128


def test_an_unknown_flag_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--run.worker", "3")
    assert (caught.value.where, caught.value.fix) == ("--run.worker", "did you mean --run.workers?")


def test_a_flag_is_never_abbreviated() -> None:
    with pytest.raises(ConfigError, match=r"did you mean --hidden\?"):
        parse("--hid", "3")


def test_a_flag_without_its_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one argument"):
        parse("--hidden")


def test_other_messages_of_argparse_keep_their_words() -> None:
    with pytest.raises(ConfigError, match="something odd"):
        Parser(prog="job.py").error("something odd")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a", "b", "c", "d"), 2),
        (TaskError("boom", "loss"), 1),
        (WorkersLostError("gone"), 1),
        (InternalError("bug"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_r16_exit_codes_tell_wrong_use_from_failure(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_r10_a_wrong_setting_of_the_run_exits_2() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(worker=3)
    assert exit_code(caught.value) == 2
