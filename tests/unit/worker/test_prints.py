"""What the user prints becomes whole lines, whatever thread it comes from."""

from __future__ import annotations

import sys
import threading

from raytrain.events.kinds import Event, Printed
from raytrain.worker.prints import LineEvents, told_as_events


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Printed)]


def stream(events: list[Event]) -> LineEvents:
    return LineEvents("stdout", lambda: 2, events.append)


def test_each_line_is_an_event_with_the_rank_and_the_stream() -> None:
    events: list[Event] = []
    with told_as_events(lambda: 3, events.append):
        print("one\ntwo")
        print("three", file=sys.stderr)
    assert events == [
        Printed(rank=3, stream="stdout", text="one"),
        Printed(rank=3, stream="stdout", text="two"),
        Printed(rank=3, stream="stderr", text="three"),
    ]


def test_the_rank_is_that_of_the_moment() -> None:
    events: list[Event] = []
    ranks = iter([0, 1])
    with told_as_events(lambda: next(ranks), events.append):
        print("one")
        print("two")
    assert [event.rank for event in events if isinstance(event, Printed)] == [0, 1]


def test_a_line_in_parts_is_told_when_it_is_whole() -> None:
    events: list[Event] = []
    lines = stream(events)
    assert lines.write("a ") == 2
    assert events == []
    lines.write("b\nc")
    assert texts(events) == ["a b"]


def test_a_last_line_without_an_end_is_told_at_the_end() -> None:
    events: list[Event] = []
    with told_as_events(lambda: 0, events.append):
        print("done", end="")
    assert texts(events) == ["done"]


def test_nothing_is_told_at_the_end_of_whole_lines() -> None:
    events: list[Event] = []
    with told_as_events(lambda: 0, events.append):
        print("done")
    assert texts(events) == ["done"]


def test_of_a_progress_bar_the_last_state_is_told() -> None:
    events: list[Event] = []
    lines = stream(events)
    for percent in (0, 50, 100):
        lines.write(f"\r{percent} %")
    lines.write("\n")
    assert texts(events) == ["100 %"]


def test_line_ends_of_other_systems_lose_no_text() -> None:
    events: list[Event] = []
    stream(events).write("one\r\ntwo\r\n\r\n")
    assert texts(events) == ["one", "two", ""]


def test_lines_of_many_threads_that_write_in_parts_stay_whole() -> None:
    events: list[Event] = []
    lines = stream(events)
    num_threads, num_lines = 8, 50
    together = threading.Barrier(num_threads)

    def write(name: str) -> None:
        for number in range(num_lines):
            together.wait()
            lines.write(name)
            together.wait()
            lines.write(f"-{number}\n")

    threads = [threading.Thread(target=write, args=(f"thread{i}",)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {f"thread{i}-{number}" for i in range(num_threads) for number in range(num_lines)}
    assert set(texts(events)) == expected
    assert len(events) == len(expected)


def test_the_last_lines_of_all_threads_are_told() -> None:
    events: list[Event] = []
    lines = stream(events)
    lines.write("mine")
    other = threading.Thread(target=lines.write, args=("theirs",))
    other.start()
    other.join()
    lines.finish()
    lines.finish()
    assert sorted(texts(events)) == ["mine", "theirs"]


def test_what_was_there_before_is_back_afterwards() -> None:
    before = sys.stdout, sys.stderr, print
    with told_as_events(lambda: 0, lambda event: None):
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr, print) == before
