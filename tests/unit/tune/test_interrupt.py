"""Signals of a sweep: the first one is passed on to Ray Tune while it runs, and nothing is left of it afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from raytrain.tune.interrupt import TOLD, interruptible

NUMBERS = (signal.SIGINT, signal.SIGTERM, TOLD)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


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


def test_a_signal_before_ray_tune_runs_ends_the_command() -> None:
    with interruptible() as interrupts:
        interrupts.listen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interrupts.signal == signal.SIGTERM
