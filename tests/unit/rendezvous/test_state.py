"""Who trains together next, by examples; `test_life.py` checks any sequence of events."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from raytrain.rendezvous.state import (
    FIRST_BACKOFF_S,
    MAX_TIMEOUT_FACTOR,
    NO_STATE,
    SHORT_LIFE_S,
    Generation,
    JoinRequest,
    NodeBackoff,
    Rendezvous,
    Signals,
)


def at(worker: str, step: int = NO_STATE, node: str = "", is_saved: bool = False, last_generation: int = 0) -> JoinRequest:
    return JoinRequest(worker, step, ("127.0.0.1", 1), node_id=node, is_saved=is_saved, last_generation=last_generation)


def formed(rendezvous: Rendezvous, *requests: JoinRequest, now: float = 0.0) -> Generation:
    for request in requests:
        rendezvous.join(request, now)
    generation = rendezvous.form(now)
    assert generation is not None
    return generation


def names(generation: Generation | None) -> list[str]:
    return [member.worker for member in generation.members] if generation else []


def training(*workers: str, min_workers: int = 1) -> Rendezvous:
    rendezvous = Rendezvous(min_workers)
    formed(rendezvous, *map(at, workers))
    return rendezvous


@pytest.fixture
def pair() -> Rendezvous:
    return training("w0", "w1")


def test_the_first_generation_waits_a_while_for_those_that_are_starting() -> None:
    rendezvous = Rendezvous(1, settle_s=1.0)
    rendezvous.expect("w0")
    rendezvous.expect("w1")
    rendezvous.join(at("w0"), 5.0)
    assert rendezvous.form(5.9) is None
    assert replace(rendezvous, closed=True).form(6.0) is None, "the run is over"
    generation = rendezvous.form(6.0)
    assert generation is not None
    assert (generation.number, generation.cause, names(generation)) == (1, "start", ["w0"]), "w1 may never join"


def test_the_worker_furthest_ahead_leads_and_the_others_keep_their_order() -> None:
    rendezvous = training("w0", "w1", "w2", "w10")
    rendezvous.report_lost("w1", 0.0)
    generation = formed(rendezvous, at("w10", 6), at("w2", 6), at("w0", 6), at("w11"))
    assert names(generation) == ["w0", "w2", "w10", "w11"]
    generation = formed(rendezvous, at("w0", 6), at("w2", 6), at("w10", 7), at("w11", 6))
    assert names(generation) == ["w10", "w0", "w2", "w11"]
    assert (generation.rank_of("w2"), generation.has("w2"), generation.has("w1")) == (2, True, False)


def test_spares_wait_until_there_is_room_and_disturb_nobody() -> None:
    rendezvous = Rendezvous(1, max_workers=2)
    assert names(formed(rendezvous, at("w0"), at("w1"), at("w2"))) == ["w0", "w1"]
    rendezvous.join(at("w3"), 1.0)
    assert (rendezvous.signals(99.0), rendezvous.to_probe, rendezvous.form(99.0)) == (Signals(), [], None)
    rendezvous.report_lost("w1", 100.0)
    generation = formed(rendezvous, at("w0", 6), now=100.0)
    assert (names(generation), generation.cause) == (["w0", "w2"], "loss"), "the one that has waited longest"
    assert rendezvous.drain("w0")
    assert rendezvous.signals(101.0).regroup
    rendezvous.join(at("w0", 7), 102.0)
    rendezvous.join(at("w2", 7), 102.0)
    assert rendezvous.release_drained() == {"w0"}
    assert names(rendezvous.form(102.0)) == ["w2", "w3"]
    assert not rendezvous.drain("w4"), "a spare that is to leave is not waited for"


def test_a_generation_of_those_with_a_newer_state_is_not_too_large_either() -> None:
    rendezvous = Rendezvous(2, max_workers=2)
    formed(rendezvous, at("w0"), at("w1"))
    for worker in ("w0", "w1"):
        rendezvous.report_lost(worker, 1.0)
    for request in (at("w2"), at("w3"), at("w4", 5)):
        rendezvous.backoff.record_admission(request.worker, request.node_id, 1.0)
        rendezvous.join(request, 2.0)
    assert names(rendezvous.form(3.0))[0] == "w4"
    assert len(rendezvous.generation.members) == 2


def test_too_few_workers_wait_for_another_and_the_time_is_measured() -> None:
    rendezvous = training("w0", "w1", min_workers=2)
    rendezvous.report_lost("w1", 0.0)
    rendezvous.join(at("w0", 4), 10.0)
    assert [rendezvous.form(now) for now in (11.0, 20.0)] == [None, None]
    assert formed(rendezvous, at("w2"), now=31.0).waited_s == 20.0
    assert formed(rendezvous, at("w0", 5), at("w2", 5), now=40.0).waited_s == 0.0


def test_members_regroup_when_newcomers_wait_and_nobody_else_is_starting(pair: Rendezvous) -> None:
    pair.join(at("w0", 1), 0.0)
    assert not pair.should_admit(100.0), "a member that waits is no newcomer"
    pair.expect("w2")
    pair.expect("w3")
    pair.join(at("w2"), 110.0)
    assert not pair.should_admit(110.5)
    assert pair.should_admit(111.0)
    pair.report_lost("w3", 0.0)
    assert pair.should_admit(110.5)


def test_r6_members_that_others_wait_for_are_probed_and_overdue_after_a_while(pair: Rendezvous) -> None:
    assert pair.to_probe == []
    pair.join(at("w2"), 0.0)
    assert pair.to_probe == ["w0", "w1", "w2"], "while somebody waits"
    assert pair.overdue(1000.0, 10.0) == set(), "a newcomer may have to wait for a long step"
    pair.join(at("w0", 1), 1000.0)
    assert [pair.overdue(now, 10.0) for now in (1009.0, 1010.0)] == [set(), {"w1"}]
    pair.join(at("w1", 1), 1010.0)
    assert pair.overdue(2000.0, 10.0) == set()


def test_equal_requests_of_one_worker_are_distinguished() -> None:
    rendezvous, first, second = Rendezvous(1), at("w0", 3), at("w0", 3)
    formed(rendezvous, first)
    rendezvous.join(second, 0.0)
    assert (rendezvous.is_waiting(first), rendezvous.is_waiting(second)) == (False, True)
    assert (rendezvous.has_admitted(first), rendezvous.has_admitted(second)) == (True, False)


# Drains


@pytest.mark.parametrize(
    ("draining", "newcomer", "stop", "signals"),
    [
        ([], False, False, Signals()),
        (["w0"], False, False, Signals(regroup=True, drain=True)),
        (["w0", "w1"], False, False, Signals(regroup=True, save=True, drain=True)),
        ([], False, True, Signals(stop=True)),
        ([], True, True, Signals(regroup=True, stop=True)),
    ],
)
def test_p2_drains_are_signalled_with_all_other_signals(
    pair: Rendezvous, draining: list[str], newcomer: bool, stop: bool, signals: Signals
) -> None:
    assert all(pair.drain(worker) for worker in draining)
    pair.stop_requested = stop
    if newcomer:
        pair.join(at("w2"), 0.0)
    assert pair.signals(0.0) == signals


SAVED = at("w0", 5, is_saved=True)


def test_r6_members_of_a_stalled_generation_are_overdue_and_form_the_next_one(pair: Rendezvous) -> None:
    pair.stall(1000.0)
    pair.stall(1007.0)
    assert pair.is_broken
    assert [pair.overdue(now, 10.0) for now in (1009.0, 1010.0)] == [set(), {"w0", "w1"}]
    again = formed(pair, at("w0"), at("w1"))
    assert (names(again), again.cause, again.timeout_factor) == (["w0", "w1"], "retry", 2)
    assert not pair.is_broken
    assert pair.overdue(2000.0, 10.0) == set()


@pytest.mark.parametrize(
    ("draining", "requests", "released", "form"),
    [
        (["w0"], [at("w0", 5)], set(), []),  # w1 may have to do this step again, with it
        (["w0"], [at("w0", 5), at("w1", 5)], {"w0"}, ["w1"]),
        (["w0"], [at("w0", 5), at("w1", 4)], set(), ["w0", "w1"]),  # w1 gets its newer state
        (["w0"], [SAVED, at("w1", 3)], set(), ["w0", "w1"]),  # else w1 would lead with its older state
        (["w0", "w1"], [at("w0", 5), at("w1", 5)], set(), ["w0", "w1"]),  # nobody else has their state
        (["w0", "w1"], [SAVED, at("w1", 5, is_saved=True)], {"w0", "w1"}, []),
        (["w0", "w1"], [SAVED, at("w1", 5), at("w2")], {"w0", "w1"}, ["w2"]),  # w2 restores it
    ],
)
def test_p2_draining_members_leave_once_no_state_is_lost_with_them(
    pair: Rendezvous, draining: list[str], requests: list[JoinRequest], released: set[str], form: list[str]
) -> None:
    for worker in draining:
        pair.drain(worker)
    for request in requests:
        pair.join(request, 0.0)
    assert pair.release_drained() == released
    generation = pair.form(0.0)
    assert names(generation) == form
    assert not released or pair.signals(0.0) == Signals()
    assert not generation or generation.cause == ("drain" if released else "retry")


def test_p2_too_few_workers_form_a_generation_to_pass_on_a_draining_state() -> None:
    rendezvous = training("w0", "w1", "w2", min_workers=3)
    rendezvous.report_lost("w1", 0.0)
    rendezvous.report_lost("w2", 0.0)
    rendezvous.join(at("w0", 5), 0.0)
    rendezvous.join(at("w3"), 0.0)
    assert rendezvous.form(1000.0) is None
    rendezvous.drain("w0")
    assert rendezvous.release_drained() == set()
    assert names(formed(rendezvous, now=1000.0)) == ["w0", "w3"]
    rendezvous.join(at("w0", 6), 0.0)
    rendezvous.join(at("w3", 6), 0.0)
    assert rendezvous.release_drained() == {"w0"}
    assert rendezvous.form(2000.0) is None


@pytest.mark.parametrize(("step", "is_kept"), [(None, False), (NO_STATE, False), (5, True)])
def test_p2_a_worker_that_is_no_member_is_waited_for_if_it_has_state(
    pair: Rendezvous, step: int | None, is_kept: bool
) -> None:
    pair.expect("w2")
    if step is not None:
        pair.join(at("w2", step), 0.0)
    assert pair.drain("w2") is is_kept
    assert (pair.signals(1000.0).drain, pair.starting, [*pair.waiting]) == (is_kept, set(), ["w2"] if is_kept else [])


# Nodes whose workers die soon


@pytest.fixture
def failing() -> Rendezvous:
    """Two workers of node "x" have lived for a second each; w0 trains."""
    rendezvous = training("w0")
    for name, now in (("w1", 0.0), ("w2", 2.0)):
        formed(rendezvous, at("w0", 1), at(name, node="x"), now=now)
        rendezvous.report_lost(name, now + 1.0)
    return rendezvous


def test_a_newcomer_from_a_node_in_back_off_waits(failing: Rendezvous) -> None:
    failing.join(at("w3", node="x"), 10.0)
    assert not failing.should_admit(10.0 + FIRST_BACKOFF_S - 0.1)
    assert failing.should_admit(10.0 + FIRST_BACKOFF_S)


@pytest.mark.parametrize(("min_workers", "step", "form"), [(1, -1, ["w0"]), (2, -1, ["w0", "w3"]), (1, 5, ["w3", "w0"])])
def test_back_off_is_ignored_if_workers_are_too_few_or_the_newcomers_step_is_newer(
    failing: Rendezvous, min_workers: int, step: int, form: list[str]
) -> None:
    formed(failing, at("w0", 2), now=8.0)
    failing.min_workers = min_workers
    generation = formed(failing, at("w3", step, node="x"), at("w0", 3), now=10.0)
    assert (names(generation), generation.cause) == (form, "join" if "w3" in form else "retry")


def lives(backoff: NodeBackoff, node: str, *lengths_s: float) -> None:
    for number, length_s in enumerate(lengths_s):
        backoff.record_admission(f"{node}-{number}", node, 100.0)
        backoff.record_loss(f"{node}-{number}", 100.0 + length_s)


@pytest.mark.parametrize(
    ("lengths_s", "wait_s"),
    [([1.0] * n, s) for n, s in ((0, 0), (1, 0), (2, 5), (3, 10), (4, 20), (7, 160), (8, 300), (5000, 300))]
    + [([1.0, 1.0, 1.0, SHORT_LIFE_S], 0), ([1.0, 1.0, SHORT_LIFE_S, 1.0], 0)],
)
def test_back_off_doubles_with_each_short_life_and_ends_with_a_long_one(lengths_s: list[float], wait_s: float) -> None:
    backoff = NodeBackoff()
    lives(backoff, "a", *lengths_s)
    assert (backoff.delay_s("a"), backoff.delay_s("b")) == (wait_s, 0.0)


def test_back_off_counts_from_the_first_generation_of_a_worker_on_a_known_node() -> None:
    backoff = NodeBackoff()
    lives(backoff, "a", 1.0, 1.0)
    for admitted_s in (0.0, 99.0):
        backoff.record_admission("w", "a", admitted_s)
    for worker in ("w", "never-admitted-0", "never-admitted-1"):
        backoff.record_loss(worker, 100.0)
    lives(backoff, "", 1.0, 1.0, 1.0)
    assert (backoff.delay_s("a"), backoff.delay_s("")) == (0.0, 0.0)


# Generations


def test_timeouts_double_each_time_a_group_breaks_although_all_are_alive(pair: Rendezvous) -> None:
    factors = [formed(pair, at("w0"), at("w1")).timeout_factor for _ in range(8)]
    assert factors == [2, 4, 8, 16, 32, 64, 64, MAX_TIMEOUT_FACTOR]
    assert formed(pair, at("w0", 3), at("w1", 3)).timeout_factor == 64, "it was needed: steps are that long"
    assert formed(pair, at("w0", 4), at("w1", 4), at("w2")).timeout_factor == 1, "another group may be quicker"
    pair.report_lost("w1", 0.0)
    again = [at(name, 4) for name in ("w0", "w1", "w2")]
    assert formed(pair, *again).timeout_factor == 1, "a death is no false alarm"


def test_a_generation_has_the_most_steps_that_anybody_reported(pair: Rendezvous) -> None:
    pair.max_step = 8  # by a heartbeat of w1
    pair.report_lost("w1", 0.0)
    assert [formed(pair, at("w0", step)).max_step for step in (6, 9)] == [8, 9]


def test_a_restarted_rendezvous_recovers_the_latest_generation_and_counts_on(pair: Rendezvous) -> None:
    latest, rendezvous = replace(pair.generation, number=7), Rendezvous(1)
    rendezvous.recover(latest)
    rendezvous.recover(pair.generation)
    assert rendezvous.generation is latest
    assert formed(Rendezvous(1), at("w0", 3, last_generation=6), at("w1")).number == 7


def test_a_generation_survives_pickling() -> None:
    members = (at("w0", 3, node="a"), at("w1", 2, is_saved=True, last_generation=4))
    generation = Generation(4, members, "drain", waited_s=1.5, timeout_factor=8, max_step=9)
    back = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(generation))))
    assert back == generation
    assert vars(back).keys() <= vars(generation).keys()
