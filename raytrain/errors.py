"""Which errors does raytrain raise? Exceptions that a user can act on.

An error that a user can cause has four parts: where it was found, the value found there, the rule that the value breaks,
and the fix. All errors can be pickled, because they travel between processes. Imports nothing of raytrain.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parent) + os.sep
SHOWN_ROWS = 64


class RaytrainError(Exception):
    """Base class of all errors that raytrain raises."""


class FourPartError(RaytrainError, ValueError):
    """An error that the user can fix.

    Args:
        where: the setting, file, column or hook.
        value: what was found there.
        rule: what is valid there.
        fix: what to do.
    """

    def __init__(self, where: str, value: object, rule: str, fix: str) -> None:
        super().__init__(where, value, rule, fix)
        self.where, self.value, self.rule, self.fix = where, str(value), rule, fix

    def __str__(self) -> str:
        return f"{self.where}\n  value: {self.value}\n  rule:  {self.rule}\n  fix:   {self.fix}"


class ConfigError(FourPartError):
    """A setting of the run or a field of the task is wrong."""


class DataError(FourPartError):
    """The dataset cannot be read or does not fit the task."""


class StorageError(FourPartError):
    """The storage of the run cannot be used."""


class ResumeError(FourPartError):
    """The run cannot be resumed with these settings."""


class RunInUseError(FourPartError):
    """Another driver uses the run's directory."""


class ResourceError(FourPartError):
    """The cluster lacks resources that the run requires."""


class CheckpointError(RaytrainError):
    """A checkpoint could not be written or does not match its manifest."""


class UnsavableError(CheckpointError):
    """The state has a value that no checkpoint can hold; saving it again fails again.

    Args:
        where: the path of the value in the state, or keys of the model.
        what: what is wrong with it.
        fix: what to do.
    """

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(where, what, fix)
        self.where, self.what, self.fix = where, what, fix

    def __str__(self) -> str:
        return f"{self.where} {self.what}; {self.fix}"


class TaskError(RaytrainError):
    """The task's code raised; the message is its traceback.

    Args:
        traceback: the formatted traceback, without our own frames, ending with the exception's own line.
        where: hook and step, for example "loss at step 12 on rank 1".
        details: the same with our own frames.
    """

    def __init__(self, traceback: str, where: str, details: str = "") -> None:
        super().__init__(traceback, where, details)
        self.traceback, self.where, self.details = traceback, where, details or traceback

    def __str__(self) -> str:
        return f"{self.traceback.rstrip()}\nraised by {self.where}"


class WorkersLostError(RaytrainError):
    """The failure budget `run.max_failures` is spent."""


class PoisonRowsError(RaytrainError):
    """Worker processes died repeatedly in the same step, with the same rows.

    Args:
        step: number of the step, from 0.
        logical: the logical workers that were assigned to each of them.
        cause: Ray's reason for the last death.
        rows: row numbers of `train`, if known.
    """

    def __init__(self, step: int, logical: tuple[int, ...], cause: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(step, logical, cause, rows)
        self.step, self.logical, self.cause, self.rows = step, logical, cause, rows

    def __str__(self) -> str:
        logical = ", ".join(map(str, self.logical))
        shown = ", ".join(map(str, self.rows[:SHOWN_ROWS])) + (", ..." if len(self.rows) > SHOWN_ROWS else "")
        rows = f"\nits rows of train: {shown}" if self.rows else ""
        return f"workers died repeatedly on the same rows: step {self.step}, logical worker {logical}: {self.cause}{rows}"


class InternalError(RaytrainError):
    """An invariant of raytrain is broken: a bug, please report it."""


class WholeTracebacks:
    """A context manager that raises an unexpected exception as an `InternalError` with its traceback.

    Ray keeps the first and the last 500 characters of a worker's traceback, and not of one that can be pickled.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, RaytrainError):
            raise InternalError("".join(traceback.format_exception(error))) from error


def task_traceback(error: BaseException) -> str:
    """The traceback of an error in the task's code, and of its causes, without our own frames if there are others."""
    shown = traceback.TracebackException.from_exception(error)
    _remove_own_frames(shown)
    return "".join(shown.format())


def _remove_own_frames(shown: traceback.TracebackException) -> None:
    frames = [frame for frame in shown.stack if not frame.filename.startswith(PACKAGE)]
    shown.stack = traceback.StackSummary.from_list(frames or shown.stack)
    for one in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if one is not None:
            _remove_own_frames(one)


def differences(name: str, old: Any, new: Any, separator: str = " -> ") -> list[str]:
    """The differences between two plain values, one line each, as "name.key: old -> new"; dicts are compared by key."""
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{name}." if name else ""
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in differences(f"{prefix}{key}", old.get(key), new.get(key), separator)]
    return [] if old == new else [f"{name}: {_shortened(old)}{separator}{_shortened(new)}"]


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
