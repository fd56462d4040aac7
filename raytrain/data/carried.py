"""How does an exception get from a process of Ray Data to the worker, as it was raised?

Ray Data changes the arguments of exceptions that pass through it, after which some of them cannot be unpickled. So the
exception travels pickled inside of another one, with its traceback as text. Knows nothing of data.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from types import TracebackType
from typing import NoReturn

from raytrain.errors import RaytrainError, TaskError


class Carried(RaytrainError):
    """An exception on its way.

    Args:
        pickled: the exception, or b"" where it cannot be pickled.
        text: its traceback.
        added: what Ray Data adds; ignored.
    """

    def __init__(self, pickled: bytes, text: str, *added: object) -> None:
        super().__init__(pickled, text, *added)
        self.pickled, self.text = pickled, text

    def __str__(self) -> str:
        return self.text

    def deliver(self) -> NoReturn:
        """Raises the original exception, caused by this one; or TaskError with the traceback where that is impossible."""
        if self.pickled:
            raise pickle.loads(self.pickled) from self
        raise TaskError(self.text, "reading the data or `transform`")


class Carrier:
    """A context whose exceptions leave it as `Carried`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            raise Carried(_pickled(error), "".join(traceback.format_exception(error))) from error


def _pickled(error: Exception) -> bytes:
    from ray import cloudpickle  # pickles classes of the user's script by value

    with contextlib.suppress(Exception):  # the user's exception may fail in any way here; its text is carried anyway
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    return b""
