"""Who trains together next, by examples; `test_life.py` has any sequence of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain.rendezvous.flapping import FIRST_WAIT_S
from raytrain.rendezvous.state import LONGEST_PATIENCE, NO_STATE, Entrant, Generation, Rendezvous, Signals


def at(worker: str, step: int = NO_STATE, node: str = "", is_saved: bool = False, after: int = 0) -> Entrant:
    return Entrant(worker, step, ("127.0.0.1", 1), node_id=node, is_saved=is_saved, after=after)


def formed(rendezvous: Rendezvous, *entrants: Entrant, now: float = 0.0) -> Generation:
    for entrant in entrants:
        rendezvous.enter(entrant, now)
    return must_form(rendezvous, now)


def must_form(rendezvous: Rendezvous, now: float) -> Generation:
    generation = rendezvous.form(now)
    assert generation is not None
    return generation


def names(generation: Generation) -> list[str]:
    return [member.worker for member in generation.members]


def test_the_first_generation_waits_for_enough_workers_and_is_a_start() -> None:
    rendezvous = Rendezvous(2)
    rendezvous.enter(at("w0"), 0.0)
    assert rendezvous.form(0.0) is None
    generation = formed(rendezvous, at("w1"))
    assert (generation.number, generation.cause, names(generation)) == (1, "start", ["w0", "w1"])


def test_the_first_generation_waits_a_while_for_those_that_are_starting() -> None:
    rendezvous = Rendezvous(1, settle_s=1.0)
    rendezvous.start("w0")
    rendezvous.start("w1")
    rendezvous.enter(at("w0"), 5.0)
    assert rendezvous.form(5.9) is None
    assert names(formed(rendezvous, at("w1"), now=5.9)) == ["w0", "w1"]


def test_a_starting_worker_that_never_comes_does_not_stop_the_others() -> None:
    rendezvous = Rendezvous(1, settle_s=1.0)
    rendezvous.start("w1")
    rendezvous.enter(at("w0"), 5.0)
    assert rendezvous.form(5.5) is None
    generation = rendezvous.form(6.0)
    assert generation is not None
    assert names(generation) == ["w0"]


def test_the_worker_furthest_ahead_leads_and_the_others_keep_their_order() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"), at("w2"), at("w10"))
    rendezvous.lose("w1", 0.0)
    generation = formed(rendezvous, at("w10", 6), at("w2", 6), at("w0", 6), at("w11"))
    assert names(generation) == ["w0", "w2", "w10", "w11"]
    generation = formed(rendezvous, at("w0", 6), at("w2", 6), at("w10", 7), at("w11", 6))
    assert names(generation) == ["w10", "w0", "w2", "w11"]
    assert generation.rank_of("w2") == 2


def test_a_newcomer_waits_for_all_members() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.enter(at("w2"), 1.0)
    assert rendezvous.form(1.0) is None
    rendezvous.enter(at("w1", 3), 1.0)
    assert rendezvous.missing == {"w0"}
    assert rendezvous.form(100.0) is None
    generation = formed(rendezvous, at("w0", 3), now=100.0)
    assert (names(generation), generation.cause) == (["w0", "w1", "w2"], "join")


def test_a_death_makes_the_cause_a_loss_also_if_somebody_joins() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1", 0.0)
    assert formed(rendezvous, at("w0", 1), at("w2")).cause == "loss"
    assert formed(rendezvous, at("w0", 2), at("w2", 2), at("w3")).cause == "join"


def test_the_same_members_again_are_a_loss_since_their_group_broke() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    assert formed(rendezvous, at("w0"), at("w1")).cause == "loss"


def test_survivors_that_are_too_few_wait_for_another_worker() -> None:
    rendezvous = Rendezvous(2)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1", 0.0)
    rendezvous.enter(at("w0", 4), 0.0)
    assert rendezvous.form(1000.0) is None
    assert names(formed(rendezvous, at("w2"))) == ["w0", "w2"]


def test_members_are_called_when_newcomers_wait_and_nobody_else_is_about_to_come() -> None:
    rendezvous = Rendezvous(1, settle_s=1.0)
    formed(rendezvous, at("w0"))
    assert not rendezvous.should_let_in(0.0)
    rendezvous.start("w1")
    rendezvous.start("w2")
    rendezvous.enter(at("w1"), 10.0)
    assert not rendezvous.should_let_in(10.5)
    assert rendezvous.should_let_in(11.0)
    rendezvous.lose("w2", 0.0)
    assert rendezvous.should_let_in(10.5)


def test_a_member_at_the_door_is_no_newcomer() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.enter(at("w0", 1), 0.0)
    assert not rendezvous.should_let_in(100.0)


def test_everybody_is_asked_after_once_somebody_waits() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    assert rendezvous.to_ask == []
    rendezvous.enter(at("w2"), 0.0)
    assert rendezvous.to_ask == ["w0", "w1", "w2"]


def test_r6_members_that_others_wait_for_are_late_after_a_while() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.enter(at("w2"), 0.0)
    assert rendezvous.late(1000.0, 10.0) == set(), "a newcomer may have to wait for a long step"
    rendezvous.enter(at("w0", 1), 1000.0)
    assert rendezvous.late(1009.0, 10.0) == set()
    assert rendezvous.late(1010.0, 10.0) == {"w1"}
    rendezvous.enter(at("w1", 1), 1010.0)
    assert rendezvous.late(2000.0, 10.0) == set()


def test_nothing_forms_when_the_run_is_over() -> None:
    rendezvous = Rendezvous(1)
    rendezvous.closed = True
    rendezvous.enter(at("w0"), 0.0)
    assert rendezvous.form(10.0) is None


def test_an_arrival_is_told_from_an_equal_one_of_the_same_worker() -> None:
    rendezvous = Rendezvous(1)
    first, second = at("w0", 3), at("w0", 3)
    formed(rendezvous, first)
    rendezvous.enter(second, 0.0)
    rendezvous.lose("w0", 0.0)
    assert rendezvous.has_admitted(first)
    assert not rendezvous.has_admitted(second)
    assert not rendezvous.is_waiting(second)


# Drains


def test_p2_members_that_are_to_leave_are_called_to_the_door_and_go_when_the_others_have_their_state() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    assert rendezvous.signals(0.0) == Signals()
    assert rendezvous.leave("w0")
    assert rendezvous.signals(0.0) == Signals(gather=True, leave=True)
    rendezvous.enter(at("w0", 5), 0.0)
    assert rendezvous.dismiss() == set(), "w1 may have to do this step again, with it"
    rendezvous.enter(at("w1", 5), 0.0)
    assert rendezvous.dismiss() == {"w0"}
    generation = rendezvous.form(0.0)
    assert generation is not None
    assert (names(generation), generation.cause) == (["w1"], "drain")
    assert rendezvous.signals(0.0) == Signals()


def test_p2_a_member_that_is_to_leave_hands_its_state_on_first() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.leave("w0")
    rendezvous.enter(at("w1", 4), 0.0)  # its group broke before it had finished step 4
    rendezvous.enter(at("w0", 5), 0.0)
    assert rendezvous.dismiss() == set()
    assert names(must_form(rendezvous, 0.0)) == ["w0", "w1"]
    rendezvous.enter(at("w1", 5), 0.0)
    rendezvous.enter(at("w0", 5), 0.0)
    assert rendezvous.dismiss() == {"w0"}


def test_p2_where_all_are_to_leave_they_save_first() -> None:
    rendezvous = Rendezvous(2)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.leave("w0")
    rendezvous.leave("w1")
    assert rendezvous.signals(0.0) == Signals(gather=True, save=True, leave=True)
    rendezvous.enter(at("w0", 5), 0.0)
    rendezvous.enter(at("w1", 5), 0.0)
    assert rendezvous.dismiss() == set(), "nobody else has their state"
    assert names(must_form(rendezvous, 0.0)) == ["w0", "w1"]
    rendezvous.enter(at("w0", 6, is_saved=True), 0.0)
    rendezvous.enter(at("w1", 6, is_saved=True), 0.0)
    assert rendezvous.dismiss() == {"w0", "w1"}
    assert rendezvous.form(0.0) is None
    assert formed(rendezvous, at("w2"), at("w3")).cause == "drain"


def test_p2_one_with_an_older_state_takes_the_newer_one_over_though_that_is_saved() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1", 0.0)  # by mistake: it comes back
    rendezvous.leave("w0")
    rendezvous.enter(at("w1", 3), 0.0)
    rendezvous.enter(at("w0", 5, is_saved=True), 0.0)
    assert rendezvous.dismiss() == set()
    assert names(must_form(rendezvous, 0.0)) == ["w0", "w1"]


def test_p2_too_few_form_a_generation_nevertheless_if_one_of_them_has_to_hand_its_state_on() -> None:
    rendezvous = Rendezvous(3)
    formed(rendezvous, at("w0"), at("w1"), at("w2"))
    rendezvous.lose("w1", 0.0)
    rendezvous.lose("w2", 0.0)
    rendezvous.enter(at("w0", 5), 0.0)
    rendezvous.enter(at("w3"), 0.0)
    assert rendezvous.form(1000.0) is None
    rendezvous.leave("w0")
    assert rendezvous.dismiss() == set()
    assert names(must_form(rendezvous, 1000.0)) == ["w0", "w3"]
    rendezvous.enter(at("w0", 6), 0.0)
    rendezvous.enter(at("w3", 6), 0.0)
    assert rendezvous.dismiss() == {"w0"}
    assert rendezvous.form(2000.0) is None


@pytest.mark.parametrize("is_at_door", [False, True])
def test_a_worker_without_state_may_go_at_once(is_at_door: bool) -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"))
    rendezvous.start("w1")
    if is_at_door:
        rendezvous.enter(at("w1"), 0.0)
    assert not rendezvous.leave("w1")
    assert (rendezvous.signals(1000.0), rendezvous.starting, rendezvous.waiting) == (Signals(), set(), {})


def test_p2_a_worker_that_came_back_with_its_state_is_waited_for_when_it_is_to_leave() -> None:
    rendezvous = Rendezvous(2)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w0", 0.0)
    rendezvous.enter(at("w0", 5), 0.0)
    assert rendezvous.leave("w0")
    rendezvous.enter(at("w1", 4), 0.0)
    assert rendezvous.dismiss() == set()
    assert names(must_form(rendezvous, 0.0)) == ["w0", "w1"]


def test_one_that_dies_before_it_could_leave_is_a_loss() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.leave("w1")
    rendezvous.lose("w1", 0.0)
    assert rendezvous.signals(0.0) == Signals()
    assert formed(rendezvous, at("w0", 5)).cause == "loss"


def test_a_stop_is_told_with_whatever_else_there_is() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"))
    rendezvous.stop_asked = True
    assert rendezvous.signals(0.0) == Signals(stop=True)
    rendezvous.enter(at("w1"), 0.0)
    assert rendezvous.signals(0.0) == Signals(gather=True, stop=True)


# Nodes that come and go


def flapping(rendezvous: Rendezvous) -> None:
    """Two workers of node "x" have lived for a second each; w0 trains."""
    formed(rendezvous, at("w0"))
    for name, now in (("w1", 0.0), ("w2", 2.0)):
        formed(rendezvous, at("w0", 1), at(name, node="x"), now=now)
        rendezvous.lose(name, now + 1.0)


def test_a_newcomer_from_a_flapping_node_waits_and_does_not_call_the_members() -> None:
    rendezvous = Rendezvous(1)
    flapping(rendezvous)
    rendezvous.enter(at("w3", node="x"), 10.0)
    assert not rendezvous.should_let_in(10.0 + FIRST_WAIT_S - 0.1)
    assert rendezvous.should_let_in(10.0 + FIRST_WAIT_S)


def test_a_group_that_breaks_meanwhile_goes_on_without_the_one_who_waits_and_that_is_no_join() -> None:
    rendezvous = Rendezvous(1)
    flapping(rendezvous)
    formed(rendezvous, at("w0", 2), now=8.0)
    rendezvous.enter(at("w3", node="x"), 10.0)
    generation = formed(rendezvous, at("w0", 3), now=10.0)
    assert (names(generation), generation.cause) == (["w0"], "loss")


def test_where_workers_are_needed_those_from_flapping_nodes_are_let_in_at_once() -> None:
    rendezvous = Rendezvous(1)
    flapping(rendezvous)
    rendezvous.min_workers = 2
    assert names(formed(rendezvous, at("w3", node="x"), at("w0", 3), now=10.0)) == ["w0", "w3"]


def test_a_worker_with_a_newer_state_is_let_in_at_once() -> None:
    rendezvous = Rendezvous(1)
    flapping(rendezvous)
    assert names(formed(rendezvous, at("w3", 5, node="x"), at("w0", 3), now=10.0)) == ["w3", "w0"]


# False alarms


def test_the_patience_doubles_each_time_a_group_of_the_living_breaks_without_progress() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    patience = [formed(rendezvous, at("w0"), at("w1")).patience for _ in range(8)]
    assert patience == [2, 4, 8, 16, 32, 64, 64, 64]
    assert patience[-1] == LONGEST_PATIENCE
    assert formed(rendezvous, at("w0", 3), at("w1", 3)).patience == 64, "it was needed: steps are that long"
    assert formed(rendezvous, at("w0", 4), at("w1", 4), at("w2")).patience == 1, "another group may be quicker"


def test_a_death_is_no_false_alarm() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1", 0.0)
    assert formed(rendezvous, at("w0", 3), at("w1", 3)).patience == 1


def test_the_time_with_too_few_at_the_door_is_told() -> None:
    rendezvous = Rendezvous(2)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1", 0.0)
    rendezvous.enter(at("w0", 4), 10.0)
    for now in (11.0, 20.0):
        assert rendezvous.form(now) is None
    assert formed(rendezvous, at("w2"), now=31.0).waited_s == 20.0
    assert formed(rendezvous, at("w0", 5), at("w2", 5), now=40.0).waited_s == 0.0


def test_it_is_told_how_far_anybody_has_been() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.reached = 8  # by a heartbeat of w1
    rendezvous.lose("w1", 0.0)
    assert formed(rendezvous, at("w0", 6)).reached == 8
    assert formed(rendezvous, at("w0", 9)).reached == 9


# A rendezvous that was started again


def test_one_that_was_started_again_goes_on_from_the_generation_that_it_is_told_of() -> None:
    before = formed(Rendezvous(1), at("w0"), at("w1"))
    latest = replace(before, number=7)
    rendezvous = Rendezvous(1)
    rendezvous.adopt(latest)
    rendezvous.adopt(before)
    assert rendezvous.generation is latest
    assert not rendezvous.is_broken
    rendezvous.enter(at("w2"), 0.0)
    assert rendezvous.form(1000.0) is None, "w0 and w1 train"
    generation = formed(rendezvous, at("w0", 3, after=7), at("w1", 3, after=7))
    assert (generation.number, names(generation), generation.cause) == (8, ["w0", "w1", "w2"], "join")


def test_numbers_go_on_from_those_that_entrants_know() -> None:
    assert formed(Rendezvous(1), at("w0", 3, after=6), at("w1")).number == 7


def test_a_generation_is_broken_once_a_member_is_lost() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    assert not rendezvous.is_broken
    rendezvous.lose("w1", 0.0)
    assert rendezvous.is_broken
