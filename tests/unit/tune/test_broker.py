"""The broker: what it allocates from Ray's tables and the trials' demands, when it replies, and when it exits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.elastic.membership import Demand
from raytrain.elastic.placement import extra_prefix
from raytrain.tune import broker as module
from raytrain.tune.broker import RANKS_HOLD_S, SILENCE_LIMIT_S, WARMUP_S, Broker, SweepAllocation, broker_of

A, B = "sweep/trial-1", "sweep/trial-11"


class Scene:
    """A cluster of placement groups, and two trials of one to four workers."""

    def __init__(self, policy: str = "fair", max_workers: int | None = None) -> None:
        self.state = SweepAllocation(policy, "max", max_workers)
        self.groups: dict[str, dict[str, Any]] = {}
        self.now = 100.0
        self.demand(A, B)

    def demand(self, *names: str) -> None:
        self.state.demands |= {name: (Demand(name, 1, 4, {"CPU": 1.0}), self.now) for name in names}

    def group(self, state: str, trial: str = "", num_workers: int = 1) -> None:
        """A placement group, of a trial's extra workers if one is given."""
        name = f"{extra_prefix(trial)}{len(self.groups)}" if trial else ""
        bundles = {number: {"CPU": 1.0} for number in range(num_workers)}
        self.groups[f"id {len(self.groups)}"] = {"name": name, "state": state, "bundles": bundles}

    def update(self, num_free: int) -> tuple[int, ...]:
        self.state.update(self.groups, {"CPU": float(num_free)}, self.now)
        return tuple(self.state.workers.get(name, 0) for name in (A, B))


def test_free_room_and_extra_workers_are_allocated() -> None:
    scene = Scene()
    assert scene.update(3) == (3, 2)
    for state, trial in (("CREATED", A), ("CREATED", B), ("REMOVED", B)):
        scene.group(state, trial)
    assert scene.update(0) == (2, 2)


@pytest.mark.parametrize(
    ("state", "trial", "num_workers", "expected"),
    [
        ("PENDING", "", 2, (1, 1)),
        ("RESCHEDULING", "", 1, (2, 1)),  # it lost its node
        ("PENDING", A, 1, (2, 2)),  # extra workers of a trial take nothing from others
        ("PENDING", "", 9, (2, 2)),  # no room would help it
    ],
)
def test_a_pending_group_takes_back_extra_workers(state: str, trial: str, num_workers: int, expected: Any) -> None:
    scene = Scene()
    scene.group("CREATED", A)
    scene.group("CREATED", B)
    scene.group(state, trial, num_workers)
    assert scene.update(0) == expected


def test_a_restarted_broker_leaves_extra_workers_where_they_are() -> None:
    scene = Scene()
    scene.group("CREATED", B)
    assert scene.update(0) == (1, 2)


def test_an_update_returns_whether_the_allocation_changed() -> None:
    scene = Scene()
    updates = [scene.state.update({}, {"CPU": float(num_free)}, scene.now) for num_free in (1, 1, 2)]
    assert updates == [True, False, True]
    ended = [scene.state.update({}, {}, scene.now + SILENCE_LIMIT_S) for _ in range(2)]
    assert (ended, scene.state.workers) == ([True, False], {})


def test_a_silent_trial_has_ended_and_others_get_its_workers() -> None:
    scene = Scene()
    scene.update(2)
    scene.now += SILENCE_LIMIT_S
    scene.demand(A)
    assert scene.update(2) == (3, 0)


@pytest.mark.parametrize(("max_workers", "expected"), [(3, 3), (1, 2)])
def test_max_workers_limits_all_but_the_smallest_groups(max_workers: int, expected: int) -> None:
    assert sum(Scene(max_workers=max_workers).update(8)) == expected


def test_workers_follow_the_ranks_by_policy_best_but_not_at_each_report() -> None:
    scene, fair = Scene("best"), Scene("fair")
    fair.state.curves = scene.state.curves = {A: {10: 0.1}, B: {10: 0.9}}
    assert (scene.update(3), fair.update(3)) == ((1, 4), (3, 2))
    scene.state.curves[A][10] = 1.0
    assert scene.update(3) == (1, 4)
    scene.now += RANKS_HOLD_S
    scene.demand(A, B)
    assert scene.update(3) == (4, 1)


# The actor


class Exited(Exception):
    """What `exit_actor` raises in the caller."""


class Cluster:
    """A cluster with room for so many workers beyond the smallest groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_free, self.groups = 0, dict[str, Any]()
        self.exits: list[bool] = []
        ray = SimpleNamespace(available_resources=lambda: {"CPU": float(self.num_free)})
        ray.actor = SimpleNamespace(exit_actor=self._exit)
        monkeypatch.setattr(module, "ray", ray)
        monkeypatch.setattr(module, "placement_group_table", lambda: self.groups)

    def _exit(self) -> None:
        self.exits.append(True)
        raise Exited


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def unpolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker updates only when the test does."""

    async def begin(self: Broker) -> None:
        pass

    monkeypatch.setattr(Broker, "begin", begin)


def demand(name: str = A) -> Demand:
    return Demand(name, 1, 4, {"CPU": 1.0}, num_workers=1)


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition never held")


@pytest.mark.usefixtures("unpolled")
def test_a_trial_hears_of_a_change_once_there_is_one(cluster: Cluster) -> None:
    async def story() -> None:
        broker = Broker("fair", "min")
        call = asyncio.create_task(broker.changed(A, 1))
        await broker.request(demand())
        broker._update(broker._started + WARMUP_S)
        await asyncio.sleep(0.01)
        assert not call.done(), "it knows this number"
        cluster.num_free = 2
        broker._update(broker._started + WARMUP_S)
        assert await asyncio.wait_for(call, 5) == 3
        assert await asyncio.wait_for(broker.changed(A, 1), 5) == 3, "at once, if it knows an older number"

    asyncio.run(story())


@pytest.mark.usefixtures("unpolled")
def test_it_collects_demands_and_values_before_it_allocates(cluster: Cluster) -> None:
    async def story() -> None:
        broker, cluster.num_free = Broker("best", "min"), 2
        for name, value in ((A, 0.9), (B, 0.1)):
            await broker.request(demand(name))
            await broker.report(name, 10, value)
        assert await broker.demands() == {A: demand(), B: demand(B)}
        broker._update(broker._started + WARMUP_S - 0.1)
        assert broker._state.workers == {}, "the demand of another trial may be on its way"
        broker._update(broker._started + WARMUP_S)
        assert broker._state.workers == {A: 1, B: 3}
        for _ in range(2):
            await broker.leave(B)
        broker._update(broker._started + WARMUP_S)
        assert (broker._state.workers, list(await broker.demands())) == ({A: 3}, [A])

    asyncio.run(story())


def test_it_exits_when_no_trial_reports(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "IDLE_LIMIT_S", 0.02)

    async def story() -> None:
        broker = Broker("fair", "min")
        await broker.begin()
        await until(lambda: cluster.exits)
        assert broker._poller is not None
        assert isinstance(broker._poller.exception(), Exited)

    asyncio.run(story())


def test_a_poll_that_failed_is_repeated_at_the_next_demand(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "WARMUP_S", 0.0)
    cluster.groups, cluster.num_free = {"damaged": {}}, 1

    async def story() -> None:
        broker = Broker("fair", "min")
        await broker.request(demand())
        await until(lambda: broker._poller is not None and broker._poller.done())
        assert broker._poller is not None
        assert isinstance(broker._poller.exception(), KeyError)
        cluster.groups.clear()
        await broker.request(demand())
        await until(lambda: broker._state.workers == {A: 2})
        broker._poller.cancel()

    asyncio.run(story())


def test_the_trials_of_a_sweep_share_one_detached_broker_that_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pinned(kind: type, **options: Any) -> Any:
        handle = SimpleNamespace(begin=SimpleNamespace(remote=lambda: calls.append("begin")))
        return SimpleNamespace(remote=lambda *arguments: (calls.append((kind, options, arguments)), handle)[1])

    monkeypatch.setattr(module, "pinned", pinned)
    broker_of("digits", "best", "max", 8)
    options = {"name": "raytrain-broker/digits", "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    assert calls == [(Broker, {**options, "max_concurrency": 10_000}, ("best", "max", 8)), "begin"]
