"""Signals of a sweep: the first one is passed on to Ray Tune while it runs, and nothing is left of it afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raytrain.tune.interrupt import TOLD, interruptible

NUMBERS = (signal.SIGINT, signal.SIGTERM, TOLD)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS[:2]] == before[:2]
    signal.signal(TOLD, before[2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_tells_ray_tune_and_the_second_ends_everything(number: signal.Signals) -> None:
    told: list[int] = []
    with interruptible() as interrupts:
        interrupts.listen()
        signal.signal(TOLD, lambda number, frame: told.append(number))
        signal.raise_signal(number)
        assert (interrupts.signal, told) == (number, [TOLD])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert (interrupts.signal, told) == (number, [TOLD])
    assert told == [TOLD]


def test_it_listens_again_after_somebody_else_took_the_signals_over() -> None:
    with interruptible() as interrupts:
        interrupts.listen()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        interrupts.listen()
        assert signal.getsignal(signal.SIGTERM) == interrupts.on_signal


def test_an_error_gives_the_signals_back_too() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]

    def fails() -> None:
        with interruptible() as interrupts:
            interrupts.listen()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_in_another_thread_nothing_is_listened_to() -> None:
    before, heard = [signal.getsignal(number) for number in NUMBERS], list[Any]()

    def elsewhere() -> None:
        with interruptible() as interrupts:
            interrupts.listen()
            heard.append([signal.getsignal(number) for number in NUMBERS])
        heard.append("and it ends")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert heard == [before, "and it ends"]


@pytest.mark.parametrize("left", [signal.SIG_DFL, lambda number, frame: None], ids=["nothing", "an earlier sweep"])
def test_a_signal_before_ray_tune_runs_ends_the_command(left: Any) -> None:
    signal.signal(TOLD, left)
    with interruptible() as interrupts:
        interrupts.listen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.signal == signal.SIGTERM
