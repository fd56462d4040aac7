"""The log contains each event once, in whole lines, despite kills, full disks and failing object stores."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import fs

from raytrain.events import kinds
from raytrain.events.curve import curve
from raytrain.events.kinds import to_json
from raytrain.events.log import EventLog, read
from raytrain.rundir import RunDir


def steps(first: int, stop: int, ids: bool = False) -> kinds.StepsDone:
    numbers = [float(step) for step in range(first, stop)]
    lists = dict.fromkeys(("losses", "weights", "learning_rates", "finished", "data_waits", "rows"), numbers)
    row_ids = [f"rows of {step}" for step in range(first, stop)] if ids else None
    return kinds.StepsDone(time=1.0, first_step=first, row_ids=row_ids, **lists)  # type: ignore[arg-type]


def output(text: str) -> kinds.OutputLine:
    return kinds.OutputLine(time=1.0, rank=0, stream="stdout", text=text)


def recorded(log_dir: RunDir) -> list[int]:
    """Step numbers in the file, in file order."""
    done = [event for event in read(log_dir) if isinstance(event, kinds.StepsDone)]
    return [event.first_step + i for event in done for i in range(len(event.losses))]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.at(str(tmp_path), "run")


def lines_of(run_dir: RunDir) -> list[str]:
    return Path(run_dir.child("events.jsonl")).read_text().splitlines()


def test_every_kind_comes_back_from_the_file_with_missing_times_set(run_dir: RunDir) -> None:
    member = kinds.Member(worker="w0", rank=0, node="n", pid=1, logical=[0, 1])
    parts = {"pause_s": 4.0, "redone_s": 1.0, "detecting_s": 0.5, "waiting_s": 2.0}
    sizes = {"num_steps": 9, "steps_per_epoch": 3, "rows_per_epoch": 12, "global_batch": 4, "num_logical": 1}
    events = [
        kinds.RunStarted(name="r", directory="/r", workers=(1, 2), **sizes),  # type: ignore[arg-type]
        kinds.WorkerDraining(worker="w1", node="n", deadline=1234.5),
        kinds.GenerationFormed(generation=3, step=7, members=[member], cause="drain", **parts),
        kinds.StateDigest(step=2, digest="ab", tensors={"w": "cd"}),
        steps(0, 2, ids=True),
        output("line\nwith a break, and ünïcode"),
    ]
    log = EventLog(run_dir, clock=lambda: 17.0)
    log.append(events)
    assert [json.loads(line)["time"] for line in lines_of(run_dir)] == [17.0] * 4 + [1.0] * 2
    assert list(read(run_dir)) == [replace(event, time=event.time or 17.0) for event in events]
    assert log.since(0)[-2:] == [steps(0, 2), output("line\nwith a break, and ünïcode")], "without row ids"


def test_the_driver_polls_new_events_and_can_repeat_a_poll(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([output("a"), output("b")])
    assert log.since(1) == [output("b")]
    log.append([output("c")])
    assert log.since(2) == [output("c")]
    assert log.since(2) == [output("c")]
    assert log.since(3) == []


def test_numbers_continue_when_a_run_is_resumed(run_dir: RunDir) -> None:
    first = EventLog(run_dir)
    first.append([output("a"), output("b")])
    first.close()
    second = EventLog(run_dir)
    second.append([output("c")])
    assert second.opened_at == 2
    assert second.since(second.opened_at) == [output("c")]
    assert list(read(run_dir)) == [output("a"), output("b"), output("c")]


def test_a_new_leader_that_repeats_steps_does_not_double_them(run_dir: RunDir) -> None:
    EventLog(run_dir).append([steps(0, 3, ids=True), replace(steps(1, 4, ids=True), data_waits=[])])
    EventLog(run_dir).append([steps(2, 6, ids=True), steps(2, 4, ids=True)])
    assert recorded(run_dir) == [0, 1, 2, 3, 4, 5]
    assert list(read(run_dir))[1:] == [replace(steps(3, 4, ids=True), data_waits=[]), steps(4, 6, ids=True)]


def test_a_restored_state_lets_its_steps_be_recorded_again(run_dir: RunDir) -> None:
    EventLog(run_dir).append([steps(0, 5), kinds.StateRestored(time=1.0, step=2, checkpoint="step-2"), steps(2, 4)])
    assert recorded(run_dir) == [0, 1, 2, 3, 4, 2, 3]
    assert list(curve(read(run_dir))) == [0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12))
@example([(0, 2), (5, 2), (2, 6)])
def test_each_step_is_recorded_once_however_often_and_late_it_is_sent(
    tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[int, int]]
) -> None:
    run_dir = RunDir.at(str(tmp_path_factory.mktemp("log")), "run")
    EventLog(run_dir).append([steps(first, first + length) for first, length in sent])
    assert sorted(recorded(run_dir)) == sorted({first + i for first, length in sent for i in range(length)})


@pytest.mark.parametrize("tail", ['{"kind": "out', '{"kind": "output", "time": 1.0, "rank": 0, "str', "\x00\x00", "17"])
def test_r7_an_incomplete_line_left_by_a_kill_is_truncated(run_dir: RunDir, tail: str) -> None:
    EventLog(run_dir).append([output("a")])
    with Path(run_dir.child("events.jsonl")).open("a") as file:
        file.write(tail)
    assert list(read(run_dir)) == [output("a")]
    EventLog(run_dir).append([output("b")])
    assert [json.loads(line)["text"] for line in lines_of(run_dir)] == ["a", "b"]


def test_r7_a_complete_line_without_newline_is_kept(run_dir: RunDir) -> None:
    EventLog(run_dir).append([output("a"), output("b" * 100_000)])
    path = Path(run_dir.child("events.jsonl"))
    path.write_text(path.read_text().rstrip("\n"))
    EventLog(run_dir).append([output("c")])
    assert [len(json.loads(line)["text"]) for line in lines_of(run_dir)] == [1, 100_000, 1]


def test_lines_of_another_version_are_skipped(run_dir: RunDir) -> None:
    assert list(read(run_dir)) == []
    EventLog(run_dir).append([output("a")])
    with Path(run_dir.child("events.jsonl")).open("a") as file:
        file.write('{"kind": "comet"}\n[]\n{"kind": "generation_formed"}\n{"kind": "step_skipped"}\nnoise\n')
    EventLog(run_dir).append([output("b")])
    assert list(read(run_dir)) == [output("a"), output("b")]


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_r7_lines_that_a_full_disk_refused_are_written_later(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    with largest_file(100):
        log.append([output("a" * 80), output("b")])
        failure = log.failure
    assert failure is not None
    assert list(read(run_dir)) == []
    assert len(log.since(0)) == 2
    assert log.failure is None
    assert [json.loads(line)["text"] for line in lines_of(run_dir)] == ["a" * 80, "b"]


class CountingStore:
    """A local directory as an object store that counts writes, and fails on request."""

    def __init__(self, root: Path) -> None:
        self._store = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())
        self.num_writes, self.is_failing = 0, False

    def open_output_stream(self, path: str) -> Any:
        if self.is_failing:
            raise OSError("the store is down")
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
        log.append([output(f"at {now[0]}")])
    assert store.num_writes == 2
    now[0] = 21.5
    assert len(log.since(0)) == 5
    assert (store.num_writes, len(list(read(remote)))) == (3, 5)
    log.append([output("last")])
    log.close()
    assert (store.num_writes, len(list(read(remote)))) == (4, 6)
    again = EventLog(remote, clock=lambda: 100.0)
    again.append([output("more")])
    assert (again.opened_at, len(list(read(remote)))) == (6, 7)


def test_r7_a_failing_store_is_retried_and_loses_nothing(store: CountingStore) -> None:
    now = [0.0]
    remote = RunDir(store, "bucket/run", is_local=False)  # type: ignore[arg-type]
    log = EventLog(remote, clock=lambda: now[0])
    store.is_failing = True
    log.append([output("a")])
    assert str(log.failure) == "the store is down"
    with pytest.raises(OSError, match="down"):
        log.close()
    store.is_failing, now[0] = False, 10.0
    log.append([output("b")])
    assert (log.failure, list(read(remote))) == (None, [output("a"), output("b")])


def append_beside(run_dir: RunDir, *events: kinds.Event) -> None:
    """Appends whole lines, as another process does."""
    with Path(run_dir.child("events.jsonl")).open("a") as file:
        file.write("".join(json.dumps(to_json(event)) + "\n" for event in events))


FAULT = kinds.FaultInjected(time=1.0, fault="kill", target="w1")


def test_lines_of_other_processes_are_read_once_in_file_order(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    log.append([output("a")])
    append_beside(run_dir, FAULT)
    assert log.since(0) == [output("a"), FAULT]
    assert log.since(2) == []
    append_beside(run_dir, replace(FAULT, target="w2"), replace(FAULT, target="w3"))
    log.append([output("b")])
    assert [getattr(event, "target", "") for event in log.since(2)] == ["w2", "w3", ""]
    again = EventLog(run_dir)
    assert (again.opened_at, again.since(2)) == (5, log.since(2)), "a new log has the same numbers"


def test_a_line_of_another_process_is_read_once_it_is_complete(run_dir: RunDir) -> None:
    log = EventLog(run_dir)
    path, line = Path(run_dir.child("events.jsonl")), json.dumps(to_json(FAULT)) + "\n"
    for part, events in ((line[:20], []), (line[20:] + "noise\n", [FAULT])):
        with path.open("a") as file:
            file.write(part)
        assert log.since(0) == events


def test_a_line_appended_just_before_a_write_comes_first(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(run_dir)
    size_bytes = log._file._size_bytes  # type: ignore[attr-defined]

    def look() -> int:
        size: int = size_bytes()
        append_beside(run_dir, FAULT)
        monkeypatch.undo()
        return size

    monkeypatch.setattr(log._file, "_size_bytes", look)
    log.append([output("a")])
    assert log.since(0) == list(read(run_dir)) == [FAULT, output("a")]
