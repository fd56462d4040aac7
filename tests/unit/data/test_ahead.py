from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from raytrain.data.ahead import Ahead


def test_items_come_in_order_and_none_after_the_last_one() -> None:
    ahead = Ahead(lambda: iter(range(20)), depth=3)
    assert [ahead.next() for _ in range(20)] == list(range(20))
    assert ahead.next() is None
    assert ahead.next() is None


def test_no_more_than_depth_and_two_items_are_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in itertools.count():
            made.append(i)
            yield i

    ahead = Ahead(items, depth=2)
    for wanted in range(1000):
        assert ahead.next() == wanted
        assert len(made) <= wanted + 1 + 2 + 2  # used, waiting, and one each that is handed over and being made
    ahead.close()


def test_an_exception_of_the_iterator_is_raised_where_the_item_is_wanted_each_time() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    ahead = Ahead(items, depth=4)
    assert ahead.next() == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            ahead.next()


def test_close_ends_a_thread_that_waits_for_room_and_closes_its_iterator() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    ahead = Ahead(items, depth=1)
    assert ahead.next() == 0
    ahead.close()
    ahead.close()
    assert ahead.join(10)
    assert closed.is_set()
    assert ahead.next() is None
