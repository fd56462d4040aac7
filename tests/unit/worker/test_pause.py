"""The parts of a pause, measured with the test's clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.worker.pause import Pause


class Scene:
    """A worker that has finished two steps of 2 s, the second at 104 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pause = Pause(clock=lambda: self.now)
        for now in (102.0, 104.0):
            self.at(now)
            self.pause.commit()

    def at(self, now: float) -> None:
        self.now = now

    def parts(self, now: float, waited_s: float = 0.0) -> list[float]:
        self.at(now)
        parts = self.pause.parts(waited_s)
        return [parts[name] for name in ("pause_s", "redone_s", "detecting_s", "waiting_s")]


def test_a_break_in_the_middle_of_a_step_costs_what_was_done_of_it() -> None:
    scene = Scene()
    scene.at(105.0)
    scene.pause.break_off()
    assert scene.parts(105.5) == [1.5, 1.0, 0.0, 0.0]


def test_what_a_collective_hangs_beyond_the_length_of_a_step_is_detection() -> None:
    scene = Scene()
    scene.at(125.0)
    scene.pause.break_off()
    assert scene.parts(126.0) == [22.0, 2.0, 19.0, 0.0]


def test_a_join_breaks_no_step() -> None:
    assert Scene().parts(104.3) == pytest.approx([0.3, 0.0, 0.0, 0.0])


def test_time_with_too_few_workers_is_waiting() -> None:
    scene = Scene()
    scene.at(105.0)
    scene.pause.break_off()
    assert scene.parts(165.0, waited_s=59.0) == [61.0, 1.0, 0.0, 59.0]


def test_a_newcomer_that_leads_has_not_waited_for_longer_than_it_lives() -> None:
    assert Scene().parts(105.0, waited_s=1000.0) == [1.0, 0.0, 0.0, 1.0]


def test_of_breaks_in_a_row_the_first_one_counts() -> None:
    scene = Scene()
    for now in (105.0, 106.0, 107.0):
        scene.at(now)
        scene.pause.break_off()
    assert scene.parts(108.0) == [4.0, 1.0, 0.0, 0.0]


def test_a_finished_step_begins_anew() -> None:
    scene = Scene()
    scene.at(105.0)
    scene.pause.break_off()
    scene.at(106.0)
    scene.pause.commit()
    assert scene.parts(106.5) == [0.5, 0.0, 0.0, 0.0]


@given(st.floats(0, 1e4), st.none() | st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e5))
def test_the_parts_are_never_negative_and_never_more_than_the_whole(
    step_s: float, broken_after_s: float | None, rest_s: float, waited_s: float
) -> None:
    now = [0.0]
    pause = Pause(clock=lambda: now[0])
    now[0] += step_s
    pause.commit()
    if broken_after_s is not None:
        now[0] += broken_after_s
        pause.break_off()
    now[0] += rest_s
    parts = pause.parts(waited_s)
    assert all(value >= 0 for value in parts.values())
    assert parts["redone_s"] + parts["detecting_s"] + parts["waiting_s"] <= parts["pause_s"] + 1e-6
