"""The elastic worker group without Ray: joiners, polls, the sink and the rendezvous are played by the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from raytrain.elastic import enough, liaison, lone_workers, quota
from raytrain.elastic import worker_group as module
from raytrain.elastic.internals import WorkerHealthCheckFailedError
from raytrain.elastic.joiner import JoinFailed
from raytrain.elastic.places import Share
from raytrain.elastic.wiring import WIRING, Wiring
from raytrain.elastic.worker_group import ElasticWorkerGroup
from raytrain.errors import DeadlyRowsError, ResourceError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerLeaving, WorkerLeft, WorkerLost, WorkerStarting
from raytrain.rendezvous.actor import Survey

NUM_LOGICAL = 4


def status(running: bool, error: Exception | None = None) -> Any:
    """What Ray Train's poll says of a worker."""
    return SimpleNamespace(running=running, error=error)


RUNNING, FINISHED = status(True), status(False)


class Joiner:
    """Has its place and its process as soon as the scene has room for it."""

    def __init__(self, scene: Scene, serial: int, is_extra: bool = True) -> None:
        self.scene, self.serial, self.is_placed, self.is_gone = scene, serial, False, False
        self.is_extra = is_extra
        self.name = f"w{serial}"

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
        metadata = SimpleNamespace(node_ip="10.0.0.1", node_id=f"node {self.serial % 3}", pid=100 + self.serial)
        return SimpleNamespace(actor=f"actor {self.serial}", metadata=metadata, distributed_context=None)

    def let_go(self) -> None:
        self.scene.room += self.is_placed and self.scene.is_shared
        self.is_gone = True


class Broker:
    """Answers what the test has dealt."""

    def __init__(self) -> None:
        self.dealt = 0
        self.held: list[Any] = []
        self.has_left = False
        self.hold, self.changed = _remote(self.held.append), _remote(lambda name, known: self.dealt)
        self.leave = _remote(self._leave)

    def _leave(self, name: str) -> None:
        assert name == "sweep/trial"
        self.has_left = True


class Rendezvous:
    """Says of everybody who is to leave that it must be waited for, until the test says that it has left."""

    def __init__(self) -> None:
        self.survey_now = Survey({}, frozenset(), (), 0)
        self.told: list[tuple[str, str]] = []
        self.trains = True
        self.start, self.lose = _remote(self._noting("start")), _remote(self._noting("lose"))
        self.leave, self.give_up = _remote(self._leave), _remote(lambda: self.told.append(("give_up", "")))
        self.survey = _remote(lambda: self.survey_now)

    def _noting(self, what: str) -> Callable[[str], None]:
        return lambda worker: self.told.append((what, worker))

    def _leave(self, worker: str) -> bool:
        self.told.append(("leave", worker))
        return self.trains

    def all_told(self, what: str) -> list[str]:
        return [worker for kind, worker in self.told if kind == what]

    def knows(self, step: int = 0, **more: Any) -> None:
        values = {"given_up": {}, "left": frozenset(), "members": ()} | more
        self.survey_now = Survey(step=step, **values)


class Scene:
    """A group of 2 to 3 workers that may lose 2 in a row."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        min_workers: int = 2,
        max_workers: int = 3,
        room: int | None = None,
        broker: Broker | None = None,
    ) -> None:
        self.now, self.room = 100.0, max_workers if room is None else room
        self.stillborn: set[int] = set()
        self.is_preempted = False
        self.is_shared = broker is not None
        """Whether what is given back can be had again at once."""
        self.joiners: list[Joiner] = []
        self.statuses: dict[int, Any] = {}
        self.told: list[Event] = []
        self.draining: dict[str, float] = {}
        self.rendezvous = Rendezvous()
        monkeypatch.setattr(module, "Joiner", self.make)
        monkeypatch.setattr(module, "draining_nodes", lambda: self.draining)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(enough, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0}))
        monkeypatch.setattr(module, "Places", Places)
        monkeypatch.setattr(lone_workers, "ray", SimpleNamespace(kill=lambda actor: None))
        fake = SimpleNamespace(get=lambda value, timeout=None: value, wait=lambda values, timeout: (values, []))
        monkeypatch.setattr(liaison, "ray", fake)
        monkeypatch.setattr(quota, "ray", fake)
        sink = SimpleNamespace(append=_remote(self.told.extend))
        share = Share(broker, "sweep/trial", None, tuple(range(min_workers))) if broker else None
        wiring = Wiring(min_workers, max_workers, 2, 60.0, 1800.0, 600.0, NUM_LOGICAL, self.rendezvous, sink, share)
        run: Any = SimpleNamespace(
            run_config=SimpleNamespace(storage_context=None), train_loop_config={WIRING: wiring}, backend_config=None
        )
        group: Any = SimpleNamespace(resources_per_worker={"CPU": 1.0}, train_fn_ref=None)
        self.group = ElasticWorkerGroup(run, group, [])
        monkeypatch.setattr(self.group, "_poll_workers_and_collect_errors", self.look)
        self.group._start()

    def make(self, serial: int, resources: dict[str, float], is_reserved: bool, limit_s: float) -> Joiner:
        assert limit_s == 600.0
        self.joiners.append(Joiner(self, serial, is_extra=not is_reserved))
        return self.joiners[-1]

    def poll(self, num_times: int = 1) -> Any:
        for _ in range(num_times):
            found = self.group.poll_status()
        return found

    @property
    def gone(self) -> list[int]:
        return [joiner.serial for joiner in self.joiners if joiner.is_gone]

    def look(self, timeout: float | None) -> list[Any]:
        return [self.statuses.get(joiner.serial, RUNNING) for joiner in self.group._running]  # type: ignore[attr-defined]

    @property
    def running(self) -> list[int]:
        return [joiner.serial for joiner in self.group._running]

    def dies(self, serial: int, cause: Exception | None = None) -> None:
        self.statuses[serial] = status(False, WorkerHealthCheckFailedError("lost", cause or RayActorError()))

    def all_told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


class Places:
    """Says of each place whether it is reserved: as many as the share has, and none twice."""

    def __init__(self, resources: dict[str, float], share: Share | None) -> None:
        self._num_reserved = len(share.bundles) if share else 0

    def take(self) -> bool:
        self._num_reserved -= 1
        return self._num_reserved >= 0


def _remote(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=function)


# Coming


def test_workers_are_asked_for_up_to_the_largest_number_and_run_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, room=2)
    assert scene.running == [0, 1]
    scene.poll()
    assert len(scene.joiners) == 3
    scene.room = 1
    scene.poll()
    assert scene.running == [0, 1, 2]
    assert [event.worker for event in scene.all_told(WorkerStarting)] == ["w0", "w1", "w2"]
    assert scene.rendezvous.all_told("start") == ["w0", "w1", "w2"]
    scene.poll()
    assert len(scene.joiners) == 3


# Losses


def test_a_lost_worker_is_dropped_told_and_replaced_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.dies(1)
    assert not scene.poll().errors
    assert scene.running == [0, 2]
    assert scene.rendezvous.all_told("lose") == ["w1"]
    assert scene.gone == [1]
    assert [(event.worker, event.pid) for event in scene.all_told(WorkerLost)] == [("w1", 101)]
    scene.room = 1
    scene.poll()
    assert scene.running == [0, 2, 3]


def test_r6_a_worker_that_was_given_up_is_dropped_with_the_reason_though_its_process_may_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.rendezvous.knows(given_up={"w1": "stuck for 26 s: in loss at step 7"})
    scene.poll(2)
    assert scene.running == [0, 2]
    assert scene.gone == [1]
    assert [event.reason for event in scene.all_told(WorkerLost)] == ["stuck for 26 s: in loss at step 7"]


def test_r16_an_error_of_the_users_code_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.statuses[1] = status(False, ValueError("the user's"))
    assert set(scene.poll().errors) == {1}
    assert scene.rendezvous.all_told("lose") == []


def test_r16_too_many_losses_in_a_row_end_the_run_and_the_last_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    for serial in range(2):
        scene.dies(serial)
        scene.poll()
    scene.dies(2, RayActorError(error_msg="out of memory"))
    with pytest.raises(WorkersLostError, match=r"3 workers were lost in a row at step 0.*out of memory"):
        scene.poll()


def test_a_finished_step_in_between_makes_up_for_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of which only a survey of this moment knows."""
    scene = Scene(monkeypatch)
    scene.room = 10
    for serial in range(6):
        scene.rendezvous.knows(step=serial + 1)
        scene.dies(serial)
        scene.poll(2)
    assert len(scene.running) == 3


def test_r2_preempted_workers_do_not_count_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.room = 20
    cause = ActorDiedError()
    cause._preempted = True
    for serial in range(8):
        scene.dies(serial, cause)
        scene.poll(2)
    assert len(scene.all_told(WorkerLost)) == 8


def test_r6_processes_that_die_before_they_run_are_failures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker that cannot start would be started for ever."""
    scene = Scene(monkeypatch)
    scene.stillborn, scene.room = set(range(3, 99)), 99
    scene.dies(0)
    scene.poll(2)
    with pytest.raises(WorkersLostError, match="its node is gone"):
        scene.poll()
    assert scene.rendezvous.all_told("lose") == ["w0", "w3", "w4"]
    assert {3, 4} <= set(scene.gone)


def dies_with_the_same_rows(scene: Scene, serial: int, members: tuple[str, ...]) -> None:
    """The member that holds the last quarter of the rows dies in step 7."""
    scene.rendezvous.knows(step=7, members=members)
    scene.poll()
    scene.dies(serial, RayActorError(error_msg="segmentation fault"))
    scene.poll(2)


def test_r16_rows_that_kill_each_worker_that_gets_them_end_the_run_and_their_share_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.group._budget.max_failures = 99
    scene.room = 99
    dies_with_the_same_rows(scene, 2, ("w0", "w1", "w2"))
    dies_with_the_same_rows(scene, 1, ("w0", "w3", "w1"))
    with pytest.raises(DeadlyRowsError, match=r"step 7, with the share of logical worker 3: .*segmentation fault"):
        dies_with_the_same_rows(scene, 3, ("w0", "w4", "w5", "w3"))


@pytest.mark.parametrize("kind", ["never trained", "preempted", "given up"])
def test_deaths_that_have_nothing_to_do_with_rows_blame_none(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    scene = Scene(monkeypatch)
    scene.group._budget.max_failures = 99
    scene.room = 99
    cause = ActorDiedError()
    cause._preempted = kind == "preempted"
    for serial in range(5):
        given_up = {f"w{serial}": "silent"} if kind == "given up" else {}
        members = () if kind == "never trained" else (f"w{serial}",)
        scene.rendezvous.knows(step=7, members=members, given_up=given_up)
        if kind != "given up":
            scene.poll()
            scene.dies(serial, cause)
        scene.poll(3)
    assert len(scene.all_told(WorkerLost)) == 5


# Drains


def test_p2_the_worker_of_a_draining_node_is_asked_to_leave_and_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.draining = {"node 1": 1234.5}
    scene.room = 1
    scene.poll(2)
    assert scene.running == [0, 1, 2, 3], "it trains until the others have its state"
    assert [(event.worker, event.deadline) for event in scene.all_told(WorkerLeaving)] == [("w1", 1234.5)]
    assert set(scene.rendezvous.all_told("leave")) == {"w1"}
    scene.poll(3)
    assert len(scene.joiners) == 4
    assert len(scene.all_told(WorkerLeaving)) == 1


def test_p2_one_that_has_left_is_dropped_and_is_neither_a_loss_nor_the_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.draining = {"node 1": 0.0}
    scene.poll(2)
    scene.statuses[1] = FINISHED
    scene.rendezvous.knows(left=frozenset({"w1"}), step=4)
    found = scene.poll()
    assert [worker.running for worker in found.worker_statuses.values()] == [True, True]
    assert scene.running == [0, 2]
    assert [(event.worker, event.pid) for event in scene.all_told(WorkerLeft)] == [("w1", 101)]
    assert (scene.all_told(WorkerLost), scene.gone) == ([], [1])
    scene.room = 1
    scene.poll(2)
    assert scene.running == [0, 2, 3]


def test_p2_one_that_has_left_but_is_still_closing_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.draining = {"node 1": 0.0}
    scene.rendezvous.knows(left=frozenset({"w1"}))
    scene.poll(5)
    assert scene.gone == []


def test_a_worker_that_has_no_part_in_the_run_yet_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.draining = {"node 1": 0.0}
    scene.rendezvous.trains = False
    scene.poll(2)
    assert scene.running == [0, 2]
    assert scene.gone == [1]
    assert [event.worker for event in scene.all_told(WorkerLeft)] == ["w1"]


def test_r2_one_that_dies_while_it_leaves_is_lost_but_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.room = 99
    for serial in range(6):
        scene.draining = {f"node {serial % 3}": 0.0}
        scene.poll()
        leaving = [joiner.serial for joiner in scene.group._running if joiner.name in scene.group._leaving]
        scene.draining = {}
        for one in leaving:
            scene.dies(one)
        scene.poll(2)
    assert len(scene.all_told(WorkerLost)) > 2
    assert scene.all_told(WorkerLeft) == []
    assert scene.group._leaving == set()


def test_a_drain_that_is_called_off_changes_nothing_for_one_that_was_asked_already(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.draining = {"node 1": 0.0}
    scene.poll()
    scene.draining = {}
    scene.poll()
    scene.statuses[1] = FINISHED
    scene.rendezvous.knows(left=frozenset({"w1"}))
    scene.poll()
    assert [event.worker for event in scene.all_told(WorkerLeft)] == ["w1"]


# Too few


def test_r11_a_group_that_never_had_enough_workers_gives_up_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, min_workers=4, max_workers=4, room=2)
    scene.poll()
    assert len(scene.running) == 2
    scene.now += 6
    scene.poll()
    (waiting,) = scene.all_told(WaitingForWorkers)
    assert (waiting.have, waiting.need) == (2, 4)
    scene.now += 60
    with pytest.raises(ResourceError, match="asked for 4 CPU, the cluster has 2"):
        scene.poll()
    assert scene.rendezvous.all_told("give_up") == []


def test_survivors_that_once_were_enough_wait_for_others_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.poll()
    scene.dies(0)
    scene.dies(1)
    scene.poll()
    for _ in range(10):
        scene.now += 60
        scene.poll()
    assert scene.running == [2]
    assert len(scene.all_told(WaitingForWorkers)) == 1


def test_r6_survivors_whose_patience_ends_save_their_state_before_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.poll()
    scene.dies(0)
    scene.dies(1)
    scene.poll()
    scene.now += 1801
    scene.poll(3)
    assert set(scene.rendezvous.all_told("give_up")) == {""}, "they are told, and told again"
    scene.statuses[2] = FINISHED
    with pytest.raises(ResourceError, match="there were 1 for 1801 s"):
        scene.poll()


# The end


def test_nobody_is_replaced_once_a_worker_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.statuses[0] = FINISHED
    scene.dies(1)
    scene.poll(2)
    assert len(scene.joiners) == 3


def test_r6_a_silent_process_is_given_up_before_ray_train_would(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.group._worker_health_check_timeout_s == module.SILENT_S <= 120


def test_the_end_gives_everything_back_and_may_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.dies(1)
    scene.poll()
    scene.group.shutdown()
    assert scene.gone == [0, 1, 2, 3], "also what was only asked for"
    scene.group.let_go()
    assert scene.running == []


# Sharing


def sharing(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, Broker]:
    """A group of 1 to 3 workers that has two, one of them beyond its own."""
    broker = Broker()
    scene = Scene(monkeypatch, min_workers=1, max_workers=3, room=4, broker=broker)
    assert scene.running == [0], "its own, before anybody has dealt"
    broker.dealt = 2
    scene.poll(3)
    assert scene.running == [0, 1]
    return scene, broker


def test_a_run_that_shares_grows_to_what_it_is_dealt_and_tells_how_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, broker = sharing(monkeypatch)
    scene.rendezvous.knows(step=7)
    broker.dealt = 9
    scene.poll(4)
    assert scene.running == [0, 1, 2], "it cannot use more"
    claim = broker.held[-1]
    assert (claim.name, claim.low, claim.high, claim.num_workers, claim.step) == ("sweep/trial", 1, 3, 3, 7)


def test_what_others_need_leaves_after_its_step_and_its_own_place_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, broker = sharing(monkeypatch)
    broker.dealt = 1
    scene.poll(3)
    assert [(event.worker, event.reason) for event in scene.all_told(WorkerLeaving)] == [("w1", "others need its place")]
    assert scene.running == [0, 1], "it is waited for"
    scene.rendezvous.trains = False
    scene.rendezvous.knows(step=8, left=frozenset({"w1"}))
    scene.statuses[1] = FINISHED
    scene.poll(2)
    assert (scene.running, scene.gone, scene.room) == ([0], [1], 3)
    assert [event.worker for event in scene.all_told(WorkerLeft)] == ["w1"]
    assert not scene.all_told(WorkerLost)


def test_a_worker_on_its_way_is_called_off_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, broker = sharing(monkeypatch)
    scene.room, broker.dealt = 0, 3
    scene.poll(3)
    assert [joiner.serial for joiner in scene.joiners] == [0, 1, 2]
    broker.dealt = 2
    scene.poll(3)
    assert (scene.running, scene.gone) == ([0, 1], [2])
    assert scene.rendezvous.all_told("leave") == ["w2"]
    assert not scene.all_told(WorkerLeaving)


def test_nobody_is_sent_away_once_a_worker_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, broker = sharing(monkeypatch)
    scene.statuses[0], broker.dealt = FINISHED, 1
    scene.poll(3)
    assert not scene.all_told(WorkerLeaving)


def test_a_run_that_ends_leaves_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, broker = sharing(monkeypatch)
    scene.group.let_go()
    assert broker.has_left
    assert scene.gone == [0, 1]
