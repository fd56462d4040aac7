"""A signal is a wish first and an end second, and handlers are put back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from raytrain.launch.stopping import StopWish, exit_on_sigterm, listen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_r16_a_signal_becomes_a_wish_and_counts_the_time_from_then_on(number: signal.Signals) -> None:
    now = [5.0]
    wish = StopWish(clock=lambda: now[0])
    assert (wish.signal, wish.waited_s) == (None, 0.0)
    wish.on_signal(number, None)
    now[0] = 7.5
    assert (wish.signal, wish.waited_s) == (number, 2.5)


def test_r16_a_second_signal_ends_the_run_and_does_not_change_the_first() -> None:
    wish = StopWish()
    wish.on_signal(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        wish.on_signal(signal.SIGINT, None)
    assert wish.signal == signal.SIGTERM


def test_signals_of_this_process_are_heard_inside_the_block_only() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with listen() as wish:
        os.kill(os.getpid(), signal.SIGINT)
        assert wish.signal == signal.SIGINT
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_handlers_that_somebody_took_are_taken_back_and_put_back_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listen() as wish:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wish.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert wish.signal == signal.SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_listens_to_nothing_and_breaks_nothing() -> None:
    before, heard = signal.getsignal(signal.SIGINT), []

    def inside() -> None:
        with listen() as wish, exit_on_sigterm():
            heard.append(wish.signal)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert heard == [None]
    assert signal.getsignal(signal.SIGINT) is before


def test_r16_sigterm_exits_with_143_where_no_run_listens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
