"""The elastic worker group without Ray: workers, polls, the sink and the rendezvous are played by the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from raytrain.elastic import membership, worker
from raytrain.elastic import worker_group as module
from raytrain.elastic.controller_config import CONTROLLER_CONFIG, ControllerConfig
from raytrain.elastic.internals import WorkerHealthCheckFailedError
from raytrain.elastic.placement import ResourceLease
from raytrain.elastic.worker import StartFailed
from raytrain.elastic.worker_group import ElasticWorkerGroup
from raytrain.errors import PoisonRowsError, ResourceError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerDrained, WorkerDraining, WorkerLost, WorkerStarting
from raytrain.rendezvous.actor import RendezvousStatus


def status(running: bool, error: Exception | None = None) -> Any:
    """What Ray Train's poll says of a worker."""
    return SimpleNamespace(running=running, error=error)


RUNNING, FINISHED = status(True), status(False)


class FakeWorker:
    """Has its place and its process as soon as the scene has room for it."""

    def __init__(self, scene: Scene, serial: int, is_extra: bool = True, batch: int = 0) -> None:
        self.scene, self.serial, self.name, self.is_extra = scene, serial, f"w{serial}", is_extra
        self.is_placed, self.is_gone, self.batch = False, False, batch

    def try_place(self) -> bool:
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
            raise StartFailed("its node is gone", preempted=False)
        metadata = SimpleNamespace(node_ip="10.0.0.1", node_id=f"node {self.serial % 3}", pid=100 + self.serial)
        return SimpleNamespace(actor=f"actor {self.serial}", metadata=metadata, distributed_context=None)

    def release(self) -> None:
        self.scene.room += self.is_placed and bool(self.scene.broker.demands)
        self.is_gone = True


class Broker:
    """Replies with the allocation that the test sets."""

    def __init__(self) -> None:
        self.allocated, self.demands, self.left = 0, list[Any](), list[str]()
        self.request, self.leave = _remote(self.demands.append), _remote(self.left.append)
        self.changed = _remote(lambda name, known: self.allocated)


class Rendezvous:
    """Says of everybody who is to leave that it must be waited for, until the test says that it has left."""

    def __init__(self) -> None:
        self.calls, self.trains = list[tuple[str, str]](), True
        for what in ("expect", "report_lost", "drain", "save_and_stop"):
            setattr(self, what, self._recording(what))
        self.status = _remote(lambda: self.status_now)
        self.knows()

    def _recording(self, what: str) -> Any:
        return _remote(lambda worker="": self.calls.append((what, worker)) or (what == "drain" and self.trains))

    def calls_of(self, what: str) -> list[str]:
        return [worker for kind, worker in self.calls if kind == what]

    def knows(self, step: int = 0, **more: Any) -> None:
        values = {"evicted": {}, "drained": frozenset(), "members": ()} | more
        self.status_now = RendezvousStatus(step=step, **values)


class Scene:
    """A group of 2 to 3 workers that may lose 2 in a row."""

    def __init__(
        self, patch: Any, least: int = 2, most: int = 3, room: int = 3, broker: Broker | None = None, spares: int = 0
    ) -> None:
        self.now, self.room, self.broker = 100.0, room, broker or Broker()
        self.stillborn, self.workers, self.statuses = set[int](), list[FakeWorker](), dict[int, Any]()
        self.emitted, self.draining, self.rendezvous = list[Event](), dict[str, float](), Rendezvous()
        patch.setattr(module, "ElasticWorker", self.make)
        patch.setattr(module, "draining_nodes", lambda: self.draining)
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(module, "Slots", Slots)
        patch.setattr(worker, "ray", SimpleNamespace(kill=lambda actor: None))
        replies = {"get": lambda value, timeout=None: value, "wait": lambda values, timeout: (values, [])}
        patch.setattr(membership, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0}, **replies))
        writer = SimpleNamespace(append=_remote(self.emitted.extend))
        lease = ResourceLease(broker, "sweep/trial", None, tuple(range(least))) if broker else None
        config = ControllerConfig(least, most, 2, 60.0, 1800.0, 600.0, 4, self.rendezvous, writer, lease, spares)
        run_config = SimpleNamespace(storage_context=None, worker_runtime_env={"py_executable": "forked"})
        run: Any = SimpleNamespace(run_config=run_config, backend_config=None)
        run.train_loop_config = {CONTROLLER_CONFIG: config}
        group: Any = SimpleNamespace(resources_per_worker={"CPU": 1.0}, train_fn_ref=None)
        self.group = ElasticWorkerGroup(run, group, [])
        patch.setattr(self.group, "_poll_workers_and_collect_errors", self.look)
        self.group._start()

    def make(self, serial: int, resources: Any, runtime_env: Any, is_reserved: bool, timeout_s: float, batch: int) -> Any:
        assert (runtime_env, timeout_s) == ({"py_executable": "forked"}, 600.0)
        self.workers.append(FakeWorker(self, serial, not is_reserved, batch))
        return self.workers[-1]

    def poll(self, num_times: int = 1) -> Any:
        for _ in range(num_times):
            found = self.group.poll_status()
        return found

    @property
    def gone(self) -> list[int]:
        return [one.serial for one in self.workers if one.is_gone]

    def look(self, timeout: float | None) -> list[Any]:
        return [self.statuses.get(one.serial, RUNNING) for one in self.group._running]  # type: ignore[attr-defined]

    @property
    def running(self) -> list[int]:
        return [one.serial for one in self.group._running]

    def dies(self, serial: int, cause: Exception | None = None) -> None:
        self.statuses[serial] = status(False, WorkerHealthCheckFailedError("lost", cause or RayActorError()))

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.emitted if isinstance(event, kind)]


class Slots:
    """Each slot says whether it is reserved: as many as the lease has."""

    def __init__(self, resources: dict[str, float], lease: ResourceLease | None) -> None:
        self._num_reserved = len(lease.bundles) if lease else 0

    def request(self) -> bool:
        self._num_reserved -= 1
        return self._num_reserved >= 0


def _remote(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=function)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_workers_are_requested_up_to_the_maximum_and_run_when_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, room=2)
    scene.poll()
    assert (scene.running, len(scene.workers)) == ([0, 1], 3)
    scene.room = 1
    scene.poll(2)
    assert (scene.running, len(scene.workers)) == ([0, 1, 2], 3)
    assert [event.worker for event in scene.events(WorkerStarting)] == ["w0", "w1", "w2"]
    assert scene.rendezvous.calls_of("expect") == ["w0", "w1", "w2"]


def test_spares_are_requested_beside_the_most_workers_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, room=9, spares=1)
    scene.poll(2)
    assert (scene.running, scene.gone) == ([0, 1, 2, 3], [])
    scene.dies(0)
    scene.poll(2)
    assert scene.running == [1, 2, 3, 4]


# Losses


@pytest.mark.parametrize(("is_evicted", "is_gone"), [(False, True), (True, False), (True, True)])
def test_p1_r6_a_lost_or_evicted_worker_is_reported_and_replaced(scene: Scene, is_evicted: bool, is_gone: bool) -> None:
    reason = "stuck for 26 s: in loss at step 7" if is_evicted else "its process is gone"
    scene.rendezvous.knows(evicted={"w1": reason} if is_evicted else {})
    if is_gone:
        scene.dies(1, RayActorError(error_msg="its process is gone"))  # why it was killed, only a refresh shows
    else:
        scene.poll()
    assert not scene.poll().errors
    assert (scene.running, scene.rendezvous.calls_of("report_lost"), scene.gone) == ([0, 2], ["w1"], [1])
    assert [(event.worker, event.pid, event.reason) for event in scene.events(WorkerLost)] == [("w1", 101, reason)]
    scene.room = 1
    scene.poll()
    assert scene.running == [0, 2, 3]


def test_r16_an_error_of_the_users_code_is_no_loss(scene: Scene) -> None:
    scene.statuses[1] = status(False, ValueError("the user's"))
    assert set(scene.poll().errors) == {1}
    assert scene.rendezvous.calls_of("report_lost") == []


@pytest.mark.parametrize("kind", ["preempted", "draining", "with a finished step before"])
def test_r2_losses_do_not_count_that_are_preemptions_drains_or_after_progress(scene: Scene, kind: str) -> None:
    scene.room, cause = 99, ActorDiedError()
    cause._preempted = kind == "preempted"
    for serial in range(6):
        if kind == "draining":
            scene.draining = {f"node {serial % 3}": 0.0}
            scene.poll()
        if kind == "with a finished step before":
            scene.rendezvous.knows(step=serial + 1)
        scene.draining = {}
        scene.dies(serial, cause)
        scene.poll(2)
    assert (len(scene.running), len(scene.events(WorkerLost)), scene.events(WorkerDrained)) == (3, 6, [])
    assert scene.group._draining == set()


def test_r6_r16_too_many_losses_end_the_run_also_of_workers_that_cannot_start(scene: Scene) -> None:
    scene.stillborn, scene.room = set(range(3, 99)), 99
    scene.dies(0)
    scene.poll(2)
    with pytest.raises(WorkersLostError, match=r"workers were lost 3 times in a row at step 0.*its node is gone"):
        scene.poll()
    assert scene.rendezvous.calls_of("report_lost") == ["w0", "w3", "w4"]
    assert {3, 4} <= set(scene.gone)


@pytest.mark.parametrize("kind", ["of one generation", "of newcomers that were requested together"])
def test_r2_many_losses_at_one_moment_are_one_failure(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rack is gone: its workers are noticed one after the other; two failures are allowed."""
    scene = Scene(monkeypatch, most=8, room=99)
    if kind == "of one generation":
        names = [f"w{serial}" for serial in range(8)]
        scene.rendezvous.knows(step=7, generation=1, members=tuple(names), lost_in=dict.fromkeys(names, 1))
    for serial in range(6):
        scene.dies(serial)
        scene.poll()
    assert len(scene.events(WorkerLost)) == 6
    assert scene.group._budget.failures == 1


def test_r16_poison_rows_end_the_run_and_their_logical_worker_is_named(scene: Scene) -> None:
    def last_member_dies(*members: str) -> None:
        scene.rendezvous.knows(step=7, members=members)
        scene.poll()
        scene.dies(int(members[-1][1:]), RayActorError(error_msg="segmentation fault"))
        scene.poll(2)

    scene.group._budget.max_failures = scene.room = 99
    last_member_dies("w0", "w1", "w2")
    last_member_dies("w0", "w3", "w1")
    with pytest.raises(PoisonRowsError, match=r"step 7, logical worker 3: .*segmentation fault"):
        last_member_dies("w0", "w4", "w5", "w3")


@pytest.mark.parametrize("kind", ["never trained", "preempted", "evicted"])
def test_deaths_that_are_not_due_to_rows_are_no_poison(scene: Scene, kind: str) -> None:
    scene.group._budget.max_failures = scene.room = 99
    cause = ActorDiedError()
    cause._preempted = kind == "preempted"
    for serial in range(5):
        evicted = {f"w{serial}": "silent"} if kind == "evicted" else {}
        scene.rendezvous.knows(step=7, members=() if kind == "never trained" else (f"w{serial}",), evicted=evicted)
        if not evicted:
            scene.poll()
            scene.dies(serial, cause)
        scene.poll(3)
    assert len(scene.events(WorkerLost)) == 5


# Drains


def test_p2_a_worker_of_a_draining_node_is_replaced_at_once_and_not_killed(scene: Scene) -> None:
    scene.draining, scene.room = {"node 1": 1234.5}, 1
    scene.rendezvous.knows(drained=frozenset({"w1"}))
    scene.poll(5)
    assert (scene.running, len(scene.workers)) == ([0, 1, 2, 3], 4), "it trains until the others have its state, and closes"
    assert [(event.worker, event.deadline) for event in scene.events(WorkerDraining)] == [("w1", 1234.5)]
    assert (set(scene.rendezvous.calls_of("drain")), scene.gone) == ({"w1"}, [])


@pytest.mark.parametrize("kind", ["drained", "cancelled meanwhile", "did not train yet"])
def test_p2_a_drained_worker_is_neither_a_loss_nor_the_end_of_the_run(scene: Scene, kind: str) -> None:
    scene.draining, scene.rendezvous.trains = {"node 1": 0.0}, kind != "did not train yet"
    scene.poll()
    if kind == "cancelled meanwhile":
        scene.draining = {}
    scene.poll()
    if scene.rendezvous.trains:
        scene.statuses[1] = FINISHED
        scene.rendezvous.knows(drained=frozenset({"w1"}), step=4)
    assert [worker.running for worker in scene.poll().worker_statuses.values()] == [True, True]
    assert [(event.worker, event.pid) for event in scene.events(WorkerDrained)] == [("w1", 101)]
    assert (scene.running, scene.events(WorkerLost), scene.gone) == ([0, 2], [], [1])
    scene.room = 1
    scene.poll(2)
    assert scene.running == [0, 2, 3]


# Too few, and the end


def test_r11_a_group_that_never_had_enough_ends_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, least=4, most=4, room=2)
    scene.poll()
    scene.now += 6
    scene.poll()
    assert [(event.have, event.need) for event in scene.events(WaitingForWorkers)] == [(2, 4)]
    scene.now += 60
    with pytest.raises(ResourceError, match="asked for 4 CPU, the cluster has 2"):
        scene.poll()
    assert scene.rendezvous.calls_of("save_and_stop") == []


def test_r6_survivors_wait_and_save_their_state_before_the_run_fails(scene: Scene) -> None:
    scene.poll()
    scene.dies(0)
    scene.dies(1)
    scene.poll()
    scene.now += 1800
    scene.poll()
    assert (scene.running, scene.rendezvous.calls_of("save_and_stop")) == ([2], [])
    scene.now += 1
    scene.poll(3)
    assert scene.rendezvous.calls_of("save_and_stop") == [""] * 3, "a restarted rendezvous does not know"
    scene.statuses[2] = FINISHED
    with pytest.raises(ResourceError, match="there were 1 for 1801 s"):
        scene.poll()


def test_r6_a_process_may_be_silent_for_as_long_as_its_slowest_activity(scene: Scene) -> None:
    assert scene.group._worker_health_check_timeout_s > scene.group._config.slow_timeout_s


# Sharing


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A group of 1 to 3 workers that has two, one of them in a slot that is not reserved."""
    scene = Scene(monkeypatch, least=1, room=4, broker=Broker())
    assert scene.running == [0], "its own, before anything is allocated"
    scene.broker.allocated = 2
    scene.poll(3)
    assert scene.running == [0, 1]
    return scene


def test_a_surplus_worker_drains_and_the_reserved_slot_is_kept(sharing: Scene) -> None:
    sharing.rendezvous.knows(step=7)
    sharing.broker.allocated = 1
    sharing.poll(3)
    (draining,) = sharing.events(WorkerDraining)
    assert (draining.worker, draining.reason) == ("w1", "other trials need its slot")
    assert sharing.running == [0, 1], "it is waited for"
    assert sharing.broker.demands[-1] == membership.Demand("sweep/trial", 1, 3, {"CPU": 1.0}, num_workers=2, step=7)
    sharing.rendezvous.trains = False
    sharing.rendezvous.knows(step=8, drained=frozenset({"w1"}))
    sharing.statuses[1] = FINISHED
    sharing.poll(2)
    assert (sharing.running, sharing.gone, sharing.room) == ([0], [1], 3)
    assert [event.worker for event in sharing.events(WorkerDrained)] == ["w1"]
    assert not sharing.events(WorkerLost)


def test_a_surplus_worker_that_starts_is_withdrawn_at_once(sharing: Scene) -> None:
    sharing.room, sharing.broker.allocated = 0, 3
    sharing.poll(3)
    assert [one.serial for one in sharing.workers] == [0, 1, 2]
    sharing.broker.allocated = 2
    sharing.poll(3)
    assert (sharing.running, sharing.gone) == ([0, 1], [2])
    assert sharing.rendezvous.calls_of("drain") == ["w2"]
    assert not sharing.events(WorkerDraining)


def test_nobody_is_drained_or_replaced_once_a_worker_has_finished(sharing: Scene) -> None:
    sharing.statuses[0] = FINISHED
    for sharing.broker.allocated in (1, 3):
        sharing.poll(3)
        assert (sharing.events(WorkerDraining), len(sharing.workers)) == ([], 2)


def test_shutdown_gives_everything_back_and_may_be_repeated(sharing: Scene) -> None:
    sharing.room, sharing.broker.allocated = 0, 3
    sharing.poll(2)
    sharing.group.shutdown()
    assert sharing.gone == [0, 1, 2], "also what was only requested"
    sharing.group.release()
    assert (sharing.running, set(sharing.broker.left)) == ([], {"sweep/trial"})
