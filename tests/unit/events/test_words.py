"""Each notable event has one harmless line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.events import kinds
from raytrain.events.words import clean, count_of, describe, format_logical


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
