"""Events and steps reach the log in order, none is lost, and a new leader tells what the old one may not have told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytrain.events.curve import StepRecord
from raytrain.events.kinds import Event, Printed, StateRestored, StepsDone
from raytrain.events.log import EventLog
from raytrain.rundir import RunDir
from raytrain.worker import telemetry as module
from raytrain.worker.telemetry import PATIENCE_S, Send, Telemetry

Make = Callable[..., Telemetry]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes telemetry that sends only when it is told to."""
    monkeypatch.setattr(module, "SEND_EVERY_S", 3600.0)
    made: list[Telemetry] = []

    def build(send: Send) -> Telemetry:
        made.append(Telemetry(send))
        return made[-1]

    yield build
    for telemetry in made:
        telemetry._closed.set()


def record(step: int, finished: float = 0.0) -> StepRecord:
    return StepRecord(step, 0.5, 16.0, 16, 0.1, finished)


def said(text: str) -> Printed:
    return Printed(rank=0, stream="stdout", text=text)


def shown(events: list[Event]) -> list[object]:
    """Texts of lines, and numbers of steps."""
    parts: list[object] = []
    for event in events:
        if isinstance(event, StepsDone):
            parts.extend(range(event.first_step, event.first_step + len(event.losses)))
        elif isinstance(event, Printed):
            parts.append(event.text)
        else:
            parts.append(event.kind)
    return parts


def test_events_and_steps_are_told_in_the_order_in_which_they_happened(make: Make) -> None:
    told: list[Event] = []
    telemetry = make(lambda events, limit_s: told.extend(events))
    telemetry.lead(True)
    telemetry.record(record(0))
    telemetry.record(record(1))
    telemetry.emit(said("after 1"))
    telemetry.record(record(2))
    telemetry.flush()
    assert shown(told) == [0, 1, "after 1", 2]
    telemetry.flush()
    assert shown(told) == [0, 1, "after 1", 2], "nothing is told twice"


def test_only_the_leader_tells_steps_and_everybody_tells_events(make: Make) -> None:
    told: list[Event] = []
    telemetry = make(lambda events, limit_s: told.extend(events))
    telemetry.lead(False)
    telemetry.record(record(0))
    telemetry.emit(said("hello"))
    telemetry.flush()
    assert shown(told) == ["hello"]


def test_a_new_leader_tells_all_steps_that_it_remembers(make: Make) -> None:
    told: list[Event] = []
    telemetry = make(lambda events, limit_s: told.extend(events))
    telemetry.lead(False)
    telemetry.record(record(0))
    telemetry.record(record(1))
    telemetry.lead(True)
    telemetry.flush()
    assert shown(told) == [0, 1]
    telemetry.lead(False)
    telemetry.record(record(2))
    telemetry.lead(True)
    telemetry.flush()
    assert shown(told[1:]) == [0, 1, 2]


def test_steps_that_were_taken_while_this_worker_was_out_of_the_group_leave_a_gap_in_the_numbers(make: Make) -> None:
    told: list[Event] = []
    telemetry = make(lambda events, limit_s: told.extend(events))
    for step in (5, 6, 9, 10):
        telemetry.record(record(step))
    telemetry.lead(True)
    telemetry.flush()
    assert shown(told) == [5, 6, 9, 10]


def test_a_follower_forgets_old_steps_and_a_leader_only_those_it_has_told(make: Make) -> None:
    for leads in (False, True):
        told: list[Event] = []
        telemetry = make(lambda events, limit_s, told=told: told.extend(events))
        telemetry.lead(leads)
        telemetry.record(record(0, finished=0.0))
        telemetry.record(record(1, finished=module.KEEP_S + 1))
        telemetry.lead(True)
        telemetry.flush()
        assert shown(told) == ([0, 1] if leads else [1])


def test_what_could_not_be_delivered_is_sent_again_in_order(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    is_down = True

    def send(events: list[Event], limit_s: float) -> None:
        if is_down:
            raise ConnectionError("the sink is away")
        told.extend(events)

    telemetry = make(send)
    telemetry.lead(True)
    telemetry.record(record(0))
    telemetry.emit(said("a line"))
    with caplog.at_level(logging.WARNING):
        telemetry.flush()
    assert "could not deliver 2 events" in caplog.text
    telemetry.record(record(1))
    is_down = False
    telemetry.flush()
    assert shown(told) == [0, "a line", 1]


def test_events_that_nobody_takes_do_not_fill_the_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT", 3)

    def send(events: list[Event], limit_s: float) -> None:
        raise ConnectionError("the sink is away")

    telemetry = make(send)
    for number in range(10):
        telemetry.emit(said(str(number)))
        telemetry.flush()
    assert shown(telemetry._events) == ["7", "8", "9"]


def test_a_delivery_comes_after_one_that_is_on_its_way(make: Make) -> None:
    """Else a checkpoint could be written before the log knows its steps."""
    told: list[Event] = []
    sending, go_on = threading.Event(), threading.Event()

    def send(events: list[Event], limit_s: float) -> None:
        if not sending.is_set():
            sending.set()
            go_on.wait(10)
        told.extend(events)

    telemetry = make(send)
    telemetry.lead(True)
    telemetry.record(record(0))
    slow = threading.Thread(target=telemetry.flush)
    slow.start()
    assert sending.wait(10)
    telemetry.record(record(1))  # the training thread does not wait for the delivery
    waiting = threading.Thread(target=telemetry.flush)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "it returned while step 0 was still on its way"
    go_on.set()
    slow.join()
    waiting.join()
    assert shown(told) == [0, 1]


def test_r6_while_deliveries_fail_nobody_waits_long_for_one(make: Make) -> None:
    limits: list[float] = []
    is_down = True

    def send(events: list[Event], limit_s: float) -> None:
        limits.append(limit_s)
        if is_down:
            raise ConnectionError("the sink is away")

    telemetry = make(send)
    telemetry.emit(said("a line"))
    for _ in range(3):
        telemetry.flush()
    is_down = False
    telemetry.flush()
    telemetry.emit(said("another"))
    telemetry.flush()
    assert limits == [PATIENCE_S, PATIENCE_S / 10, PATIENCE_S / 10, PATIENCE_S / 10, PATIENCE_S]


def test_r6_a_delivery_that_hangs_is_not_waited_for_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    sending, go_on = threading.Event(), threading.Event()

    def send(events: list[Event], limit_s: float) -> None:
        sending.set()
        go_on.wait(10)

    telemetry = make(send)
    telemetry.emit(said("a line"))
    slow = threading.Thread(target=telemetry.flush)
    slow.start()
    assert sending.wait(10)
    telemetry.flush()
    go_on.set()
    slow.join()


def test_the_time_of_an_event_is_that_at_which_it_happened(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now[0]))
    telemetry = make(lambda events, limit_s: told.extend(events))
    telemetry.emit(said("a line"))
    now[0] = 130.0
    telemetry.flush()
    assert [event.time for event in told] == [100.0]


def test_waits_for_data_are_told_with_the_steps(make: Make) -> None:
    told: list[Event] = []
    telemetry = make(lambda events, limit_s: told.extend(events))
    telemetry.lead(True)
    for step, data_wait_s in enumerate((0.5, 0.0)):
        telemetry.record(replace(record(step), data_wait_s=data_wait_s))
    telemetry.flush()
    assert [event.data_waits for event in told if isinstance(event, StepsDone)] == [[0.5, 0.0]]


def test_the_thread_sends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_EVERY_S", 0.001)
    arrived = threading.Event()
    telemetry = Telemetry(lambda events, limit_s: arrived.set() if events else None)
    telemetry.emit(said("hello"))
    assert arrived.wait(10)
    telemetry.close()


def test_closing_delivers_what_is_left_and_waits_for_it(make: Make) -> None:
    told: list[Event] = []
    telemetry = make(lambda events, limit_s: told.extend(events))
    telemetry.lead(True)
    telemetry.record(record(0))
    telemetry.close()
    assert shown(told) == [0]


def test_steps_that_two_leaders_tell_are_once_in_the_log(make: Make, tmp_path: Path) -> None:
    log = EventLog(RunDir.at(str(tmp_path), "run"))
    workers = [make(lambda events, limit_s: log.append(events)) for _ in range(2)]
    workers[0].lead(True)
    workers[0].emit(StateRestored(step=0, checkpoint=""))
    for step in range(4):
        for worker in workers:
            worker.record(record(step))
        if step == 2:
            workers[0].flush()
    workers[1].lead(True)  # the first one died with step 3
    workers[1].flush()
    assert shown(log.since(0)) == ["state_restored", 0, 1, 2, 3]
    log.close()


def test_a_newcomer_that_becomes_the_leader_tells_what_the_old_one_took_with_it(make: Make) -> None:
    told: list[Event] = []
    old, newcomer = make(lambda events, limit_s: told.extend(events)), make(lambda events, limit_s: told.extend(events))
    old.lead(True)
    for step in range(3):
        old.record(record(step))
    old.flush()
    for step in range(3, 6):
        old.record(record(step))
    assert [r.step for r in old.untold()] == [3, 4, 5]
    newcomer.learn(old.untold())
    newcomer.lead(False)
    newcomer.record(record(6))
    newcomer.lead(True)
    newcomer.flush()
    assert shown(told) == [0, 1, 2, 3, 4, 5, 6]


def test_what_could_not_be_delivered_is_untold(make: Make) -> None:
    def fail(events: list[Event], limit_s: float) -> None:
        raise OSError("away")

    telemetry = make(fail)
    telemetry.lead(True)
    telemetry.record(record(0))
    telemetry.flush()
    assert [r.step for r in telemetry.untold()] == [0]


def test_a_rank_learns_only_what_it_does_not_know(make: Make) -> None:
    telemetry = make(lambda events, limit_s: None)
    telemetry.record(record(4))
    telemetry.learn([record(3), record(4)])
    assert [r.step for r in telemetry.untold()] == [3, 4]
