"""What can go wrong, as exceptions that a person can act on.

Each error that a user can cause has four parts: where it was found, the value that was found there, the rule that the
value breaks, and the fix. All of them survive pickling, since they travel between processes.
"""

from __future__ import annotations

SHOWN_ROWS = 64


class RaytrainError(Exception):
    """Base of all errors that raytrain raises on purpose."""


class FourPartError(RaytrainError, ValueError):
    """An error that the user can mend.

    Args:
        where: the setting, file, column or hook in which it was found.
        value: what was found there.
        rule: what would have been right.
        fix: what to do now.
    """

    def __init__(self, where: str, value: object, rule: str, fix: str) -> None:
        super().__init__(where, value, rule, fix)
        self.where, self.value, self.rule, self.fix = where, str(value), rule, fix

    def __str__(self) -> str:
        return f"{self.where}\n  value: {self.value}\n  rule:  {self.rule}\n  fix:   {self.fix}"


class ConfigError(FourPartError):
    """A setting of the run or a field of the task is wrong."""


class DataError(FourPartError):
    """The data cannot be read, or are not what the task needs."""


class StorageError(FourPartError):
    """The run's storage cannot be used as asked."""


class ResumeError(FourPartError):
    """There is nothing to resume, or what there is does not fit."""


class ResourceError(FourPartError):
    """The cluster does not have what the run asks for."""


class CheckpointError(RaytrainError):
    """A checkpoint could not be written or does not match its manifest."""


class TaskError(RaytrainError):
    """The user's own code raised: the message is the user's traceback.

    Args:
        traceback: the formatted traceback, ending with the exception's own line.
        where: the hook and step, for example "loss at step 12 on rank 1".
    """

    def __init__(self, traceback: str, where: str) -> None:
        super().__init__(traceback, where)
        self.traceback, self.where = traceback, where

    def __str__(self) -> str:
        return f"{self.traceback.rstrip()}\nraised by {self.where}"


class WorkersLostError(RaytrainError):
    """More workers were lost without a step in between than the run allows."""


class DeadlyRowsError(RaytrainError):
    """Worker processes died in the same step again and again, with the same rows.

    Args:
        step: in which they died; counts from 0.
        logical: the logical workers whose rows each of them had.
        cause: what Ray said of the last one.
        rows: the rows, where they are known.
    """

    def __init__(self, step: int, logical: tuple[int, ...], cause: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(step, logical, cause, rows)
        self.step, self.logical, self.cause, self.rows = step, logical, cause, rows

    def __str__(self) -> str:
        shares = ", ".join(map(str, self.logical))
        shown = ", ".join(map(str, self.rows[:SHOWN_ROWS])) + (", ..." if len(self.rows) > SHOWN_ROWS else "")
        rows = f"\nits rows of train: {shown}" if self.rows else ""
        where = f"step {self.step}, with the share of logical worker {shares}"
        return f"the same rows killed their worker again and again: {where}: {self.cause}{rows}"


class InternalError(RaytrainError):
    """A rule that raytrain itself must keep is broken: a bug, please report it."""
