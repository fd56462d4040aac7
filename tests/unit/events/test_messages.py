"""Each notable event has one harmless line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.events import kinds
from raytrain.events.messages import _MESSAGES, clean, count_of, describe, format_logical

SIZES = {"num_steps": 9, "steps_per_epoch": 3, "rows_per_epoch": 12, "global_batch": 4, "num_logical": 1, "workers": (1, 1)}


@settings(max_examples=50)
@given(st.text())
def test_r16_cleaned_text_is_one_printable_line(text: str) -> None:
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
def test_r16_progress_bars_and_colors_are_reduced_to_their_text(text: str, line: str) -> None:
    assert clean(text) == line


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([4, 2, 1], "1-2, 4")])
def test_logical_workers_are_formatted_as_ranges(numbers: list[int], text: str) -> None:
    assert format_logical(numbers) == text


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            kinds.GenerationFormed(generation=4, step=7, members=[], cause="drain", pause_s=0.25),
            "generation 4: 0 workers from step 7 after a drain, pause 250 ms",
        ),
        (
            kinds.GenerationFormed(generation=4, step=7, members=[], cause="retry"),
            "generation 4: 0 workers from step 7 again, though nobody was lost",
        ),
        (kinds.WorkerDraining(worker="w1", node="a", deadline=0.0), "draining worker w1 after its step: a drains"),
        (kinds.WorkerDrained(worker="w1", node="a", pid=7), "drained worker w1 on a"),
        (kinds.FaultInjected(fault="kill", target="w1"), "injected fault: kill w1"),
        (kinds.RunEnded(outcome="failed", step=3, message="Traceback\n  boom\r\n"), "failed at step 3: Traceback   boom"),
        (
            kinds.RunStarted(name="line", directory="/x", threads=3, **SIZES),  # type: ignore[arg-type]
            "run line: 9 steps, 3 steps and 12 rows per epoch, global batch 4, 3 threads per worker",
        ),
        (kinds.StepsDone(first_step=0, losses=[], weights=[], rows=[], learning_rates=[], finished=[]), None),
    ],
)
def test_events_are_described_in_one_line(event: kinds.Event, line: str | None) -> None:
    assert describe(event) == line


def test_every_kind_has_a_message_or_is_shown_otherwise() -> None:
    assert set(kinds.KINDS) - set(_MESSAGES) == {"steps_done", "output", "worker_environment", "state_digest"}


def test_nouns_agree_with_their_count() -> None:
    assert [count_of(n, "row") for n in (0, 1, 1234)] == ["0 rows", "1 row", "1,234 rows"]
