from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raytrain.data.prefetch import Prefetcher


def test_items_come_in_order_and_the_iterator_is_at_most_depth_and_two_ahead() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for i in range(300):
            drawn.append(i)
            yield i

    prefetcher = Prefetcher(items, depth=2)
    for wanted in range(300):
        assert prefetcher.next() == wanted
        assert len(drawn) <= wanted + 1 + 2 + 2  # used, waiting, and one each that is handed over and being produced
    assert prefetcher.next() is None
    assert prefetcher.next() is None


def test_an_exception_of_the_iterator_is_raised_at_each_next() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    prefetcher = Prefetcher(items, depth=4)
    assert prefetcher.next() == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            prefetcher.next()


def test_close_ends_a_thread_that_waits_for_room_and_closes_its_iterator() -> None:
    closed = threading.Event()

    class Items(Iterator[int]):
        def __next__(self) -> int:
            return 0

        def close(self) -> None:
            closed.set()

    prefetcher = Prefetcher(Items, depth=1)
    assert prefetcher.next() == 0
    prefetcher.close()
    prefetcher.close()
    assert prefetcher.join(10)
    assert closed.is_set()
    assert prefetcher.next() is None
