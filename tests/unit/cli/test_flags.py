"""Flags of pydantic models: which values reach them, defaults in the help, and the exit codes of errors."""

from __future__ import annotations

import contextlib
import enum
import os
from typing import Any, Literal

import click
import pytest
from pydantic import BaseModel

from raytrain.cli.flags import (
    DEBUG,
    Command,
    error_text,
    exit_code_of,
    given_values,
    options_of,
    say,
    with_defaults,
    with_flags,
)
from raytrain.errors import ConfigError, InternalError, TaskError, WorkersLostError


class Color(enum.Enum):
    RED = 1


class Inner(BaseModel):
    lr: float = 0.1
    momentum: float = 0.9


class Model(BaseModel):
    flag: bool = False
    sizes: list[int] = [64, 32]
    names: tuple[str, ...] = ()
    by_name: dict[str, int] = {}
    color: Color = Color.RED
    kind: Literal["", "a", "b"] = ""
    limit: float | None = 60.0
    workers: tuple[int, int] = (1, 2)
    inner: Inner = Inner(lr=0.5)


def read(line: str) -> dict[str, Any]:
    command = Command("job", params=[*options_of(Model, {})])
    return with_defaults(Model, given_values(command.make_context("job", line.split())))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        *(("", {}), ("--flag", {"flag": True}), ("--no-flag", {"flag": False})),
        *(("--sizes 1,2 --sizes 3", {"sizes": [1, 2, 3]}), ("--sizes [4,5]", {"sizes": [4, 5]})),
        *(("--names a --names=b", {"names": ("a", "b")}), ("--by-name a=1,b=2", {"by_name": {"a": 1, "b": 2}})),
        *(('--by-name {"a":1}', {"by_name": {"a": 1}}), ("--color RED", {"color": Color.RED})),
        *(("--limit None", {"limit": None}), ("--limit -1", {"limit": -1.0})),
        ("--inner.momentum 0.8", {"inner": Inner(lr=0.5, momentum=0.8)}),
    ],
)
def test_what_is_typed_reaches_the_fields(line: str, values: dict[str, Any]) -> None:
    assert Model(**read(line)) == Model(**values)


def test_r10_the_environment_changes_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT", "7")
    assert read("") == {}


def test_defaults_are_shown_as_one_types_them() -> None:
    shown = {option.opts[0]: str(option.help).partition("default: ")[2].rstrip("]") for option in options_of(Model, {})}
    texts = {"--flag": "", "--sizes": "64,32", "--names": "", "--by-name": ""}
    texts |= {"--color": "Color.RED", "--kind": "", "--limit": "60", "--workers": "1:2"}
    assert shown == texts | {"--inner.lr": "0.5", "--inner.momentum": "0.9"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((ConfigError("a", "b", "c", "d"), 2), (click.UsageError("odd"), 2), (TaskError("boom", "loss"), 1)),
        *((WorkersLostError("gone"), 1), (InternalError("bug"), 1), (KeyboardInterrupt(), 130), (SystemExit(143), 143)),
        (SystemExit(), 0),
    ],
)
def test_r16_exit_codes_tell_wrong_use_from_failure(error: BaseException, code: int) -> None:
    def action() -> int:
        raise error

    assert exit_code_of(action) == code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            TaskError("loss returned str for 4 rows; it returns a tensor", "loss"),
            "loss returned str for 4 rows; it returns a tensor",
        ),
        (InternalError("odd"), "odd"),
        (ConfigError("lr", 0, "above 0", "raise it"), "--lr\n  value: 0\n  rule:  above 0\n  fix:   raise it"),
    ],
)
def test_an_error_without_a_traceback_is_its_text(error: Any, text: str) -> None:
    assert error_text(error, ["lr"]) == f"error: {text}\n"


def test_our_own_frames_are_shown_with_a_variable_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> int:
        raise TaskError("Traceback: theirs\n", "loss", "Traceback: theirs and ours\n")

    for value, shown in (("", "theirs"), ("1", "theirs and ours")):
        monkeypatch.setenv(DEBUG, value)
        assert exit_code_of(action) == 1
        assert capsys.readouterr().err == f"Traceback: {shown}\nerror: raised by loss\n"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("run.global_batch", "--run.global-batch"),
        ("raise run.workers, or run.logical_workers.", "raise --run.workers, or --run.logical-workers."),
        ("--run.name stays", "--run.name stays"),
        ("give sweep.trials, or sweep.space.run.global_batch", "give --sweep.trials, or --sweep.space.run.global-batch"),
        ("sweep.space.with_bias.\nsweep.json", "--sweep.space.with-bias.\nsweep.json"),
        ("run.json and raytrain.run.name and run.unknown", "run.json and raytrain.run.name and run.unknown"),
        *(("with_bias\n  value: 3", "--with-bias\n  value: 3"), ("with_bias is in a text", "with_bias is in a text")),
    ],
)
def test_settings_are_named_as_flags_in_a_shell(text: str, flags: str) -> None:
    assert with_flags(text, ["with_bias"]) == flags


def test_r16_a_reader_that_goes_does_not_end_the_program() -> None:
    """As a closed terminal, or `head`, after which the run still stops, saves and exits as it should."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:

        def action() -> int:
            for _ in range(3):
                say("nobody reads this")
            return 129

        with contextlib.redirect_stdout(stream):
            assert exit_code_of(action) == 129
