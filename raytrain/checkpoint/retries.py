"""A storage that fails for a moment is asked again. Runs wherever a store is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from raytrain.errors import StorageError

ATTEMPTS = 3
FIRST_PAUSE_S = 0.5  # doubles with each attempt

T = TypeVar("T")


class Retries:
    """Repeats what fails with an OSError.

    Args:
        sleep: waits for that many seconds before an attempt is repeated.
    """

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep

    def run(self, action: Callable[[], T]) -> T:
        """Does it, in three attempts, with a pause that doubles. Raises OSError; a missing file stays missing."""
        for attempt in range(ATTEMPTS - 1):
            try:
                return action()
            except FileNotFoundError:
                raise
            except OSError:
                self._sleep(FIRST_PAUSE_S * 2**attempt)
        return action()

    def read(self, path: str, action: Callable[[], T]) -> T:
        """As `run`, for what reads a path.

        Raises:
            FileNotFoundError: it is not there.
            StorageError: anything else that the storage answers.
        """
        try:
            return self.run(action)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(path, error, "the run's storage can be read", "check the storage and start again") from error
