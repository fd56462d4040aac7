"""The elastic worker group without Ray: joiners, polls, the sink and the rendezvous are played by the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from raytrain.elastic import worker_group as module
from raytrain.elastic.internals import WorkerHealthCheckFailedError
from raytrain.elastic.joiner import JoinFailed
from raytrain.elastic.wiring import WIRING, Wiring
from raytrain.elastic.worker_group import ElasticWorkerGroup
from raytrain.errors import ResourceError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerLost, WorkerStarting


def status(running: bool, error: Exception | None = None) -> Any:
    """What Ray Train's poll says of a worker."""
    return SimpleNamespace(running=running, error=error)


RUNNING, FINISHED = status(True), status(False)


class Joiner:
    """Has its place and its process as soon as the scene has room for it."""

    def __init__(self, scene: Scene, serial: int) -> None:
        self.scene, self.serial, self.is_placed, self.is_gone = scene, serial, False, False
        self.placement_group = f"place {serial}"

    def place(self) -> bool:
        if self.is_placed or self.scene.room <= 0:
            return False
        self.scene.room -= 1
        self.is_placed = True
        return True

    def launch(self, train_context: dict[str, Any], train_function: Any) -> None:
        assert train_context["distributed_context"].world_rank == self.serial

    def poll(self) -> Any:
        if not self.is_placed:
            return None
        if self.serial in self.scene.stillborn:
            raise JoinFailed("its node is gone", self.scene.is_preempted)
        metadata = SimpleNamespace(node_ip="10.0.0.1", pid=100 + self.serial)
        return SimpleNamespace(actor=f"actor {self.serial}", metadata=metadata, distributed_context=None)

    def let_go(self) -> None:
        self.is_gone = True


class Scene:
    """A group of 2 to 3 workers that may lose 2 in a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, min_workers: int = 2, max_workers: int = 3) -> None:
        self.now, self.room, self.finished_steps = 100.0, max_workers, 0
        self.stillborn: set[int] = set()
        self.is_preempted = False
        self.joiners: list[Joiner] = []
        self.statuses: dict[int, Any] = {}
        self.told: list[Event] = []
        self.lost: list[str] = []
        self.killed: list[str] = []
        monkeypatch.setattr(module, "Joiner", self.make)
        monkeypatch.setattr(module, "remove_placement_group", lambda place: None)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        context = SimpleNamespace(current_actor="controller")
        monkeypatch.setattr(
            module,
            "ray",
            SimpleNamespace(
                get=lambda value: value,
                kill=self.killed.append,
                cluster_resources=lambda: {"CPU": 2.0},
                get_runtime_context=lambda: context,
            ),
        )
        rendezvous = SimpleNamespace(start=_remote(lambda worker: None), lose=_remote(self.lost.append))
        sink = SimpleNamespace(append=_remote(self.told.extend), finished_steps=_remote(lambda: self.finished_steps))
        wiring = Wiring(min_workers, max_workers, 2, 60.0, rendezvous, sink)
        run: Any = SimpleNamespace(
            run_config=SimpleNamespace(storage_context=None), train_loop_config={WIRING: wiring}, backend_config=None
        )
        group: Any = SimpleNamespace(resources_per_worker={"CPU": 1.0}, train_fn_ref=None)
        self.group = ElasticWorkerGroup(run, group, [])
        monkeypatch.setattr(self.group, "_poll_workers_and_collect_errors", self.look)
        self.group._start()

    def make(self, serial: int, resources: dict[str, float]) -> Joiner:
        self.joiners.append(Joiner(self, serial))
        return self.joiners[-1]

    def look(self, timeout: float | None) -> list[Any]:
        return [self.statuses.get(joiner.serial, RUNNING) for joiner in self.group._running]  # type: ignore[attr-defined]

    @property
    def running(self) -> list[int]:
        return [joiner.serial for joiner in self.group._running]

    def dies(self, serial: int, cause: Exception | None = None) -> None:
        self.statuses[serial] = status(False, WorkerHealthCheckFailedError("lost", cause or RayActorError()))

    def all_told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


def _remote(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=function)


def test_workers_are_asked_for_up_to_the_largest_number_and_run_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.room = 0
    assert scene.running == [0, 1, 2]
    assert [event.worker for event in scene.all_told(WorkerStarting)] == ["w0", "w1", "w2"]
    scene.group.poll_status()
    assert len(scene.joiners) == 3


def test_a_lost_worker_is_dropped_told_and_replaced_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.dies(1)
    assert not scene.group.poll_status().errors
    assert scene.running == [0, 2]
    assert scene.lost == ["w1"]
    assert scene.killed == ["actor 1"]
    assert [(event.worker, event.pid) for event in scene.all_told(WorkerLost)] == [("w1", 101)]
    scene.room = 1
    scene.group.poll_status()
    assert scene.running == [0, 2, 3]


def test_r16_an_error_of_the_users_code_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.statuses[1] = status(False, ValueError("the user's"))
    assert set(scene.group.poll_status().errors) == {1}
    assert scene.lost == []


def test_r16_too_many_losses_in_a_row_end_the_run_and_the_last_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    for serial in range(2):
        scene.dies(serial)
        scene.group.poll_status()
    scene.dies(2, RayActorError(error_msg="out of memory"))
    with pytest.raises(WorkersLostError, match=r"3 workers were lost in a row at step 0.*out of memory"):
        scene.group.poll_status()


def test_a_finished_step_in_between_makes_up_for_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.room = 10
    for serial in range(6):
        scene.dies(serial)
        scene.finished_steps += 1
        scene.group.poll_status()
        scene.group.poll_status()
    assert len(scene.running) == 3


def test_r2_preempted_workers_do_not_count_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.room = 20
    cause = ActorDiedError()
    cause._preempted = True
    for serial in range(8):
        scene.dies(serial, cause)
        scene.group.poll_status()
        scene.group.poll_status()
    assert len(scene.all_told(WorkerLost)) == 8


def test_r6_processes_that_die_before_they_run_are_failures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker that cannot start would be started for ever."""
    scene = Scene(monkeypatch)
    scene.stillborn, scene.room = set(range(3, 99)), 99
    scene.dies(0)
    scene.group.poll_status()
    scene.group.poll_status()
    with pytest.raises(WorkersLostError, match="its node is gone"):
        scene.group.poll_status()
    assert scene.lost == ["w0", "w3", "w4"]
    assert all(joiner.is_gone for joiner in scene.joiners if joiner.serial in (3, 4))


def test_r11_a_group_that_never_had_enough_workers_gives_up_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, min_workers=3)
    assert scene.running == [0, 1, 2]
    scene = Scene(monkeypatch, min_workers=4, max_workers=4)
    scene.group = ElasticWorkerGroup(scene.group._train_run_context, scene.group._worker_group_context, [])
    monkeypatch.setattr(scene.group, "_poll_workers_and_collect_errors", scene.look)
    scene.room = 2
    scene.group._start()
    scene.group.poll_status()
    assert len(scene.running) == 2
    scene.now += 6
    scene.group.poll_status()
    (waiting,) = scene.all_told(WaitingForWorkers)
    assert (waiting.have, waiting.need) == (2, 4)
    scene.now += 60
    with pytest.raises(ResourceError, match="asked for 4 CPU, the cluster has 2"):
        scene.group.poll_status()


def test_survivors_that_once_were_enough_wait_for_others_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.dies(0)
    scene.dies(1)
    scene.group.poll_status()
    for _ in range(10):
        scene.now += 60
        scene.group.poll_status()
    assert scene.running == [2]
    assert len(scene.all_told(WaitingForWorkers)) == 1


def test_nobody_is_replaced_once_a_worker_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.statuses[0] = FINISHED
    scene.dies(1)
    scene.group.poll_status()
    scene.group.poll_status()
    assert len(scene.joiners) == 3


def test_r6_a_silent_process_is_given_up_before_ray_train_would(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.group._worker_health_check_timeout_s == module.SILENT_S <= 120


def test_the_end_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.dies(1)
    scene.group.poll_status()
    scene.group.shutdown()
    assert sorted(scene.killed) == ["actor 0", "actor 1", "actor 2"]
    assert [joiner.serial for joiner in scene.joiners if not joiner.is_gone] == [1]
