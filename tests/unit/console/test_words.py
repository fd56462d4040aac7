"""The summary says how a run ended and how it goes on."""

from __future__ import annotations

from raytrain.console.demo import START, demo_events
from raytrain.console.words import begun_again, summary, where_time_went
from raytrain.errors import ConfigError
from raytrain.events import kinds
from raytrain.events.ledger import Ledger
from raytrain.events.view import fold, reduce


def ended(outcome: str, num_steps: int = 100, message: str = "") -> list[str]:
    end = kinds.RunEnded(time=START + 60, outcome=outcome, step=num_steps, message=message)
    return summary(reduce(fold(demo_events(num_steps)), end))


def test_a_completed_run_has_nothing_to_go_on_with() -> None:
    lines = ended("completed", 460)
    assert lines[0] == "completed    step 460 of 460, epoch 20 of 20, after 1 min 0 s"
    assert "go on" not in "\n".join(lines)


def test_r10_a_stopped_run_says_from_where_it_goes_on() -> None:
    assert ended("stopped")[-1] == "go on        start the same job again: it goes on from step 92"
    assert ended("stopped", 10)[-1].endswith("from the beginning, since nothing was saved yet")


def test_r16_of_a_traceback_the_summary_keeps_the_cause_and_the_place() -> None:
    message = "Traceback (most recent call last):\n  File x\nValueError: boom\nraised by loss at step 3 on rank 1"
    assert ended("failed", message=message)[1] == "cause        ValueError: boom · raised by loss at step 3 on rank 1"


def test_an_error_of_four_parts_is_kept_whole() -> None:
    error = ConfigError("run.steps", 0, "at least 1", "leave it out")
    line = ended("failed", message=str(error))[1]
    assert line == "cause        run.steps · value: 0 · rule:  at least 1 · fix:   leave it out"


def test_the_summary_says_where_the_time_of_all_starts_went() -> None:
    (line,) = [line for line in ended("completed", 460) if line.startswith("goodput")]
    times = "stopping 32.0 s, training 22.8 s, starting 5.0 s, evaluation 168 ms, checkpoint stall 4 ms"
    assert line == f"goodput      38.0 % of 1 min 0 s: {times}"
    again = fold(demo_events(460, ended=True), fold(demo_events(100)))
    assert " % of 38.5 s in 2 starts: " in "\n".join(summary(again))


def test_what_took_no_time_is_not_shown() -> None:
    ledger = Ledger(starting_s=2.0, training_s=81.2, reforming_s=0.0004)
    assert where_time_went(ledger) == [("training", "1 min 21 s"), ("starting", "2.0 s")]


def test_while_a_killed_run_starts_again_its_past_does_not_grow() -> None:
    killed = fold(demo_events(100))
    assert begun_again(killed).books.at(START + 1e6).wall_s == killed.books.at().wall_s


def test_a_run_that_has_not_ended_has_no_summary() -> None:
    assert summary(fold(demo_events(100))) == []


def test_of_an_unexpected_error_the_summary_keeps_its_last_lines() -> None:
    message = "Training failed due to worker errors:\nTraceback (most recent call last):\n  File x\nRuntimeError: odd\n"
    assert ended("failed", message=message)[1] == "cause        File x · RuntimeError: odd"


def test_r16_after_a_failure_the_cause_comes_before_another_start() -> None:
    assert ended("failed")[-1].startswith("go on        mend the cause and start the same job again: ")
