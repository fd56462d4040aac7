"""Who trains together next: by examples, and against a model for any sequence of arrivals, deaths and returns."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raytrain.rendezvous.state import NO_STATE, Entrant, Generation, Rendezvous


def at(worker: str, step: int = NO_STATE) -> Entrant:
    return Entrant(worker, step, ("127.0.0.1", 1))


def formed(rendezvous: Rendezvous, *entrants: Entrant, now: float = 0.0) -> Generation:
    for entrant in entrants:
        rendezvous.enter(entrant, now)
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
    rendezvous.lose("w1")
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
    generation = formed(rendezvous, at("w0", 3))
    assert (names(generation), generation.cause) == (["w0", "w1", "w2"], "join")


def test_a_death_makes_the_cause_a_loss_also_if_somebody_joins() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1")
    assert formed(rendezvous, at("w0", 1), at("w2")).cause == "loss"
    assert formed(rendezvous, at("w0", 2), at("w2", 2), at("w3")).cause == "join"


def test_the_same_members_again_are_a_loss_since_their_group_broke() -> None:
    rendezvous = Rendezvous(1)
    formed(rendezvous, at("w0"), at("w1"))
    assert formed(rendezvous, at("w0"), at("w1")).cause == "loss"


def test_survivors_that_are_too_few_wait_for_another_worker() -> None:
    rendezvous = Rendezvous(2)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.lose("w1")
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
    rendezvous.lose("w2")
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


def test_r6_a_member_that_does_not_come_is_overdue_after_the_patience_of_those_who_wait() -> None:
    rendezvous = Rendezvous(1, patience_s=60.0)
    formed(rendezvous, at("w0"), at("w1"))
    rendezvous.enter(at("w2"), 0.0)
    assert rendezvous.overdue(1000.0) == set(), "a newcomer may have to wait for a long step"
    rendezvous.enter(at("w0", 1), 1000.0)
    assert rendezvous.overdue(1059.0) == set()
    assert rendezvous.overdue(1060.0) == {"w1"}
    rendezvous.enter(at("w1", 1), 1060.0)
    assert rendezvous.overdue(2000.0) == set()


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
    rendezvous.lose("w0")
    assert rendezvous.has_admitted(first)
    assert not rendezvous.has_admitted(second)
    assert not rendezvous.is_waiting(second)


class Life(RuleBasedStateMachine):
    """Workers start, arrive, train, die, and are taken for dead and come back; `where` is what should be true of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rendezvous: Rendezvous | None = None
        self.where: dict[str, str] = {}
        self.step: dict[str, int] = {}
        self.now, self.num_started = 0.0, 0
        self.dead: set[str] = set()
        self.ranks: list[str] = []
        self.lost_since, self.came_since = False, False

    def at(self, *places: str) -> list[str]:
        return [worker for worker, place in self.where.items() if place in places]

    def form(self) -> None:
        assert self.rendezvous is not None
        expected = not self.at("training") and len(self.at("door")) >= self.rendezvous.min_workers
        generation = self.rendezvous.form(self.now)
        if generation is None:
            may_wait = not self.rendezvous.living and self.at("starting")
            assert not expected or may_wait, "everybody is here, and nothing forms"
            return
        assert expected
        self.check(generation)

    def check(self, generation: Generation) -> None:
        members = names(generation)
        assert sorted(members) == sorted(self.at("door"))
        assert not self.dead & set(members)
        assert self.step[members[0]] == max(self.step[worker] for worker in members)
        kept = [w for w in members if w in self.ranks and self.step[w] == self.step[members[0]]]
        assert kept == [worker for worker in self.ranks if worker in kept]
        first = not self.ranks and generation.number == 1
        assert generation.cause == ("start" if first else "loss" if self.lost_since or not self.came_since else "join")
        self.ranks, self.lost_since, self.came_since = members, False, False
        furthest = max(0, self.step[members[0]])
        for worker in members:
            self.where[worker], self.step[worker] = "training", furthest

    def pick(self, data: Any, *places: str) -> str:
        return data.draw(st.sampled_from(sorted(self.at(*places))))

    @precondition(lambda self: self.rendezvous is None)
    @rule(min_workers=st.integers(1, 3))
    def begin(self, min_workers: int) -> None:
        self.rendezvous = Rendezvous(min_workers)

    @precondition(lambda self: self.rendezvous is not None and len(self.where) < 6)
    @rule()
    def a_process_starts(self) -> None:
        worker = f"w{self.num_started}"
        self.num_started += 1
        self.where[worker], self.step[worker] = "starting", NO_STATE
        self.rendezvous.start(worker)  # type: ignore[union-attr]

    @precondition(lambda self: self.at("starting", "training", "outside"))
    @rule(data=st.data(), took_a_step=st.booleans())
    def somebody_enters(self, data: Any, took_a_step: bool) -> None:
        worker = self.pick(data, "starting", "training", "outside")
        if self.where[worker] == "training":
            self.step[worker] += took_a_step
        else:
            self.came_since = True
        self.where[worker] = "door"
        self.rendezvous.enter(at(worker, self.step[worker]), self.now)  # type: ignore[union-attr]
        self.form()

    @precondition(lambda self: self.at("starting", "training", "door"))
    @rule(data=st.data(), for_good=st.booleans())
    def somebody_is_lost(self, data: Any, for_good: bool) -> None:
        worker = self.pick(data, "starting", "training", "door")
        self.lost_since |= worker in self.rendezvous.living  # type: ignore[union-attr]
        self.rendezvous.lose(worker)  # type: ignore[union-attr]
        self.where[worker] = "outside"
        if for_good:
            del self.where[worker]
            self.dead.add(worker)
        self.came_since = bool(set(self.at("door")) - self.rendezvous.living)  # type: ignore[union-attr]
        self.form()

    @precondition(lambda self: self.rendezvous is not None)
    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.form()

    @precondition(lambda self: len(self.at("starting", "training", "outside", "door")) >= 3)
    @rule()
    def everybody_comes_and_nobody_waits_for_ever(self) -> None:
        number = self.rendezvous.generation.number  # type: ignore[union-attr]
        for worker in random.Random(self.num_started).sample(
            self.at("starting", "training", "outside"), k=self.outside_door
        ):
            if self.where[worker] != "training":
                self.came_since = True
            self.where[worker] = "door"
            self.rendezvous.enter(at(worker, self.step[worker]), self.now)  # type: ignore[union-attr]
        self.form()
        assert self.rendezvous.generation.number == number + 1  # type: ignore[union-attr]

    @property
    def outside_door(self) -> int:
        return len(self.at("starting", "training", "outside"))

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        if self.rendezvous is None:
            return
        assert set(self.rendezvous.waiting) == set(self.at("door"))
        assert self.rendezvous.missing == set(self.at("training"))
        assert self.rendezvous.starting == set(self.at("starting"))


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
