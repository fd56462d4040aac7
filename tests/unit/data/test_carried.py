from __future__ import annotations

import pickle
import threading

import pytest

from raytrain.data.carried import Carried, Carrier
from raytrain.errors import DataError, TaskError


def carry(error: Exception) -> Carried:
    with pytest.raises(Carried) as caught, Carrier():
        raise error
    caught.value.args = (*caught.value.args, "a hint that somebody added")
    carried = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(carried, Carried)
    return carried


def test_an_exception_arrives_as_it_was_raised_with_its_traceback() -> None:
    carried = carry(DataError("where", 3, "rule", "fix"))
    with pytest.raises(DataError) as caught:
        carried.deliver()
    assert caught.value.args == ("where", 3, "rule", "fix")
    assert caught.value.__cause__ is carried
    assert "in carry" in str(carried)


def test_one_that_cannot_be_pickled_arrives_as_its_traceback() -> None:
    with pytest.raises(TaskError, match="in carry"):
        carry(ValueError(threading.Lock())).deliver()


def test_an_interrupt_is_left_alone() -> None:
    with pytest.raises(KeyboardInterrupt), Carrier():
        raise KeyboardInterrupt
