"""The log keeps each event once, in whole lines, through kills, full disks and flaky stores."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from raytrain.events import kinds
from raytrain.events.curve import curve
from raytrain.events.log import EventLog, read
from raytrain.events.values import to_json
from raytrain.rundir import RunDir


def steps(first: int, stop: int, ids: bool = False) -> kinds.StepsDone:
    numbers = [float(step) for step in range(first, stop)]
    return kinds.StepsDone(
        time=1.0,
        first_step=first,
        losses=numbers,
        weights=numbers,
        rows=[8] * len(numbers),
        learning_rates=numbers,
        finished=numbers,
        data_waits=numbers,
        row_ids=[f"rows of {step}" for step in range(first, stop)] if ids else None,
    )


def printed(text: str) -> kinds.Printed:
    return kinds.Printed(time=1.0, rank=0, stream="stdout", text=text)


def recorded(log_dir: RunDir) -> list[int]:
    """Step numbers in the file, in its order."""
    done = [event for event in read(log_dir) if isinstance(event, kinds.StepsDone)]
    return [event.first_step + i for event in done for i in range(len(event.losses))]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "run")


def lines_of(run_dir: RunDir) -> list[str]:
    return Path(run_dir.child("events.jsonl")).read_text().splitlines()


def test_events_come_back_from_the_file_with_the_time_filled_in(run_dir: RunDir) -> None:
    member = kinds.Member(worker="w0", rank=0, node="n", pid=1, logical=[0, 1])
    formed = kinds.GenerationFormed(generation=1, step=0, members=[member], pause_s=0.0, cause="start")
    log = EventLog(run_dir, clock=lambda: 17.0)
    log.append([formed, printed("line\nwith a break, and ünïcode")])
    assert all(json.loads(line) for line in lines_of(run_dir))
    times = [event.time for event in read(run_dir)]
    assert times == [17.0, 1.0]
    assert list(read(run_dir)) == log.since(0)


def test_drains_rehearsals_and_the_parts_of_a_pause_come_back(run_dir: RunDir) -> None:
    member = kinds.Member(worker="w0", rank=0, node="n", pid=1, logical=[0, 1])
    events = [
        kinds.WorkerLeaving(time=1.0, worker="w1", node="n", deadline=1234.5),
        kinds.WorkerLeft(time=2.0, worker="w1", node="n", pid=1),
        kinds.FaultInjected(time=3.0, fault="kill", target="w1"),
        kinds.GenerationFormed(
            time=4.0,
            generation=3,
            step=7,
            members=[member],
            cause="drain",
            pause_s=4.0,
            redone_s=1.0,
            detecting_s=0.5,
            waiting_s=2.0,
        ),
        steps(0, 2),
    ]
    EventLog(run_dir).append(events)
    assert list(read(run_dir)) == events


def test_steps_of_a_log_without_waits_for_data_can_be_cut(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([steps(0, 2), replace(steps(1, 4), data_waits=[])])
    last = list(read(run_dir))[-1]
    assert isinstance(last, kinds.StepsDone)
    assert (last.first_step, last.data_waits) == (2, [])


def test_the_driver_polls_what_is_new_and_what_it_has_seen_is_forgotten(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([printed("a"), printed("b")])
    assert log.since(1) == [printed("b")]
    log.append([printed("c")])
    assert log.since(2) == [printed("c")]
    assert log.since(2) == [printed("c")]  # a reply that was lost can be asked for again
    assert log.since(3) == []


def test_numbers_go_on_when_a_run_goes_on(run_dir: RunDir) -> None:
    first = EventLog(run_dir)
    first.append([printed("a"), printed("b")])
    first.close()
    second = EventLog(run_dir)
    second.append([printed("c")])
    assert second.opened_at == 2
    assert second.since(second.opened_at) == [printed("c")]
    assert list(read(run_dir)) == [printed("a"), printed("b"), printed("c")]


def test_a_new_rank_0_that_sends_steps_again_does_not_double_them(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([steps(0, 3, ids=True), steps(1, 5, ids=True), steps(2, 4, ids=True)])
    assert recorded(run_dir) == [0, 1, 2, 3, 4]
    last = list(read(run_dir))[-1]
    assert isinstance(last, kinds.StepsDone)
    assert (last.first_step, last.losses, last.row_ids) == (3, [3.0, 4.0], ["rows of 3", "rows of 4"])
    assert last.data_waits == last.finished == [3.0, 4.0]


def test_steps_sent_again_after_the_log_was_reopened_are_not_doubled(run_dir: RunDir) -> None:
    EventLog(run_dir).append([steps(0, 3)])
    EventLog(run_dir).append([steps(1, 4)])
    assert recorded(run_dir) == [0, 1, 2, 3]


def test_a_restored_state_lets_its_steps_be_recorded_again(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([steps(0, 5), kinds.StateRestored(time=1.0, step=2, checkpoint="step-2"), steps(2, 4)])
    assert recorded(run_dir) == [0, 1, 2, 3, 4, 2, 3]
    assert list(curve(read(run_dir))) == [0, 1, 2, 3]


def test_a_late_message_of_a_dead_worker_hides_no_step(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([steps(0, 2), steps(5, 7), steps(2, 8)])
    assert sorted(recorded(run_dir)) == list(range(8))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12))
def test_each_step_is_in_the_log_once_whatever_is_sent_how_often(
    tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[int, int]]
) -> None:
    run_dir = RunDir.at(str(tmp_path_factory.mktemp("log")), "run")
    EventLog(run_dir).append([steps(first, first + length) for first, length in sent])
    assert sorted(recorded(run_dir)) == sorted({first + i for first, length in sent for i in range(length)})


@pytest.mark.parametrize("tail", ['{"kind": "pri', '{"kind": "printed", "time": 1.0, "rank": 0, "str', "\x00\x00", "17"])
def test_r7_a_half_line_left_by_a_kill_is_cut_off(run_dir: RunDir, tail: str) -> None:
    EventLog(run_dir).append([printed("a")])
    with Path(run_dir.child("events.jsonl")).open("a") as file:
        file.write(tail)
    assert list(read(run_dir)) == [printed("a")]
    EventLog(run_dir).append([printed("b")])
    assert [json.loads(line)["text"] for line in lines_of(run_dir)] == ["a", "b"]


def test_r7_a_last_line_that_only_lacks_its_newline_is_kept(run_dir: RunDir) -> None:
    EventLog(run_dir).append([printed("a"), printed("b" * 100_000)])
    path = Path(run_dir.child("events.jsonl"))
    path.write_text(path.read_text().rstrip("\n"))
    EventLog(run_dir).append([printed("c")])
    assert [len(json.loads(line)["text"]) for line in lines_of(run_dir)] == [1, 100_000, 1]


def test_lines_of_another_version_are_left_out(run_dir: RunDir) -> None:
    EventLog(run_dir).append([printed("a")])
    with Path(run_dir.child("events.jsonl")).open("a") as file:
        file.write('{"kind": "comet"}\n[]\n{"kind": "generation_formed"}\n{"kind": "step_skipped"}\nnoise\n')
    EventLog(run_dir).append([printed("b")])
    assert list(read(run_dir)) == [printed("a"), printed("b")]


def test_a_run_without_a_log_has_no_events(run_dir: RunDir) -> None:
    assert list(read(run_dir)) == []


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_r7_lines_that_a_full_disk_refused_are_written_later_and_whole(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    with largest_file(100):
        log.append([printed("a" * 80), printed("b")])
        failure = log.failure
    assert failure is not None
    assert list(read(run_dir)) == []
    assert len(log.since(0)) == 2
    assert log.failure is None
    assert [json.loads(line)["text"] for line in lines_of(run_dir)] == ["a" * 80, "b"]


class CountingStore:
    """An object store made of a local directory: counts the objects written, and fails when told to."""

    def __init__(self, root: Path) -> None:
        self._store = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())
        self.num_writes, self.is_sick = 0, False

    def open_output_stream(self, path: str) -> Any:
        if self.is_sick:
            raise OSError("the store is sick")
        self.num_writes += 1
        return self._store.open_output_stream(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path)


def test_an_object_is_rewritten_at_most_every_ten_seconds_and_on_close(store: CountingStore) -> None:
    now = [0.0]
    remote = RunDir(store, "bucket/run", is_local=False)  # type: ignore[arg-type]
    log = EventLog(remote, clock=lambda: now[0])
    for now[0] in (0.0, 3.0, 9.0, 11.0, 12.0):
        log.append([printed(f"at {now[0]}")])
    assert store.num_writes == 2
    now[0] = 21.5
    assert len(log.since(0)) == 5  # polling writes what is due
    assert (store.num_writes, len(list(read(remote)))) == (3, 5)
    log.append([printed("last")])
    log.close()
    assert (store.num_writes, len(list(read(remote)))) == (4, 6)
    again = EventLog(remote, clock=lambda: 100.0)
    again.append([printed("more")])
    assert (again.opened_at, len(list(read(remote)))) == (6, 7)


def test_r7_a_sick_store_is_tried_again_and_loses_nothing(store: CountingStore) -> None:
    now = [0.0]
    remote = RunDir(store, "bucket/run", is_local=False)  # type: ignore[arg-type]
    log = EventLog(remote, clock=lambda: now[0])
    store.is_sick = True
    log.append([printed("a")])
    assert str(log.failure) == "the store is sick"
    with pytest.raises(OSError, match="sick"):
        log.close()
    store.is_sick, now[0] = False, 10.0
    log.append([printed("b")])
    assert (log.failure, list(read(remote))) == (None, [printed("a"), printed("b")])


def add_beside(run_dir: RunDir, *events: kinds.Event) -> None:
    """As another process adds to the file: whole lines at once."""
    with Path(run_dir.child("events.jsonl")).open("a") as file:
        file.write("".join(json.dumps(to_json(event)) + "\n" for event in events))


FAULT = kinds.FaultInjected(time=1.0, fault="kill", target="w1")


def test_what_others_add_to_the_file_is_told_once_in_the_order_of_the_file(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([printed("a")])
    add_beside(run_dir, FAULT)
    assert log.since(0) == [printed("a"), FAULT]
    assert log.since(2) == []
    add_beside(run_dir, replace(FAULT, target="w2"), replace(FAULT, target="w3"))
    log.append([printed("b")])
    assert [getattr(event, "target", "") for event in log.since(2)] == ["w2", "w3", ""]
    again = EventLog(run_dir)
    assert (again.opened_at, again.since(2)) == (5, log.since(2)), "numbers are the same for who opens it anew"


def test_a_line_of_others_is_told_when_it_is_whole_and_noise_never(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    path, line = Path(run_dir.child("events.jsonl")), json.dumps(to_json(FAULT)) + "\n"
    for part, told in ((line[:20], []), (line[20:] + "noise\n", [FAULT])):
        with path.open("a") as file:
            file.write(part)
        assert log.since(0) == told


def test_others_that_are_quicker_than_a_write_are_told_first(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(run_dir)
    size_bytes = log._sink._size_bytes  # type: ignore[attr-defined]

    def look() -> int:
        size: int = size_bytes()
        add_beside(run_dir, FAULT)
        monkeypatch.undo()
        return size

    monkeypatch.setattr(log._sink, "_size_bytes", look)
    log.append([printed("a")])
    assert log.since(0) == list(read(run_dir)) == [FAULT, printed("a")]
