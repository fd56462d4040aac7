"""The driver shows each event once, forwards a stop request until it is obeyed, and shows the end without the log."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from raytrain.events.kinds import Event, OutputLine, RunEnded
from raytrain.launch import monitor
from raytrain.launch.monitor import (
    END_LIMIT_S,
    SIGNALS,
    RunMonitor,
    StopRequest,
    StopTimeout,
    exit_on_signals,
    stop_on_signals,
)

ENDED = RunEnded(outcome="completed", step=9, message="", time=1.0)
UNAVAILABLE = ActorUnavailableError("unavailable", None)


def remote(method: Any) -> Any:
    return SimpleNamespace(remote=method)


def output(number: int) -> Event:
    return OutputLine(rank=0, stream="stdout", text=str(number))


class Scene:
    """A monitor whose event writer has two events of an earlier driver; Ray, clock and viewer are simulated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.num_stops, self.num_ticks, self.limits = 0.0, 0, 0, list[Any]()
        self.is_slow = self.is_unavailable = self.hangs = False
        self.events, self.shown, self.closed = [output(0), output(1)], list[Event](), list[bool]()
        self.writer = SimpleNamespace(
            opened_at=remote(lambda: 2),
            since=remote(lambda number: UNAVAILABLE if self.is_unavailable else ("reply", self.events[number:])),
            append=remote(lambda events: self.is_unavailable or self.events.extend(events)),
            close=remote(lambda: UNAVAILABLE if self.is_unavailable else self.closed.append(True)),
        )
        ray = SimpleNamespace(get=self._get, wait=lambda refs, timeout: ([] if self.is_slow else refs, []))
        monkeypatch.setattr(monitor, "ray", ray)
        self.request = StopRequest(clock=lambda: self.now)
        rendezvous = SimpleNamespace(stop=remote(self._stop))
        self.monitor = RunMonitor(self.writer, rendezvous, self, self.request, 2.5, clock=lambda: self.now)

    def _get(self, reply: Any, timeout: float | None = None) -> Any:
        self.limits.append(timeout)
        if self.hangs:
            raise GetTimeoutError("no answer")
        if isinstance(reply, Exception):
            raise reply
        return reply[1] if isinstance(reply, tuple) else reply

    def _stop(self) -> None:
        self.num_stops += 1

    def on_events(self, events: Sequence[Event]) -> None:
        self.shown += events

    def tick(self, now: float) -> None:
        self.num_ticks += 1

    def status(self, text: str, now: float) -> None: ...

    def poll(self, after_s: float = 0.5) -> None:
        self.now += after_s
        self.monitor.poll()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_each_new_event_is_shown_once_and_in_order(scene: Scene) -> None:
    scene.poll()
    scene.events += [output(2), output(3)]
    scene.poll()
    scene.poll()
    scene.events.append(output(4))
    scene.monitor.finish(ENDED)
    assert scene.shown == [output(2), output(3), output(4), ENDED]
    assert (scene.num_ticks, scene.closed) == (3, [True])


def test_the_event_writer_is_polled_at_intervals_and_never_waited_for(scene: Scene) -> None:
    scene.poll()
    scene.events.append(output(2))
    scene.poll(after_s=0.4)
    assert scene.shown == []
    scene.is_slow = True
    scene.poll()
    assert scene.shown == []
    scene.is_slow = False
    scene.poll()
    scene.poll()
    assert (scene.shown, scene.num_ticks) == ([output(2)], 5)


def test_r16_a_second_signal_in_the_middle_of_a_poll_shows_nothing_twice(scene: Scene) -> None:
    scene.poll()
    scene.events.append(output(2))
    since = scene.writer.since
    scene.poll()
    scene.writer.since = remote(lambda number: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        scene.poll()
    scene.writer.since = since
    scene.events.append(output(3))
    scene.monitor.finish(ENDED)
    assert scene.shown == [output(2), output(3), ENDED]


def test_p1_after_the_event_writer_restarted_everything_is_shown_once(scene: Scene) -> None:
    scene.is_unavailable = True
    for _ in range(3):
        scene.poll()
    scene.events += [output(2), output(3)]
    scene.is_unavailable = False
    for _ in range(3):
        scene.poll()
    assert (scene.shown, scene.num_ticks) == ([output(2), output(3)], 6)


@pytest.mark.parametrize("fault", ["", "is_unavailable", "hangs"])
def test_r6_the_end_is_shown_within_a_limit_also_without_the_log(scene: Scene, fault: str) -> None:
    scene.limits.clear()
    setattr(scene, fault or "is_slow", True)
    scene.monitor.finish(ENDED)
    assert scene.shown == [ENDED]
    limits = {"": [END_LIMIT_S] * 3, "is_unavailable": [END_LIMIT_S] * 2 + [0.1], "hangs": [END_LIMIT_S, 0.1]}
    assert scene.limits == limits[fault]


def test_r16_a_stop_request_is_forwarded_repeatedly_and_has_a_limit(scene: Scene) -> None:
    scene.poll()
    scene.request.on_signal(signal.SIGTERM, None)
    for _ in range(10):
        scene.poll(after_s=0.25)
    assert scene.num_stops == 2, "a restarted rendezvous does not know the request"
    with pytest.raises(StopTimeout, match=r"did not finish a step and save it within 2\.5 s"):
        scene.poll(after_s=0.1)


def test_r16_the_first_signal_is_a_request_and_the_second_one_an_end(scene: Scene) -> None:
    assert (scene.request.signal, scene.request.waited_s) == (None, 0.0)
    scene.request.on_signal(signal.SIGTERM, None)
    scene.now = 2.5
    with pytest.raises(KeyboardInterrupt):
        scene.request.on_signal(signal.SIGINT, None)
    assert (scene.request.signal, scene.request.waited_s) == (signal.SIGTERM, 2.5)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_handled_during_the_block_and_handlers_are_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with stop_on_signals() as request:
        request.listen()
        os.kill(os.getpid(), number)
        assert request.signal == number
        signal.signal(number, signal.SIG_IGN)
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_r16_a_signal_that_arrives_twice_at_once_is_one_request(scene: Scene) -> None:
    """`timeout` signals its child and then the group, and so does a shell whose terminal closes."""
    for after_s in (0.0, 0.1, 0.3):
        scene.now += after_s
        scene.request.on_signal(signal.SIGTERM, None)
    scene.now += 0.2
    with pytest.raises(KeyboardInterrupt):
        scene.request.on_signal(signal.SIGTERM, None)


def test_r16_a_closed_terminal_is_ignored_where_the_job_was_started_to_outlive_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as request:
            request.listen()
            os.kill(os.getpid(), signal.SIGHUP)
            assert (request.signal, signal.getsignal(signal.SIGHUP)) == (None, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_r16_before_there_is_anything_to_stop_a_signal_ends_the_driver(number: signal.Signals, code: int) -> None:
    with pytest.raises(SystemExit) as caught, stop_on_signals():
        os.kill(os.getpid(), number)
    assert caught.value.code == code
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_do_not_change_signal_handlers() -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[int | None]()

    def inside() -> None:
        with stop_on_signals() as request, exit_on_signals():
            request.listen()
            seen.append(request.signal)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert (seen, signal.getsignal(signal.SIGINT)) == ([None], before)


def test_r16_sigterm_exits_with_143_if_no_run_handles_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exit_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert (caught.value.code, signal.getsignal(signal.SIGTERM)) == (143, before)
