"""Each notable event has one harmless line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.events import kinds
from raytrain.events.words import _WORDS, clean, count_of, describe, format_logical


@given(st.text())
def test_r16_a_cleaned_text_is_one_printable_line(text: str) -> None:
    assert clean(text).isprintable()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (" 10%|#   |\r 20%|##  |\r", " 20%|##  |"),
        ("\x1b[1;31mred\x1b[0m plain", "red plain"),
        ("a\tb\n", "a b"),
        ("done\r\n", "done"),
    ],
)
def test_r16_what_progress_bars_and_colours_leave_behind_is_removed(text: str, line: str) -> None:
    assert clean(text) == line


def test_an_event_with_a_traceback_is_described_in_one_line() -> None:
    text = describe(kinds.RunEnded(outcome="failed", step=3, message="Traceback\n  boom\r\n"))
    assert text is not None
    assert text.startswith("failed at step 3: Traceback")
    assert text.isprintable()


def test_steps_are_not_notable() -> None:
    done = kinds.StepsDone(first_step=0, losses=[], weights=[], rows=[], learning_rates=[], finished=[])
    assert describe(done) is None


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([4, 2, 1], "1-2, 4")])
def test_logical_workers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert format_logical(numbers) == text


def test_nouns_agree_with_their_count() -> None:
    assert [count_of(n, "row") for n in (0, 1, 1234)] == ["0 rows", "1 row", "1,234 rows"]


FORMED = kinds.GenerationFormed(generation=4, step=7, members=[], cause="drain", pause_s=0.25)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (FORMED, "generation 4: 0 workers from step 7 without those that leave, pause 250 ms"),
        (kinds.WorkerLeaving(worker="w1", node="a", deadline=0.0), "worker w1 leaves after its step: a is going away"),
        (kinds.WorkerLeft(worker="w1", node="a", pid=7), "worker w1 has left a"),
        (kinds.FaultInjected(fault="kill", target="w1"), "rehearsal: kill w1"),
    ],
)
def test_those_that_leave_and_rehearsals_have_a_line(event: kinds.Event, line: str) -> None:
    assert describe(event) == line


def test_every_kind_is_described_but_for_those_that_are_shown_otherwise() -> None:
    known = {kind for kind, cls in kinds.KINDS.items() if kind in _WORDS}
    assert set(kinds.KINDS) - known == {"steps_done", "printed", "conditions_told", "state_digest"}


def test_r18_the_threads_of_each_worker_are_told() -> None:
    sizes = {
        "num_steps": 9,
        "steps_per_epoch": 3,
        "rows_per_epoch": 12,
        "global_batch": 4,
        "num_logical": 1,
        "workers": (1, 1),
    }
    event = kinds.RunStarted(name="line", directory="/x", threads=3, **sizes)
    assert describe(event) == "run line: 9 steps, 3 steps and 12 rows per epoch, global batch 4, 3 threads per worker"
