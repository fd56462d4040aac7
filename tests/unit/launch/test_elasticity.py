"""Which elasticity a run uses, and what is reported if it is not the requested one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.config import RunConfig
from raytrain.elastic import internals
from raytrain.elastic.restart import RestartTrainer, StopRelay
from raytrain.elastic.trainer import ElasticTrainer
from raytrain.errors import ConfigError
from raytrain.launch import elasticity
from raytrain.launch.elasticity import build_trainer, is_in_place, open_rendezvous
from raytrain.launch.monitor import NullViewer
from raytrain.worker.context import RunSpec
from raytrain.worker.entry import CONNECTIONS
from tests.golden import check


class SeenTexts(NullViewer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def status(self, text: str, now: float) -> None:
        self.texts.append(text)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Ray."""
    monkeypatch.setattr(elasticity, "ray", SimpleNamespace(__version__="2.99.0"))
    monkeypatch.delattr(internals, "ReplicaGroup")
    monkeypatch.delattr(internals, "Worker")


@pytest.mark.parametrize(("setting", "in_place"), [("auto", True), ("in_place", True), ("restart", False)])
def test_nothing_is_reported_with_a_supported_ray(setting: Any, in_place: bool) -> None:
    viewer = SeenTexts()
    assert is_in_place(RunConfig(elasticity=setting), viewer) == in_place
    assert viewer.texts == []


@pytest.mark.usefixtures("broken")
def test_auto_falls_back_to_restart_mode_with_one_warning() -> None:
    viewer = SeenTexts()
    assert not is_in_place(RunConfig(), viewer)
    (text,) = viewer.texts
    assert text.startswith("warning: each change of workers restarts all of them")
    assert "Ray 2.99.0 (ReplicaGroup does not exist, and 1 more)" in text
    assert "\n" not in text


@pytest.mark.usefixtures("broken")
def test_in_place_is_refused_with_an_unsupported_ray() -> None:
    with pytest.raises(ConfigError) as caught:
        is_in_place(RunConfig(elasticity="in_place"), SeenTexts())
    check("errors/in_place.txt", f"{caught.value}\n")


@pytest.mark.usefixtures("broken")
def test_restart_mode_is_not_warned_about() -> None:
    viewer = SeenTexts()
    assert not is_in_place(RunConfig(elasticity="restart"), viewer)
    assert viewer.texts == []


def test_restart_mode_refuses_spares() -> None:
    assert is_in_place(RunConfig(spares=1), SeenTexts())
    with pytest.raises(ConfigError) as caught:
        is_in_place(RunConfig(elasticity="restart", spares=1), SeenTexts())
    check("errors/restart_spares.txt", f"{caught.value}\n")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The actors that are asked for."""
    actors: list[tuple[Any, ...]] = []

    def pinned(kind: type, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: actors.append((kind.__name__, *arguments[:1])))

    monkeypatch.setattr(elasticity.cluster, "pinned", pinned)
    return actors


@pytest.mark.parametrize("in_place", [True, False])
def test_in_place_has_one_rendezvous_and_restart_mode_one_per_attempt(in_place: bool, made: list[tuple[Any, ...]]) -> None:
    rendezvous = open_rendezvous(RunConfig(workers=(2, 3)), in_place)
    assert made == ([("RendezvousActor", 2)] if in_place else [])
    assert in_place or isinstance(rendezvous, StopRelay)


@pytest.mark.parametrize("in_place", [True, False])
def test_both_trainers_get_the_spec(in_place: bool, made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        elasticity,
        "ray",
        SimpleNamespace(put=lambda spec: "spec", get_runtime_context=lambda: SimpleNamespace(runtime_env={})),
    )
    spec = RunSpec(None, RunConfig(workers=(1, 2)), {}, {}, 9, {}, "cpu")  # type: ignore[arg-type]
    trainer = build_trainer(spec, "writer", StopRelay(), in_place, "/nowhere", lambda: True, lambda: None)
    if in_place:
        assert isinstance(trainer, ElasticTrainer)
        assert trainer.train_loop_config[CONNECTIONS].first_worker == 0
        assert "fork_server" in trainer.run_config.worker_runtime_env["py_executable"]
        return
    assert isinstance(trainer, RestartTrainer)
    factory = trainer._factory
    connections = factory.connect("rendezvous", 3)[CONNECTIONS]
    assert (connections.spec, connections.rendezvous, connections.first_worker) == ("spec", "rendezvous", 3)
    factory.open_rendezvous(2, -1, 0)
    assert made == [("FitActor",), ("AttemptRendezvous", 2)]
    assert "fork_server" in factory.run_config.worker_runtime_env["py_executable"]
