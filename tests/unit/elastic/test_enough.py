"""Too few workers: told after a while, ended after a longer one, and those that are left save their state first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.elastic import enough as module
from raytrain.elastic.capacity import TELL_AFTER_S
from raytrain.elastic.enough import Enough
from raytrain.elastic.wiring import Wiring
from raytrain.errors import ResourceError
from raytrain.events.kinds import Event, WaitingForWorkers
from tests.golden import check

START_S, WAIT_S = 60.0, 1800.0


class Scene:
    """A run of at least 2 workers on a cluster with one CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.told, self.num_asked_to_save = 100.0, list[Event](), 0
        monkeypatch.setattr(module, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 1.0}))
        liaison: Any = SimpleNamespace(tell_end_of_patience=self._ask_to_save)
        wiring = Wiring(2, 4, 3, START_S, WAIT_S, 600.0, 4, None, None)
        self.enough = Enough(wiring, {"CPU": 1.0}, liaison, self.told.append)

    def _ask_to_save(self) -> None:
        self.num_asked_to_save += 1

    def look(self, num_running: int, num_placed: int | None = None, after_s: float = 0.0, is_over: bool = False) -> None:
        self.now += after_s
        self.enough.look(num_running, num_running if num_placed is None else num_placed, is_over, self.now)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_enough_workers_or_enough_that_start_are_nothing_to_speak_of(scene: Scene) -> None:
    for num_running, num_placed in ((0, 2), (1, 2), (2, 2), (3, 4)):
        scene.look(num_running, num_placed, after_s=WAIT_S + 1)
    assert (scene.told, scene.num_asked_to_save) == ([], 0)


def test_that_there_are_too_few_is_told_once_with_what_is_missing(scene: Scene) -> None:
    for after_s in (0.0, TELL_AFTER_S, 1.0, 10.0):
        scene.look(0, 1, after_s=after_s)
    assert scene.told == [WaitingForWorkers(have=1, need=2, reason="asked for 2 CPU, the cluster has 1")]


def test_r11_a_run_that_never_had_enough_ends_at_once_since_there_is_nothing_to_save(scene: Scene) -> None:
    scene.look(0, 1)
    with pytest.raises(ResourceError) as refused:
        scene.look(0, 1, after_s=START_S + 1)
    check("errors/too_few_workers.txt", f"{refused.value}\n")
    assert scene.num_asked_to_save == 0


def test_r6_survivors_are_asked_to_save_again_and_again_and_the_run_ends_when_they_have(scene: Scene) -> None:
    scene.look(2)
    scene.look(1)
    scene.look(1, after_s=START_S + 1)
    assert scene.num_asked_to_save == 0, "they hold the state, and wait longer"
    scene.look(1, after_s=WAIT_S)
    scene.look(1, after_s=1.0)
    assert scene.num_asked_to_save == 2, "a rendezvous that was started anew does not know"
    with pytest.raises(ResourceError, match=r"there were 1 for 1861 s"):
        scene.look(1, is_over=True)


def test_a_run_that_gave_up_stays_so_though_others_come(scene: Scene) -> None:
    scene.look(2)
    scene.look(1)
    scene.look(1, after_s=WAIT_S + 1)
    scene.look(3)
    assert scene.num_asked_to_save == 2
    with pytest.raises(ResourceError):
        scene.look(0, is_over=True)


def test_where_all_that_were_left_have_ended_the_end_of_patience_is_the_end(scene: Scene) -> None:
    scene.look(2)
    scene.look(0)
    with pytest.raises(ResourceError):
        scene.look(0, after_s=WAIT_S + 1, is_over=True)
    assert scene.num_asked_to_save == 0
