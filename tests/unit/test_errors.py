"""Every error survives pickling; errors of the user name the place, the value, the rule and the fix."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from raytrain import errors
from raytrain.errors import SHOWN_ROWS, FourPartError, PoisonRowsError, RaytrainError, TaskError, UnsavableError, differences

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, RaytrainError)]
TRACEBACK = "Traceback (most recent call last):\n  File \"job.py\", line 3, in loss\nKeyError: 'label'\n"


def make(cls: type[RaytrainError]) -> RaytrainError:
    if issubclass(cls, FourPartError):
        return cls("run.workers", (2, 1), "the smallest number comes first", "write 1:2")
    if issubclass(cls, TaskError):
        return cls(TRACEBACK, "loss at step 12 on rank 1")
    if issubclass(cls, PoisonRowsError):
        return cls(7, (1, 3), "the worker died: segmentation fault", tuple(range(100)))
    if issubclass(cls, UnsavableError):
        return cls("scheduler.factor", "is a builtins.function", "keep it out of state_dict()")
    return cls("something happened")


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling(cls: type[RaytrainError]) -> None:
    error = make(cls)
    for back in (*(pickle.loads(pickle.dumps(error, protocol)) for protocol in (2, 5)), copy.copy(error)):
        assert (type(back), str(back), vars(back)) == (cls, str(error), vars(error))


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, FourPartError)])
def test_a_four_part_error_shows_its_parts_and_is_a_value_error(cls: type[FourPartError]) -> None:
    error = make(cls)
    assert isinstance(error, ValueError)
    assert str(error) == ("run.workers\n  value: (2, 1)\n  rule:  the smallest number comes first\n  fix:   write 1:2")


def test_r16_a_task_error_shows_the_traceback_once_and_its_place() -> None:
    assert str(make(TaskError)) == TRACEBACK + "raised by loss at step 12 on rank 1"


def test_r16_poison_rows_are_reported_with_step_cause_and_first_rows() -> None:
    message = "workers died repeatedly on the same rows: step 7, logical worker 1, 3: the worker died: segmentation fault"
    rows = f"its rows of train: {', '.join(map(str, range(SHOWN_ROWS)))}, ..."
    assert str(make(PoisonRowsError)).splitlines() == [message, rows]
    assert str(PoisonRowsError(7, (1,), "killed")).count("\n") == 0
    assert str(PoisonRowsError(7, (1,), "killed", (4, 9))).endswith("its rows of train: 4, 9")


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1, "b": [1]}, {"a": 1, "b": [1]}, []),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, ["space.a.b.c: 1 -> 2"]),
        ({"a": 1}, {"b": 2}, ["space.a: 1 -> None", "space.b: None -> 2"]),
        (None, {"a": 1}, ["space: None -> {'a': 1}"]),
        ("x" * 61, "y" * 60, [f"space: {'x' * 57}... -> {'y' * 60}"]),
    ],
)
def test_differences_name_the_key_and_both_values(old: Any, new: Any, lines: list[str]) -> None:
    assert differences("space", old, new) == lines
    assert differences("", {"space": old}, {"space": new}, " and ") == [line.replace(" -> ", " and ") for line in lines]
