"""Who trains together next, against a model of the workers: any order of arrivals, steps, deaths, drains and restarts.

`Life` holds what is true of the workers. It carries the state machine as the actor does, and checks each generation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raytrain.rendezvous.state import NO_STATE, Generation, JoinRequest, Rendezvous

HEARTBEAT_S, LONG_S = 10.0, 400.0
MOST_WORKERS = 6
NODES = ["a", "b", "c"]


@dataclass
class Worker:
    """What is true of a worker whose process lives."""

    node: str
    place: str = "starting"  # "training" or "barrier", or "outside": it must join again
    step: int = NO_STATE  # finished steps in its memory
    known: Generation | None = None  # the latest that it was in; its heartbeats report it
    joined: Generation | None = None  # the latest in which it has trained
    is_saved: bool = False  # whether all its steps are in a checkpoint
    must_leave: bool = False  # whether the rendezvous has agreed that it leaves
    is_stale: bool = False  # whether it was declared dead, so that the others may have gone on without it


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rendezvous = Rendezvous(1)
        self.workers: dict[str, Worker] = {}
        self.unnoticed: set[str] = set()
        self.num_started, self.now, self.opens_at = 0, 0.0, 0.0
        self.top, self.checkpoint = 0, 0
        self.cut_short: set[int] = set()
        self.lost_since = self.left_since = self.is_restarted = False

    # The workers

    def at(self, *places: str) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.place in places]

    def pick(self, data: Any, names: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    def running(self) -> list[Generation]:
        """Generations all of whose members train in them, so that they can take a step."""
        known = {w.known.number: w.known for w in self.workers.values() if w.place == "training" and w.known is not None}
        return [generation for generation in known.values() if all(self.is_in(generation, n) for n in names(generation))]

    def is_in(self, generation: Generation, name: str) -> bool:
        worker = self.workers.get(name)
        return worker is not None and worker.place == "training" and worker.known is generation

    def form_group(self, generation: Generation) -> None:
        """The process group forms, and all get the leader's state."""
        leader = generation.members[0]
        for name in names(generation):
            worker = self.workers[name]
            if worker.joined is not generation:
                worker.joined, worker.step = generation, self.checkpoint if leader.step == NO_STATE else leader.step
                worker.is_saved = False

    @precondition(lambda self: len(self.workers) < MOST_WORKERS)
    @rule(node=st.sampled_from(NODES), min_workers=st.integers(1, 3))
    def a_process_starts(self, node: str, min_workers: int) -> None:
        if not self.num_started:
            self.rendezvous.min_workers = min_workers
        name = f"w{self.num_started}"
        self.num_started += 1
        self.workers[name] = Worker(node)
        self.rendezvous.expect(name)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), is_whole=st.booleans())
    def a_step_is_taken(self, data: Any, is_whole: bool) -> None:
        """Where it is cut short, some have finished it and others have not."""
        generation = data.draw(st.sampled_from(self.running()))
        self.form_group(generation)
        if generation.number in self.cut_short:
            return
        must_save = is_whole and self.is_open and self.is_current(generation) and self.rendezvous.signals(self.now).save
        finished = names(generation)
        if not is_whole:
            finished = data.draw(st.lists(st.sampled_from(finished), unique=True))
            self.cut_short.add(generation.number)
        for name in finished:
            self.workers[name].step += 1
            self.workers[name].is_saved = must_save
            self.top = max(self.top, self.workers[name].step)
        if must_save:
            self.checkpoint = max(self.checkpoint, self.workers[finished[0]].step)

    def is_current(self, generation: Generation) -> bool:
        return generation.number == self.rendezvous.generation.number

    @precondition(lambda self: self.at("starting", "training", "outside"))
    @rule(data=st.data())
    def somebody_joins(self, data: Any) -> None:
        self.enter(self.pick(data, self.at("starting", "training", "outside")))
        self.form()

    def enter(self, name: str) -> None:
        worker = self.workers[name]
        worker.place = "barrier"
        last = worker.known.number if worker.known else 0
        request = JoinRequest(name, worker.step, ("h", 1), "", 0, worker.node, worker.is_saved, last_generation=last)
        self.rendezvous.join(request, self.now)

    # What happens to them

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), is_noticed=st.booleans())
    def somebody_dies(self, data: Any, is_noticed: bool) -> None:
        name = self.pick(data, list(self.workers))
        is_waiting = self.workers[name].place == "barrier"
        del self.workers[name]
        if is_noticed or is_waiting:  # those at the barrier are probed all the time
            self.lose(name)
            self.form()
        else:
            self.unnoticed.add(name)

    @precondition(lambda self: self.unnoticed)
    @rule(data=st.data())
    def a_death_is_noticed(self, data: Any) -> None:
        name = self.pick(data, list(self.unnoticed))
        self.unnoticed.discard(name)
        self.lose(name)
        self.form()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def somebody_is_declared_dead_by_mistake(self, data: Any) -> None:
        worker = self.workers[name := self.pick(data, list(self.workers))]
        if worker.place == "barrier":
            worker.place = "outside"
        worker.is_stale, worker.must_leave = worker.known is not None, False
        self.lose(name)
        self.form()

    def lose(self, name: str) -> None:
        self.lost_since |= name in self.rendezvous.alive
        self.rendezvous.report_lost(name, self.now)

    @precondition(lambda self: self.workers and self.is_open)
    @rule(data=st.data())
    def somebody_is_to_leave(self, data: Any) -> None:
        name = self.pick(data, list(self.workers))
        if self.rendezvous.drain(name):
            self.workers[name].must_leave = True
        else:
            worker = self.workers.pop(name)  # the controller ends it at once
            assert worker.step == NO_STATE or worker.place == "outside" or worker.is_stale
        self.form()

    # The rendezvous

    @property
    def is_open(self) -> bool:
        return self.now >= self.opens_at

    @rule()
    def the_rendezvous_dies_and_is_started_again(self) -> None:
        self.rendezvous = Rendezvous(self.rendezvous.min_workers)
        self.opens_at, self.is_restarted = self.now + HEARTBEAT_S, True
        self.lost_since = self.left_since = False
        for name in self.workers:
            self.workers[name].must_leave = False
            if self.workers[name].place == "barrier":
                self.workers[name].place = "outside"

    @precondition(lambda self: not self.is_open and any(w.known for w in self.workers.values()))
    @rule(data=st.data())
    def a_heartbeat_reports_a_generation(self, data: Any) -> None:
        self.send_heartbeat(self.pick(data, [name for name, worker in self.workers.items() if worker.known]))

    def send_heartbeat(self, name: str) -> None:
        if known := self.workers[name].known:
            self.rendezvous.recover(known)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, HEARTBEAT_S]))
    def time_passes(self, seconds: float) -> None:
        if not self.is_open and self.now + seconds >= self.opens_at:  # heartbeats are more frequent
            for name in self.workers:
                self.send_heartbeat(name)
        self.now += seconds
        self.form()

    def form(self) -> None:
        """As the actor does after each change."""
        if not self.is_open:
            return
        self.check_dismissed(self.rendezvous.release_drained())
        living, first = set(self.rendezvous.alive), not self.rendezvous.generation.number
        missing = living - self.rendezvous.waiting.keys()
        num_waiting, number = len(self.at("barrier")), self.rendezvous.generation.number
        to_hand_on = any(self.workers[name].must_leave for name in self.at("barrier"))
        generation = self.rendezvous.form(self.now)
        if generation is None:
            is_settling = not living and self.rendezvous.starting
            is_enough = num_waiting >= self.rendezvous.min_workers or to_hand_on
            assert missing or not is_enough or is_settling, "everybody is here, and nothing forms"
            return
        assert not missing
        assert generation.number > number
        self.check(generation, living, first)
        for name in names(generation):
            worker = self.workers[name]
            worker.place, worker.known, worker.is_stale = "training", generation, False
        self.lost_since = self.left_since = False

    def check_dismissed(self, going: set[str]) -> None:
        gone = {name: self.workers.pop(name) for name in going}
        assert all(worker.place == "barrier" and worker.must_leave for worker in gone.values())
        if not gone:
            return
        self.left_since = True
        best = max(worker.step for worker in gone.values())
        staying = [self.workers[name] for name in self.at("barrier")]
        assert best == NO_STATE or any(w.step >= best for w in staying) or self.checkpoint >= best, "state is lost"

    def check(self, generation: Generation, living: set[str], is_first: bool) -> None:
        members = names(generation)
        assert set(members) <= set(self.at("barrier")), "a dead worker, or one that is not here"
        assert living <= set(members), "a member of the last generation is left out"
        assert len(members) == len(set(members))
        numbers = [worker.known.number for worker in self.workers.values() if worker.known]
        assert generation.number > max(numbers, default=0), "the number of a generation that somebody knows"
        self.check_step(generation, living)
        order = [self.workers[name].step for name in members]
        assert order == sorted(order, reverse=True)
        if not self.is_restarted:
            has_newcomers = not set(members) <= living
            rest = "drain" if self.left_since else "join" if has_newcomers else "retry"
            assert generation.cause == ("start" if is_first else "loss" if self.lost_since else rest)

    def check_step(self, generation: Generation, living: set[str]) -> None:
        """The run never goes back while somebody has its state."""
        leader = generation.members[0]
        step = self.checkpoint if leader.step == NO_STATE else leader.step
        assert all(step >= self.workers[name].step for name in {*self.at("barrier"), *living})
        holders = [w for w in self.workers.values() if w.step > step and not w.is_stale and w.known in self.running()]
        assert not holders, "others train with a newer state"
        if step < self.checkpoint:
            assert self.workers[leader.worker].is_stale, "a checkpoint was saved of a newer state"

    # What is always true

    def teardown(self) -> None:
        self.all_join_and_nobody_waits_for_ever()

    @rule()
    def all_join_and_nobody_waits_for_ever(self) -> None:
        self.time_passes(HEARTBEAT_S)
        for name in (self.unnoticed | self.rendezvous.alive) - self.workers.keys():
            self.lose(name)  # it is silent
        self.unnoticed.clear()
        self.now += LONG_S
        must_come = self.rendezvous.alive and (self.rendezvous.candidates or self.rendezvous.draining)
        assert not must_come or self.rendezvous.signals(self.now).regroup, "no signal asks the members to join"
        to_enter, number = self.at("starting", "training", "outside"), self.rendezvous.generation.number
        for name in random.Random(self.num_started).sample(to_enter, k=len(to_enter)):
            self.enter(name)
        self.now += LONG_S
        self.form()
        few = len(self.workers) < self.rendezvous.min_workers
        assert few or self.rendezvous.generation.number > number
        assert few or not self.at("barrier")

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        assert set(self.rendezvous.waiting) == set(self.at("barrier"))
        assert self.rendezvous.starting <= {*self.at("starting"), *self.unnoticed}
        must_leave = {name for name, worker in self.workers.items() if worker.must_leave}
        assert self.rendezvous.draining <= must_leave | self.unnoticed

    @invariant()
    def one_generation_trains_at_a_time(self) -> None:
        """But for one all of whose members were declared dead: their next signal is to regroup."""
        alive = [generation for generation in self.running() if not all(self.workers[n].is_stale for n in names(generation))]
        assert len(alive) <= 1


def names(generation: Generation) -> list[str]:
    return [member.worker for member in generation.members]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
