"""The broker: answers when something has changed, listens before it deals, and ends when nobody is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.elastic.quota import Claim
from raytrain.tune import broker as module
from raytrain.tune.broker import LISTEN_FIRST_S, Broker, broker_of

NAME, OTHER = "sweep/trial-0001", "sweep/trial-0002"


class Exited(Exception):
    """What `exit_actor` does to the one who calls it."""


class Cluster:
    """A cluster with room for so many workers beyond those that trials have for themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_free, self.num_exits = 0, 0
        fake = SimpleNamespace(available_resources=lambda: {"CPU": float(self.num_free)})
        fake.actor = SimpleNamespace(exit_actor=self._exit)
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "placement_group_table", dict)

    def _exit(self) -> None:
        self.num_exits += 1
        raise Exited


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def claim(name: str = NAME) -> Claim:
    return Claim(name, 1, 4, {"CPU": 1.0}, num_workers=1)


async def soon(condition: Any) -> None:
    """Lets others run until it is so."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it has not come to pass")


def listened(broker: Broker) -> float:
    """A time at which the broker deals."""
    return broker._last_told + LISTEN_FIRST_S


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker looks only when the test does."""

    async def begin(self: Broker) -> None:
        pass

    monkeypatch.setattr(Broker, "begin", begin)


@pytest.mark.usefixtures("still")
def test_a_trial_hears_of_its_workers_when_they_change_and_not_before(cluster: Cluster) -> None:
    async def story() -> None:
        broker = Broker("fair", "min")
        await broker.hold(claim())
        asked = asyncio.create_task(broker.changed(NAME, 1))
        await asyncio.sleep(0)
        broker._look(listened(broker))
        await asyncio.sleep(0.01)
        assert not asked.done(), "it has what it knows"
        cluster.num_free = 2
        broker._look(listened(broker))
        assert await asyncio.wait_for(asked, 5) == 3
        assert await asyncio.wait_for(broker.changed(NAME, 1), 5) == 3, "at once, for one who knows an older number"

    asyncio.run(story())


@pytest.mark.usefixtures("still")
def test_one_who_asks_before_it_is_known_waits_for_its_first_number(cluster: Cluster) -> None:
    async def story() -> None:
        broker = Broker("fair", "min")
        asked = asyncio.create_task(broker.changed(NAME, 1))
        await asyncio.sleep(0)
        cluster.num_free = 1
        await broker.hold(claim())
        broker._look(listened(broker))
        assert await asyncio.wait_for(asked, 5) == 2

    asyncio.run(story())


@pytest.mark.usefixtures("still")
def test_a_broker_that_was_just_started_listens_before_it_deals(cluster: Cluster) -> None:
    async def story() -> None:
        broker = Broker("fair", "min")
        cluster.num_free = 3
        await broker.hold(claim())
        broker._look(broker._born + LISTEN_FIRST_S - 0.1)
        assert broker._table.quotas == {}, "another trial may be about to tell of itself"
        broker._look(broker._born + LISTEN_FIRST_S)
        assert broker._table.quotas == {NAME: 4}

    asyncio.run(story())


@pytest.mark.usefixtures("still")
def test_what_one_who_leaves_had_goes_to_the_others(cluster: Cluster) -> None:
    async def story() -> None:
        broker = Broker("fair", "min")
        cluster.num_free = 2
        await broker.hold(claim())
        await broker.hold(claim(OTHER))
        assert await broker.claims() == {NAME: claim(), OTHER: claim(OTHER)}
        broker._look(listened(broker))
        assert broker._table.quotas == {NAME: 2, OTHER: 2}
        await broker.leave(OTHER)
        await broker.leave(OTHER)
        broker._look(listened(broker))
        assert broker._table.quotas == {NAME: 3}
        assert list(await broker.claims()) == [NAME]

    asyncio.run(story())


@pytest.mark.usefixtures("still")
def test_the_values_that_trials_tell_rank_them(cluster: Cluster) -> None:
    async def story() -> None:
        broker = Broker("best", "min")
        cluster.num_free = 2
        for name, value in ((NAME, 0.9), (OTHER, 0.1)):
            await broker.hold(claim(name))
            await broker.tell(name, 10, value)
        broker._look(listened(broker))
        assert broker._table.quotas == {NAME: 1, OTHER: 3}

    asyncio.run(story())


def test_it_ends_by_itself_when_nobody_tells_it_anything(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(module, "ALONE_S", 0.02)

    async def story() -> None:
        broker = Broker("fair", "min")
        await broker.begin()
        await soon(lambda: cluster.num_exits)
        assert isinstance(broker._keeper.exception(), Exited) if broker._keeper else False

    asyncio.run(story())


def test_a_look_that_went_wrong_is_not_the_last_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(module, "LISTEN_FIRST_S", 0.0)
    table: Any = {"one": {}}
    monkeypatch.setattr(module, "placement_group_table", lambda: table)

    async def story() -> None:
        broker = Broker("fair", "min")
        await broker.hold(claim())
        await soon(lambda: broker._keeper is not None and broker._keeper.done())
        assert isinstance(broker._keeper.exception() if broker._keeper else None, KeyError)
        table.clear()
        cluster.num_free = 1
        await broker.hold(claim())
        await soon(lambda: broker._table.quotas == {NAME: 2})
        if broker._keeper:
            broker._keeper.cancel()

    asyncio.run(story())


def test_all_trials_of_a_sweep_share_one_broker_which_belongs_to_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    begun: list[bool] = []

    class Remote:
        def options(self, **options: Any) -> Remote:
            asked.update(options)
            return self

        def remote(self, *arguments: Any) -> Any:
            asked["arguments"] = arguments
            return SimpleNamespace(begin=SimpleNamespace(remote=lambda: begun.append(True)))

    def remote(**options: Any) -> Any:
        asked.update(options)
        return lambda kind: Remote()

    fake = SimpleNamespace(remote=remote, _raylet=SimpleNamespace(RAY_NODE_ID_KEY="node"))
    fake.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "this node")
    monkeypatch.setattr(module, "ray", fake)
    broker_of("digits", "best", "max", 8)
    assert asked["arguments"] == ("best", "max", 8)
    assert (asked["name"], asked["lifetime"], asked["get_if_exists"]) == ("raytrain-broker/digits", "detached", True)
    assert (asked["max_restarts"], asked["num_cpus"], asked["label_selector"]) == (-1, 0, {"node": "this node"})
    assert begun == [True], "it ends even if no trial ever tells it anything"
