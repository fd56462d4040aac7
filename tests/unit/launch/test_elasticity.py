"""Which way a run changes its workers, and what is said where that is not the one that was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.config import RunConfig
from raytrain.elastic import internals
from raytrain.elastic.restarting import RestartingTrainer, StopRelay
from raytrain.elastic.trainer import ElasticTrainer
from raytrain.errors import ConfigError
from raytrain.launch import elasticity
from raytrain.launch.elasticity import build_trainer, is_in_place, open_rendezvous
from raytrain.launch.watch import Nobody
from raytrain.worker.entry import CONNECTIONS, Work
from tests.golden import check


class Told(Nobody):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str, now: float) -> None:
        self.texts.append(text)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Ray."""
    monkeypatch.setattr(elasticity, "ray", SimpleNamespace(__version__="2.99.0"))
    monkeypatch.delattr(internals, "ReplicaGroup")
    monkeypatch.delattr(internals, "Worker")


@pytest.mark.parametrize(("setting", "in_place"), [("auto", True), ("in_place", True), ("restart", False)])
def test_with_the_ray_that_it_knows_nothing_is_said(setting: str, in_place: bool) -> None:
    viewer = Told()
    assert is_in_place(setting, viewer) == in_place
    assert viewer.texts == []


@pytest.mark.usefixtures("broken")
def test_with_another_ray_it_restarts_by_itself_with_one_warning() -> None:
    viewer = Told()
    assert not is_in_place("auto", viewer)
    (text,) = viewer.texts
    assert text.startswith("warning: each change of workers restarts all of them")
    assert "Ray 2.99.0 (there is no ReplicaGroup, and 1 more)" in text
    assert "\n" not in text


@pytest.mark.usefixtures("broken")
def test_with_another_ray_in_place_is_refused_in_four_parts() -> None:
    with pytest.raises(ConfigError) as caught:
        is_in_place("in_place", Told())
    check("errors/in_place.txt", f"{caught.value}\n")


@pytest.mark.usefixtures("broken")
def test_whoever_asks_for_restarts_is_not_warned() -> None:
    viewer = Told()
    assert not is_in_place("restart", viewer)
    assert viewer.texts == []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The actors that are asked for."""
    actors: list[tuple[Any, ...]] = []

    def pinned(kind: type, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: actors.append((kind.__name__, *arguments[:1])))

    monkeypatch.setattr(elasticity.cluster, "pinned", pinned)
    return actors


@pytest.mark.parametrize("in_place", [True, False])
def test_one_rendezvous_for_all_or_one_for_each_attempt(in_place: bool, made: list[tuple[Any, ...]]) -> None:
    rendezvous = open_rendezvous(RunConfig(workers=(2, 3)), in_place)
    assert made == ([("RendezvousActor", 2)] if in_place else [])
    assert in_place or isinstance(rendezvous, StopRelay)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_trainer_of_either_way_gets_the_work(
    in_place: bool, made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elasticity, "ray", SimpleNamespace(put=lambda order: "work"))
    order = Work(None, RunConfig(workers=(1, 2)), {}, {}, 9, {}, "", "", {}, "cpu")  # type: ignore[arg-type]
    trainer = build_trainer(order, "sink", StopRelay(), in_place, "/nowhere", lambda: True, lambda: None)
    if in_place:
        assert isinstance(trainer, ElasticTrainer)
        assert trainer.train_loop_config[CONNECTIONS].first_worker == 0
        return
    assert isinstance(trainer, RestartingTrainer)
    means = trainer._means
    connections = means.connect("rendezvous", 3)[CONNECTIONS]
    assert (connections.work, connections.rendezvous, connections.first_worker) == ("work", "rendezvous", 3)
    means.open_rendezvous(2, -1, 0)
    assert made == [("AttemptRendezvous", 2)]
