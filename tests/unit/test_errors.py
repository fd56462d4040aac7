"""Every error survives pickling, and what a user can mend says where, what, the rule and the fix."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from raytrain import errors
from raytrain.errors import SHOWN_ROWS, DeadlyRowsError, FourPartError, RaytrainError, TaskError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, RaytrainError)]
TRACEBACK = "Traceback (most recent call last):\n  File \"job.py\", line 3, in loss\nKeyError: 'label'\n"


def make(cls: type[RaytrainError]) -> RaytrainError:
    if issubclass(cls, FourPartError):
        return cls("run.workers", (2, 1), "the smallest number comes first", "write 1:2")
    if issubclass(cls, TaskError):
        return cls(TRACEBACK, "loss at step 12 on rank 1")
    if issubclass(cls, DeadlyRowsError):
        return cls(7, (1, 3), "the worker died: segmentation fault", tuple(range(100)))
    return cls("something happened")


def test_all_classes_are_tested_here() -> None:
    assert len(CLASSES) >= 12


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(cls: type[RaytrainError], protocol: int) -> None:
    error = make(cls)
    for back in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(back) is cls
        assert str(back) == str(error)
        assert vars(back) == vars(error)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, FourPartError)])
def test_a_four_part_error_shows_its_parts_and_is_a_value_error(cls: type[FourPartError]) -> None:
    error = make(cls)
    assert isinstance(error, ValueError)
    assert str(error) == ("run.workers\n  value: (2, 1)\n  rule:  the smallest number comes first\n  fix:   write 1:2")


def test_r16_a_task_error_shows_the_users_traceback_once_and_where_it_was() -> None:
    text = str(make(TaskError))
    assert text == TRACEBACK + "raised by loss at step 12 on rank 1"
    assert text.count("Traceback") == 1


def test_r16_deadly_rows_say_the_step_the_share_the_cause_and_the_first_rows() -> None:
    text = str(make(DeadlyRowsError))
    first, second = text.splitlines()
    assert first == (
        "the same rows killed their worker again and again: step 7, with the share of logical worker 1, 3: "
        "the worker died: segmentation fault"
    )
    assert second == f"its rows of train: {', '.join(map(str, range(SHOWN_ROWS)))}, ..."
    assert str(DeadlyRowsError(7, (1,), "killed")).count("\n") == 0
    assert str(DeadlyRowsError(7, (1,), "killed", (4, 9))).endswith("its rows of train: 4, 9")
