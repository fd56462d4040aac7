"""Events and steps reach the log in order and complete; captured output; the parts of a pause."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from raytrain.events.curve import StepRecord
from raytrain.events.kinds import Event, OutputLine, StateRestored, StepsDone
from raytrain.events.log import Batch, EventLog, Receipt, read
from raytrain.rundir import RunDir
from raytrain.worker import telemetry as module
from raytrain.worker.telemetry import SEND_TIMEOUT_S, CapturedStream, PauseTimer, Send, Telemetry, captured_output

Make = Callable[..., Telemetry]


class Receiver:
    """A log that keeps what is delivered, and the timeouts; fails while it is down."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.limits: list[float] = []
        self.is_down = False

    def __call__(self, batch: Batch, durably: bool, timeout_s: float) -> Receipt:
        self.limits.append(timeout_s)
        if self.is_down:
            raise ConnectionError("the writer is down")
        self.events.extend(batch.events)
        end = batch.first + len(batch.events)
        return Receipt(received=end, durable=end)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes telemetry that sends only when it is told to."""
    monkeypatch.setattr(module, "SEND_EVERY_S", 3600.0)
    made: list[Telemetry] = []

    def build(send: Send, is_leader: bool = True) -> Telemetry:
        made.append(Telemetry(send))
        made[-1].set_leader(is_leader)
        return made[-1]

    yield build
    for telemetry in made:
        telemetry._closed.set()


@pytest.fixture
def sent() -> Receiver:
    return Receiver()


@pytest.fixture
def telemetry(make: Make, sent: Receiver) -> Telemetry:
    """Of a leader; it delivers to `sent`."""
    return make(sent)


def record(step: int, finished: float = 0.0) -> StepRecord:
    return StepRecord(step, 0.5, 16.0, 16, 0.1, finished)


def record_all(telemetry: Telemetry, *steps: int) -> None:
    for step in steps:
        telemetry.record(record(step))


def said(text: str) -> OutputLine:
    return OutputLine(rank=0, stream="stdout", text=text)


def shown(events: list[Event]) -> list[object]:
    """Texts of lines, numbers of steps, and kinds of other events."""
    parts: list[object] = []
    for event in events:
        if isinstance(event, StepsDone):
            parts.extend(range(event.first_step, event.first_step + len(event.losses)))
        else:
            parts.append(event.text if isinstance(event, OutputLine) else event.kind)
    return parts


def test_events_and_steps_are_sent_once_in_their_order(telemetry: Telemetry, sent: Receiver) -> None:
    record_all(telemetry, 0, 1)
    telemetry.emit(said("after 1"))
    record_all(telemetry, 2)
    telemetry.flush()
    telemetry.flush()
    assert shown(sent.events) == [0, 1, "after 1", 2]


def test_only_the_leader_sends_steps_and_a_new_one_sends_all_that_it_has(make: Make, sent: Receiver) -> None:
    telemetry = make(sent, is_leader=False)
    record_all(telemetry, 0, 1)
    telemetry.emit(said("hello"))
    telemetry.flush()
    assert shown(sent.events) == ["hello"], "all ranks send events"
    for expected in ([0, 1], [0, 1, 2]):
        sent.events.clear()
        telemetry.set_leader(True)
        telemetry.flush()
        assert shown(sent.events) == expected
        telemetry.set_leader(False)
        record_all(telemetry, 2)


def test_steps_without_this_worker_leave_a_gap_in_the_numbers(telemetry: Telemetry, sent: Receiver) -> None:
    record_all(telemetry, 5, 6, 9, 10)
    telemetry.flush()
    assert shown(sent.events) == [5, 6, 9, 10]


@pytest.mark.parametrize(("leads", "kept"), [(True, [0, 1]), (False, [1])])
def test_old_records_are_dropped_once_they_are_acknowledged(
    leads: bool, kept: list[int], make: Make, sent: Receiver
) -> None:
    telemetry = make(sent, is_leader=leads)
    telemetry.record(record(0, finished=0.0))
    telemetry.record(record(1, finished=module.KEEP_S + 1))
    telemetry.set_leader(True)
    telemetry.flush()
    assert shown(sent.events) == kept


def test_what_could_not_be_delivered_is_sent_again_in_order(
    telemetry: Telemetry, sent: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    sent.is_down = True
    record_all(telemetry, 0)
    telemetry.emit(said("a line"))
    with caplog.at_level(logging.WARNING):
        telemetry.flush()
    assert "could not deliver 2 events" in caplog.text
    assert [r.step for r in telemetry.unacknowledged()] == [0]
    record_all(telemetry, 1)
    sent.is_down = False
    telemetry.flush()
    assert shown(sent.events) == [0, "a line", 1]


def test_undelivered_events_are_bounded(telemetry: Telemetry, sent: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    sent.is_down = True
    for number in range(10):
        telemetry.emit(said(str(number)))
        telemetry.flush()
    sent.is_down = False
    telemetry.flush()
    assert shown(sent.events) == ["7", "8", "9"]


def test_r1_steps_are_sent_however_many_events_were_dropped(
    telemetry: Telemetry, sent: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    sent.is_down = True
    for step in range(4):
        record_all(telemetry, step)
        telemetry.emit(said(f"after {step}"))
        telemetry.flush()
    sent.is_down = False
    telemetry.flush()
    telemetry.flush()
    assert {0, 1, 2, 3} <= set(shown(sent.events))
    assert telemetry.unacknowledged() == []


class Hanging(Receiver):
    """Hangs in its first delivery until `go_on`; `flush` has begun that one in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def __call__(self, batch: Batch, durably: bool, timeout_s: float) -> Receipt:
        if not self.hangs.is_set():
            self.hangs.set()
            self.go_on.wait(10)
        return super().__call__(batch, durably, timeout_s)

    def flush(self, telemetry: Telemetry) -> threading.Thread:
        thread = threading.Thread(target=telemetry.flush)
        thread.start()
        assert self.hangs.wait(10)
        return thread


def test_deliveries_do_not_overtake_each_other(make: Make) -> None:
    """Else a checkpoint could be written before the log knows its steps."""
    hanging = Hanging()
    telemetry = make(hanging)
    record_all(telemetry, 0)
    slow = hanging.flush(telemetry)
    record_all(telemetry, 1)  # the training thread does not wait for the delivery
    waiting = hanging.flush(telemetry)
    waiting.join(0.05)
    assert waiting.is_alive(), "it returned while step 0 was still on its way"
    hanging.go_on.set()
    slow.join()
    waiting.join()
    assert shown(hanging.events) == [0, 1]


def test_r6_timeouts_are_short_while_deliveries_fail(telemetry: Telemetry, sent: Receiver) -> None:
    sent.is_down = True
    telemetry.emit(said("a line"))
    for _ in range(3):
        telemetry.flush()
    sent.is_down = False
    telemetry.flush()
    telemetry.emit(said("another"))
    telemetry.flush()
    assert sent.limits == [SEND_TIMEOUT_S, *[SEND_TIMEOUT_S / 10] * 3, SEND_TIMEOUT_S]


def test_r6_a_flush_does_not_wait_long_for_a_delivery_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_TIMEOUT_S", 0.05)
    hanging = Hanging()
    telemetry = make(hanging)
    telemetry.emit(said("a line"))
    slow = hanging.flush(telemetry)
    telemetry.flush()
    assert slow.is_alive(), "it still hangs"
    hanging.go_on.set()
    slow.join()


def test_the_time_of_an_event_is_that_at_which_it_happened(
    telemetry: Telemetry, sent: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now in (100.0, 130.0):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda now=now: now))
        telemetry.emit(said("a line"))
    telemetry.flush()
    assert [event.time for event in sent.events] == [100.0, 130.0]


def test_waits_for_data_are_sent_with_the_steps(telemetry: Telemetry, sent: Receiver) -> None:
    for step, data_wait_s in enumerate((0.5, 0.0)):
        telemetry.record(replace(record(step), data_wait_s=data_wait_s))
    telemetry.flush()
    assert [event.data_waits for event in sent.events if isinstance(event, StepsDone)] == [[0.5, 0.0]]


def test_the_thread_sends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_EVERY_S", 0.001)
    arrived = threading.Event()

    def send(batch: Batch, durably: bool, timeout_s: float) -> Receipt:
        arrived.set()
        return Receipt(1, 1)

    telemetry = Telemetry(send)
    telemetry.emit(said("hello"))
    assert arrived.wait(10)
    telemetry.close()


def test_closing_delivers_what_is_left_and_waits_for_it(telemetry: Telemetry, sent: Receiver) -> None:
    record_all(telemetry, 0)
    telemetry.close()
    assert shown(sent.events) == [0]


def test_steps_that_two_leaders_send_are_in_the_log_once(make: Make, tmp_path: Path) -> None:
    log = EventLog(RunDir.at(str(tmp_path), "run"))
    first, second = (make(lambda batch, durably, _: log.deliver(batch, durably), leads) for leads in (True, False))
    first.emit(StateRestored(step=0, checkpoint=""))
    for worker in (first, second):
        record_all(worker, 0, 1, 2)
    first.flush()
    record_all(second, 3)
    second.set_leader(True)  # the first one died with step 3
    second.flush()
    assert shown(log.since(0)) == ["state_restored", 0, 1, 2, 3]
    log.close()


@pytest.mark.parametrize("arrives", ["before the next", "never"])
def test_a_delivery_that_timed_out_is_in_the_log_once_whether_it_arrived_or_not(
    arrives: str, make: Make, tmp_path: Path
) -> None:
    log, delayed = EventLog(RunDir.at(str(tmp_path), "run")), list[Batch]()

    def send(batch: Batch, durably: bool, timeout_s: float) -> Receipt:
        if not delayed:  # the log stands still: the call waits in its queue, or is lost with its process
            delayed.append(batch)
            raise TimeoutError
        if arrives == "before the next":
            log.deliver(delayed[0])
        return log.deliver(batch, durably)

    telemetry = make(send)
    for part in ("one", "two"):
        telemetry.emit(said(part))
        telemetry.flush()
    assert shown(log.since(0)) == ["one", "two"]
    log.close()


def test_r1_what_a_log_had_only_in_memory_when_it_died_is_sent_again(make: Make, tmp_path: Path) -> None:
    """An object store is written every ten seconds; the writer dies in between, twice."""
    now, store = [0.0], fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    logs = [EventLog(RunDir(store, "run", is_local=False), clock=lambda: now[0])]
    telemetry = make(lambda batch, durably, _: logs[-1].deliver(batch, durably))
    for step in range(6):
        record_all(telemetry, step)
        telemetry.flush()
        now[0] += 1.0
        if step in (1, 3):
            assert telemetry.unacknowledged(), "it is in memory only"
            logs.append(EventLog(RunDir(store, "run", is_local=False), clock=lambda: now[0]))
    telemetry.flush(durably=True)
    assert telemetry.unacknowledged() == []
    assert shown(list(read(RunDir(store, "run", is_local=False)))) == [0, 1, 2, 3, 4, 5]


def test_a_newcomer_that_becomes_leader_sends_what_the_old_one_did_not(make: Make, sent: Receiver) -> None:
    old, newcomer = make(sent), make(sent, is_leader=False)
    record_all(old, 0, 1, 2)
    old.flush()
    record_all(old, 3, 4, 5)
    assert [r.step for r in old.unacknowledged()] == [3, 4, 5]
    record_all(newcomer, 5, 6)
    newcomer.merge(old.unacknowledged())  # only the steps that it does not know
    newcomer.set_leader(True)
    newcomer.flush()
    assert shown(sent.events) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("failed_at", "ends_at", "waited_s", "parts"),
    [
        pytest.param([105], 105.5, 0, [1.5, 1, 0, 0], id="a failure costs what was done of the step"),
        pytest.param([125], 126, 0, [22, 2, 19, 0], id="time beyond the length of a step is detection"),
        pytest.param([], 104.3, 0, [0.3, 0, 0, 0], id="a join repeats no step"),
        pytest.param([105], 165, 59, [61, 1, 0, 59], id="time with too few workers is waiting"),
        pytest.param([], 105, 1000, [1, 0, 0, 1], id="a newcomer has not waited for longer than it lives"),
        pytest.param([105, 106, 107], 108, 0, [4, 1, 0, 0], id="of failures in a row the first one counts"),
    ],
)
def test_the_parts_of_a_pause(failed_at: list[float], ends_at: float, waited_s: float, parts: list[float]) -> None:
    """Of a worker that has finished two steps of 2 s, the second at 104 s."""
    now = [100.0]
    pause = PauseTimer(clock=lambda: now[0])
    for now[0] in (102.0, 104.0):
        pause.commit_step()
    for now[0] in failed_at:
        pause.fail_step()
    now[0] = ends_at
    names = ("pause_s", "redone_s", "detecting_s", "waiting_s")
    assert [pause.parts(waited_s)[name] for name in names] == pytest.approx(parts)
    pause.commit_step()
    now[0] += 0.5
    assert [pause.parts(0.0)[name] for name in names] == pytest.approx([0.5, 0, 0, 0]), "a finished step resets it"


@given(st.floats(0, 1e4), st.none() | st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e5))
def test_the_parts_of_a_pause_are_not_negative_and_at_most_the_whole(
    step_s: float, broken_after_s: float | None, rest_s: float, waited_s: float
) -> None:
    now = [0.0]
    pause = PauseTimer(clock=lambda: now[0])
    now[0] += step_s
    pause.commit_step()
    if broken_after_s is not None:
        now[0] += broken_after_s
        pause.fail_step()
    now[0] += rest_s
    parts = pause.parts(waited_s)
    assert all(value >= 0 for value in parts.values())
    assert parts["redone_s"] + parts["detecting_s"] + parts["waiting_s"] <= parts["pause_s"] + 1e-6


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, OutputLine)]


def test_each_line_is_an_event_with_its_stream_and_the_rank_of_the_moment() -> None:
    events: list[Event] = []
    ranks = iter([0, 1, 2])
    before = sys.stdout, sys.stderr, print
    with captured_output(lambda: next(ranks), events.append):
        print("one\ntwo")
        print("three", file=sys.stderr)
    assert events == [
        OutputLine(rank=0, stream="stdout", text="one"),
        OutputLine(rank=1, stream="stdout", text="two"),
        OutputLine(rank=2, stream="stderr", text="three"),
    ]
    assert (sys.stdout, sys.stderr, print) == before, "what was there before is back"


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_is_told_once_with_or_without_an_end(end: str) -> None:
    events: list[Event] = []
    with captured_output(lambda: 0, events.append):
        print("done", end=end)
    assert texts(events) == ["done"]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        pytest.param(["a ", "b\nc"], ["a b"], id="a line in parts is told when it is whole"),
        pytest.param(["\r0 %", "\r50 %", "\r100 %", "\n"], ["100 %"], id="the last state of a progress bar"),
        pytest.param(["one\r\ntwo\r\n\r\n"], ["one", "two", ""], id="line ends of other systems lose no text"),
    ],
)
def test_lines_are_told_when_they_are_whole(written: list[str], told: list[str]) -> None:
    events: list[Event] = []
    lines = CapturedStream("stdout", lambda: 2, events.append)
    for text in written:
        assert events == []
        assert lines.write(text) == len(text)
    assert texts(events) == told


def test_lines_of_many_threads_that_write_in_parts_stay_whole() -> None:
    events: list[Event] = []
    lines = CapturedStream("stdout", lambda: 2, events.append)
    num_threads, num_lines = 8, 50
    together = threading.Barrier(num_threads)

    def write(name: str) -> None:
        for number in range(num_lines):
            together.wait()
            lines.write(name)
            together.wait()
            lines.write(f"-{number}\n")
        lines.write(f"{name}-last")

    threads = [threading.Thread(target=write, args=(f"thread{i}",)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2):
        lines.finish()
    ends = [*range(num_lines), "last"]
    assert sorted(texts(events)) == sorted(f"thread{i}-{end}" for i in range(num_threads) for end in ends)
