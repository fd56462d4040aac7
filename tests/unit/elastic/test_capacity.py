"""How many workers to ask for, how long too few may wait, and how a shortage reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from raytrain.elastic.capacity import TELL_AFTER_S, Patience, num_to_ask_for, shortage, surplus


@pytest.mark.parametrize(
    ("running", "asked", "finished", "most", "wanted"),
    [(0, 0, 0, 4, 4), (2, 0, 0, 4, 2), (2, 1, 0, 4, 1), (2, 2, 0, 4, 0), (4, 1, 0, 4, 0), (2, 0, 1, 4, 0)],
)
def test_what_is_missing_is_asked_for_once_and_not_at_the_end(
    running: int, asked: int, finished: int, most: int, wanted: int
) -> None:
    assert num_to_ask_for(running, asked, finished, most) == wanted


def test_those_that_are_about_to_leave_are_replaced_before_they_have_left() -> None:
    """They are not among those that stay, so that their successors start while they still train."""
    assert num_to_ask_for(num_staying=1, num_asked=0, num_finished=0, max_workers=2) == 1


class Waiting:
    """A run of at least 2 workers that may wait 60 s for the first ones, and 1800 s afterwards."""

    def __init__(self) -> None:
        self.patience, self.now = Patience(2, 60.0, 1800.0), 100.0

    def look(self, num_running: int, num_placed: int, after_s: float = 0.0) -> str:
        self.now += after_s
        return self.patience.look(num_running, num_placed, self.now)


def test_r11_a_shortage_at_the_start_is_told_once_and_ends_the_run_soon() -> None:
    waiting = Waiting()
    looks = [waiting.look(0, 1, after_s) for after_s in (0.0, TELL_AFTER_S, 0.5, 10.0, 40.0, 10.0)]
    assert looks == ["", "", "tell", "", "", "end"]
    assert not waiting.patience.had_enough


def test_r6_survivors_wait_longer_since_they_hold_the_state() -> None:
    waiting = Waiting()
    assert waiting.look(2, 2) == ""
    assert [waiting.look(1, 1, after_s) for after_s in (10.0, 6.0, 1790.0, 5.0)] == ["", "tell", "", "end"]
    assert waiting.patience.had_enough


def test_workers_that_have_their_place_and_start_are_enough_to_wait_for() -> None:
    waiting = Waiting()
    assert [waiting.look(0, num_placed, 50.0) for num_placed in (1, 2, 2, 2)] == [""] * 4
    assert not waiting.patience.had_enough, "none of them has run yet"


def test_each_shortage_is_told_and_has_its_own_time() -> None:
    waiting = Waiting()
    looks = [waiting.look(n, n, 6.0) for n in (2, 1, 1, 1, 2, 1, 1)]
    assert looks == ["", "", "tell", "", "", "", "tell"]
    assert waiting.patience.since == waiting.now - 6.0


def test_r11_a_shortage_names_what_was_asked_for_and_what_there_is() -> None:
    text = shortage({"CPU": 0.5, "GPU": 1.0}, 4, {"CPU": 2.0, "memory": 1e9})
    assert text == "asked for 2 CPU, the cluster has 2; asked for 4 GPU, the cluster has 0"


def test_resources_of_zero_are_not_mentioned() -> None:
    assert shortage({"CPU": 1.0, "GPU": 0}, 2, {"CPU": 1.0}) == "asked for 2 CPU, the cluster has 1"


@dataclass(frozen=True)
class Somebody:
    name: str
    is_extra: bool = True


OWN, OLD, NEW = Somebody("own", is_extra=False), Somebody("old"), Somebody("new")


@pytest.mark.parametrize(
    ("staying", "coming", "finished", "least", "most", "leaving"),
    [
        ([OWN, OLD], [NEW], 0, 1, 3, []),
        ([OWN, OLD], [NEW], 0, 1, 2, [NEW]),
        ([OWN, OLD], [NEW], 0, 1, 1, [NEW, OLD]),
        ([OWN, OLD, NEW], [], 0, 1, 2, [NEW]),
        ([OLD], [OWN], 0, 1, 1, []),  # one's own place is lost and waits for room: that is no reason to train nowhere
        ([OLD, NEW], [OWN], 0, 1, 1, [NEW]),
        ([OLD, NEW], [OWN], 0, 2, 2, []),
        ([OLD], [OWN, NEW], 0, 1, 1, [NEW]),
        ([OWN, OLD], [], 1, 1, 1, []),
    ],
)
def test_the_newest_give_their_places_back_first_never_a_reserved_one_and_the_smallest_group_stays(
    staying: list[Somebody], coming: list[Somebody], finished: int, least: int, most: int, leaving: list[Somebody]
) -> None:
    assert surplus(staying, coming, finished, least, most) == leaving
