"""How many workers to request, when too few or too many losses end a run, and the controller's clients of its two actors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from raytrain.elastic import membership as module
from raytrain.elastic.controller_config import ControllerConfig
from raytrain.elastic.membership import (
    POISON_DEATHS,
    REFRESH_TIMEOUT_S,
    REPORT_AFTER_S,
    Allocation,
    Demand,
    FailureBudget,
    MinWorkersGuard,
    PoisonRows,
    RendezvousClient,
    num_to_request,
    shortage,
    surplus,
)
from raytrain.elastic.placement import ResourceLease
from raytrain.errors import ResourceError
from raytrain.events.kinds import Event, WaitingForWorkers
from raytrain.rendezvous.actor import RendezvousStatus
from tests.golden import check

DOWN = ActorUnavailableError("down", None)
START_S, WAIT_S = 60.0, 1800.0


# Decisions


@pytest.mark.parametrize(
    ("given", "wanted"),
    [((0, 0, 0, 4), 4), ((2, 0, 0, 4), 2), ((2, 1, 0, 4), 1), ((2, 2, 0, 4), 0), ((4, 1, 0, 4), 0), ((2, 0, 1, 4), 0)],
)
def test_missing_workers_are_requested_once_and_not_at_the_end(given: tuple[int, ...], wanted: int) -> None:
    assert num_to_request(*given) == wanted


@dataclass(frozen=True)
class Somebody:
    name: str
    is_extra: bool = True


OWN, OLD, NEW = Somebody("own", is_extra=False), Somebody("old"), Somebody("new")


@pytest.mark.parametrize(
    ("staying", "joining", "finished", "least", "most", "released"),
    [
        ([OWN, OLD], [NEW], 0, 1, 3, []),
        ([OWN, OLD], [NEW], 0, 1, 2, [NEW]),
        ([OWN, OLD], [NEW], 0, 1, 1, [NEW, OLD]),
        ([OWN, OLD, NEW], [], 0, 1, 2, [NEW]),
        ([OLD], [OWN], 0, 1, 1, []),  # the reserved slot is lost and waits for room: no reason to train nowhere
        ([OLD, NEW], [OWN], 0, 1, 1, [NEW]),
        ([OLD, NEW], [OWN], 0, 2, 2, []),
        ([OLD], [OWN, NEW], 0, 1, 1, [NEW]),
        ([OWN, OLD], [], 1, 1, 1, []),
    ],
)
def test_the_newest_extra_slots_are_released_first_and_the_smallest_group_stays(
    staying: list[Somebody], joining: list[Somebody], finished: int, least: int, most: int, released: list[Somebody]
) -> None:
    assert surplus(staying, joining, finished, least, most) == released


def test_r11_a_shortage_names_what_was_requested_and_what_there_is() -> None:
    text = shortage({"CPU": 0.5, "GPU": 1.0, "TPU": 0}, 4, {"CPU": 2.0, "memory": 1e9})
    assert text == "asked for 2 CPU, the cluster has 2; asked for 4 GPU, the cluster has 0"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 4))
def test_r2_a_run_ends_exactly_when_too_many_are_lost_without_progress(moves: list[int], most: int) -> None:
    budget, step, in_a_row = FailureBudget(most), 0, 0
    for move_number, move in enumerate(moves):
        in_a_row = 1 if move else in_a_row + 1
        step += move
        assert budget.spend(step, event=move_number) == (in_a_row <= most)
    assert [budget.spend(step - 1, -number) for number in range(1, most + 3)][-1] is False, "repeated steps are no progress"


def test_r2_losses_with_one_cause_are_one_failure() -> None:
    budget = FailureBudget(2)
    assert all(budget.spend(7, event) for event in ["rack a"] * 16 + ["rack b"] * 16)
    assert not budget.spend(7, "rack c")
    assert budget.spend(8, "rack c")


@pytest.mark.parametrize(
    ("deaths", "poison"),
    [
        ([(7, {0, 1, 2}), (7, {2, 3}), (7, {1, 2})], {2}),
        ([(7, {0, 1}), (7, {2, 3}), (7, {1, 2})], set()),
        ([(7, {0}), (7, {0}), (8, {0}), (8, {0})], set()),
        ([(7, {0}), (7, {5}), (7, {0}), (7, {0})], set()),
        ([(7, {0}), (7, {5}), (7, {0}), (7, {0}), (7, {0})], {0}),
        ([(7, {0})] * (POISON_DEATHS - 1), set()),
    ],
)
def test_r16_rows_of_each_of_three_deaths_in_one_step_are_poison(
    deaths: list[tuple[int, set[int]]], poison: set[int]
) -> None:
    rows = PoisonRows()
    *before, last = [rows.record_death(step, frozenset(assigned)) for step, assigned in deaths]
    assert (set().union(*before), last) == (set(), poison)


# Too few workers


class GuardScene:
    """A run of at least 2 workers on a cluster with one CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.events = 100.0, list[Event]()
        monkeypatch.setattr(module, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 1.0}))
        config = ControllerConfig(2, 4, 3, START_S, WAIT_S, 600.0, 4, None, None)
        self.guard = MinWorkersGuard(config, {"CPU": 1.0}, self.events.append)

    def check(self, num_running: int, num_placed: int, after_s: float = 0.0) -> ResourceError | None:
        self.now += after_s
        return self.guard.check(num_running, num_placed, self.now)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> GuardScene:
    return GuardScene(monkeypatch)


def test_enough_workers_or_enough_that_start_are_not_reported(scene: GuardScene) -> None:
    for num_running, num_placed in ((0, 2), (1, 2), (2, 2), (3, 4)):
        assert scene.check(num_running, num_placed, after_s=WAIT_S + 1) is None
    assert scene.events == []


def test_each_shortage_is_reported_once_with_what_is_missing(scene: GuardScene) -> None:
    for num, after_s in ((1, 0.0), (1, REPORT_AFTER_S), (1, 1.0), (1, 10.0), (2, 1.0), (1, 1.0), (1, 6.0)):
        scene.check(num, num, after_s)
    assert scene.events == [WaitingForWorkers(have=1, need=2, reason="asked for 2 CPU, the cluster has 1")] * 2


def test_r11_a_run_that_never_had_enough_ends_after_the_start_timeout(scene: GuardScene) -> None:
    assert scene.check(0, 1) is None
    error = scene.check(0, 1, after_s=START_S + 1)
    check("errors/too_few_workers.txt", f"{error}\n")
    assert not scene.guard.had_enough


def test_r6_survivors_wait_longer_since_they_hold_the_state(scene: GuardScene) -> None:
    assert [scene.check(n, n, after_s) for n, after_s in ((2, 0.0), (1, 0.0), (1, START_S + 1))] == [None] * 3
    assert "there were 1 for 1862 s" in str(scene.check(1, 1, after_s=WAIT_S + 1))
    assert scene.guard.had_enough


# The client of the rendezvous


class FakeRendezvous:
    """Records its calls; replies are not there while `is_slow`, and are errors while `is_down`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.is_slow = self.is_down = False
        self.state, self.must_wait = RendezvousStatus({}, frozenset(), (), -1), True
        for name in ("expect", "save_and_stop"):
            setattr(self, name, SimpleNamespace(remote=lambda *arguments, name=name: self.calls.append((name, *arguments))))
        self.report_lost = SimpleNamespace(remote=lambda worker: self.call(("report_lost", worker), None))
        self.status = SimpleNamespace(remote=lambda: self.call("status", self.state))
        self.drain = SimpleNamespace(remote=lambda worker: self.call("drain", self.must_wait))
        self.request = SimpleNamespace(remote=self.calls.append)
        self.changed = SimpleNamespace(remote=lambda *given: self.call(("changed", *given), self.allocated))
        self.allocated, self.timeouts = 1, list[Any]()
        fake = SimpleNamespace(get=self.get, wait=lambda calls, timeout: ([], calls) if self.is_slow else (calls, []))
        monkeypatch.setattr(module, "ray", fake)
        self.client = RendezvousClient(self, num_logical=4)

    def call(self, what: Any, reply: Any) -> Any:
        self.calls.append(what)
        return SimpleNamespace(reply=DOWN if self.is_down else reply)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        if self.is_slow:
            raise GetTimeoutError("not yet")
        if isinstance(reference.reply, Exception):
            raise reference.reply
        return reference.reply


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> FakeRendezvous:
    return FakeRendezvous(monkeypatch)


def test_a_poll_takes_the_status_that_was_requested_before_without_waiting(rendezvous: FakeRendezvous) -> None:
    client = rendezvous.client
    assert (client.step, client.evicted, client.drained, client.assigned("w0")) == (0, {}, frozenset(), frozenset())
    rendezvous.state = RendezvousStatus({"w1": "silent"}, frozenset({"w2"}), ("w0", "w3"), 7)
    client.poll()
    assert client.step == 0
    client.poll()
    assert (client.step, client.evicted, client.drained) == (7, {"w1": "silent"}, {"w2"})
    assert (client.assigned("w0"), client.assigned("w3"), client.assigned("w1")) == ({0, 1}, {2, 3}, frozenset())
    assert rendezvous.timeouts == [0.0]


def test_r6_a_refresh_waits_a_limited_time_and_keeps_what_was_known(rendezvous: FakeRendezvous) -> None:
    rendezvous.state = RendezvousStatus({}, frozenset(), ("w0",), 7)
    rendezvous.client.refresh()
    assert rendezvous.timeouts == [REFRESH_TIMEOUT_S]
    for rendezvous.is_slow, rendezvous.is_down in ((True, False), (False, True)):
        rendezvous.client.poll()
        rendezvous.client.refresh()
        assert rendezvous.client.step == 7
    rendezvous.is_down, rendezvous.state = False, RendezvousStatus({}, frozenset(), ("w1",), 9)
    rendezvous.client.refresh()
    assert rendezvous.client.step == 9
    assert rendezvous.client.assigned("w0") == {0, 1, 2, 3}, "those of the latest generation that it was in"


def test_p2_a_worker_goes_once_the_rendezvous_says_that_no_state_is_lost(rendezvous: FakeRendezvous) -> None:
    assert [rendezvous.client.drain("w0") for _ in range(2)] == [False, False]
    rendezvous.must_wait = False
    assert [rendezvous.client.drain("w0") for _ in range(2)].count(True) == 1


def test_p2_drains_and_losses_are_repeated_for_a_restarted_rendezvous(rendezvous: FakeRendezvous) -> None:
    rendezvous.is_down = True
    rendezvous.client.report_lost("w1")
    for _ in range(2):
        assert not rendezvous.client.drain("w0")
        rendezvous.client.poll()
    rendezvous.is_down, rendezvous.state = False, replace(rendezvous.state, started_at=100.0)
    for _ in range(4):
        assert not rendezvous.client.drain("w0")
        rendezvous.client.poll()
    assert rendezvous.calls.count("drain") >= 3
    assert rendezvous.calls.count(("report_lost", "w1")) == 4, "until it was delivered"
    rendezvous.state = replace(rendezvous.state, started_at=200.0)
    for _ in range(4):
        rendezvous.client.poll()
    assert rendezvous.calls.count(("report_lost", "w1")) == 5, "again, since a restarted one would let it in"


def test_the_generation_that_lost_a_worker_is_that_in_which_it_was(rendezvous: FakeRendezvous) -> None:
    rendezvous.state = RendezvousStatus({}, frozenset(), ("w0", "w3"), 7, generation=5, lost_in={"w1": 3})
    rendezvous.client.refresh()
    assert [rendezvous.client.lost_in(worker) for worker in ("w0", "w1", "w2")] == [5, 3, None]


def test_a_reply_that_is_not_there_yet_is_neither_waited_for_nor_requested_twice(rendezvous: FakeRendezvous) -> None:
    rendezvous.is_slow, rendezvous.must_wait = True, False
    for _ in range(3):
        rendezvous.client.poll()
        assert not rendezvous.client.drain("w0")
    assert rendezvous.calls == ["status", "drain"]
    rendezvous.is_slow = False
    assert rendezvous.client.drain("w0")


# The client of the broker


def test_a_trial_takes_what_the_broker_allocates_within_its_limits(rendezvous: FakeRendezvous) -> None:
    broker, calls = rendezvous, rendezvous.calls
    allocation = Allocation(ResourceLease(broker, "sweep/trial", None, (1,)), 1, 4, {"CPU": 1.0})
    broker.is_slow = True
    for step in (0, 3):
        allocation.poll(1, step)
    demands = [Demand("sweep/trial", 1, 4, {"CPU": 1.0}, num_workers=1, step=step) for step in (0, 3)]
    assert calls == [demands[0], ("changed", "sweep/trial", 1), demands[1]], "it is asked once"
    broker.is_slow = False
    for broker.allocated, broker.is_down, expected in (
        (3, False, 3),
        (9, False, 4),
        (0, False, 1),
        (3, False, 3),
        (1, True, 3),
    ):
        for _ in range(2):  # the second takes the reply to the first
            allocation.poll(1, 4)
        assert (allocation.num_workers, calls[-1]) == (expected, ("changed", "sweep/trial", expected))
