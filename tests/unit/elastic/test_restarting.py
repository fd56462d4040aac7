"""Attempt after attempt: what each end leads to, how large the next group is, and when the run gives up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError

from raytrain.elastic import restarting as module
from raytrain.elastic.attempt_rendezvous import Report
from raytrain.elastic.restarting import RestartingTrainer, StopRelay
from raytrain.elastic.room import GROW_SETTLE_S
from raytrain.elastic.wiring import Wiring
from raytrain.errors import CheckpointError, DeadlyRowsError, ResourceError, TaskError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerLeft, WorkerLost
from raytrain.rendezvous.actor import Survey
from raytrain.rendezvous.generation import NO_STATE
from tests.unit.elastic.test_plain_ray import means


@dataclass
class Ending:
    """How an attempt of the story ends, and after how many seconds; None: when it is asked to stop."""

    error: Callable[[int], BaseException | None] = lambda num: None
    after_s: float | None = 1.0
    step: int = 5
    ended: dict[str, bool] = field(default_factory=dict)
    completes: bool = False


class FakeAttempt:
    def __init__(self, scene: Scene, ending: Ending, rendezvous: Any, names: tuple[str, ...]) -> None:
        self._scene, self._ending, self.began = scene, ending, scene.now
        self.rendezvous, self.names = rendezvous, names
        self.is_to_stop, self.broken_s, self.num_kills = False, 0.0, 0
        self.known = dict.fromkeys(names, ("10.0.0.1", 1))
        self.ended = ending.ended
        self.report = Report(Survey({}, frozenset(), names, ending.step), ending.step, len(scene.attempts) + 1)
        self.limits: list[float] = []

    @property
    def is_over(self) -> bool:
        after_s = self._ending.after_s
        is_over = self.is_to_stop if after_s is None else self._scene.now >= self.began + after_s
        self._scene.is_complete |= is_over and self._ending.completes
        return is_over

    @property
    def has_ended(self) -> bool:
        return self.is_over

    @property
    def error(self) -> BaseException | None:
        return self._ending.error(len(self.names))

    def look(self) -> None:
        return None

    look_closely = look

    def stop(self) -> None:
        self.is_to_stop = True

    def kill(self) -> None:
        self.num_kills += 1

    def broken_for_s(self, start_limit_s: float) -> float:
        return self.broken_s

    def close(self, limit_s: float) -> None:
        self.limits.append(limit_s)


class Scene:
    """A cluster with room for `places` workers, in which time passes while somebody rests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.places, self.is_complete = 100.0, 2, False
        self.attempts: list[FakeAttempt] = []
        self.opened: list[tuple[int, int, int]] = []
        self.firsts: list[int] = []
        self.events: list[Event] = []
        self.killed: list[Any] = []
        self.relay = StopRelay()
        self.on_look: Callable[[], None] = lambda: None
        self.asked = 0
        self.since = self.now
        self.endings: list[Ending] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "Room", lambda resources: self)
        monkeypatch.setattr(module, "told", lambda *arguments: print)
        monkeypatch.setattr(module, "plain_trainer", lambda *arguments, name: SimpleNamespace(fit=name))
        monkeypatch.setattr(module, "Attempt", self._attempt)
        fake = SimpleNamespace(kill=self.killed.append, cluster_resources=lambda: {"CPU": 0.2})
        monkeypatch.setattr(module, "ray", fake)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _attempt(self, fit: Any, rendezvous: Any, names: tuple[str, ...]) -> FakeAttempt:
        self.attempts.append(FakeAttempt(self, self.endings[len(self.attempts)], rendezvous, names))
        return self.attempts[-1]

    # The room

    def ask(self, num: int) -> None:
        self.asked = num

    def look(self, now: float) -> tuple[int, float]:
        used = len(self.attempts[-1].names) if self.attempts and not self.attempts[-1].is_over else 0
        num_free = min(self.asked, self.places - used)
        return num_free, now - self.since

    def give_back(self) -> None:
        self.asked = 0

    # The run

    def open(self, num: int, reached: int, after: int) -> Any:
        self.opened.append((num, reached, after))
        return f"rendezvous {len(self.opened)}"

    def fit(self, *endings: Ending, workers: tuple[int, int] = (1, 2), max_failures: int = 2) -> None:
        self.endings = list(endings)
        sink = SimpleNamespace(append=SimpleNamespace(remote=self.events.extend))
        wiring = Wiring(*workers, max_failures, 60.0, 1800.0, 600.0, 4, self.relay, sink)

        def connect(rendezvous: Any, first: int) -> dict[str, Any]:
            self.firsts.append(first)
            return {}

        given = means(connect=connect, open_rendezvous=self.open, is_complete=lambda: self.is_complete)
        RestartingTrainer(given, wiring, self.on_look).fit()

    @property
    def sizes(self) -> list[int]:
        return [len(attempt.names) for attempt in self.attempts]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def loss(rank: int = 0) -> Callable[[int], BaseException]:
    return lambda num: WorkerGroupError("lost", {rank % num: ActorDiedError()})


def raised(error: BaseException) -> Callable[[int], BaseException]:
    return lambda num: WorkerGroupError("raised", {0: error})


COMPLETE = Ending(completes=True)


def test_a_run_without_trouble_is_one_attempt_of_all_workers(scene: Scene) -> None:
    scene.fit(COMPLETE)
    assert scene.sizes == [2]
    assert scene.opened == [(2, NO_STATE, 0)]
    assert scene.events == []
    assert scene.asked == 0, "the room is given back"


def test_what_is_asked_for_beyond_a_group_does_not_take_its_own_places(scene: Scene) -> None:
    asked: list[tuple[float, int]] = []

    def begin_late() -> None:
        for attempt in scene.attempts:
            is_late = scene.now < attempt.began + 0.5
            attempt.known = {} if is_late else dict.fromkeys(attempt.names, ("", 1))
            asked.append((scene.now - attempt.began, scene.asked))

    scene.places, scene.on_look = 1, begin_late
    scene.fit(Ending(after_s=2.0, completes=True))
    assert {num for seconds, num in asked if 0.25 < seconds < 0.5} <= {0}
    assert asked[-1][1] == 1


def test_a_group_that_gets_no_place_is_told_and_tried_again(scene: Scene) -> None:
    def not_begun() -> None:
        if len(scene.attempts) == 1:
            scene.attempts[0].known = {}

    scene.on_look = not_begun
    scene.fit(Ending(lambda num: ControllerError(RuntimeError("no place in time")), step=NO_STATE), COMPLETE)
    (waiting,) = scene.of(WaitingForWorkers)
    assert (waiting.have, waiting.need, waiting.reason) == (0, 2, "no place in time")
    assert scene.of(WorkerLost) == []


def test_after_a_loss_all_begin_again_under_new_names(scene: Scene) -> None:
    scene.fit(Ending(loss(1)), COMPLETE)
    assert [attempt.names for attempt in scene.attempts] == [("w0", "w1"), ("w2", "w3")]
    assert scene.firsts == [0, 2]
    assert scene.opened == [(2, NO_STATE, 0), (2, 5, 1)], "the second one knows how far the first one was"
    (lost,) = scene.of(WorkerLost)
    assert (lost.worker, lost.node, lost.pid) == ("w1", "10.0.0.1", 1)
    assert lost.reason
    assert [left.worker for left in scene.of(WorkerLeft)] == ["w0"]
    assert scene.killed == ["rendezvous 1"]


def test_fewer_begin_where_a_node_is_gone_and_more_once_it_is_worth_it(scene: Scene) -> None:
    def one_place_less() -> None:
        scene.places = 1 if len(scene.attempts) == 1 else scene.places

    def room_again() -> None:
        if len(scene.attempts) == 2 and scene.places == 1:
            scene.places, scene.since = 2, scene.now

    def change() -> None:
        one_place_less()
        room_again()

    scene.on_look = change
    scene.fit(Ending(loss()), Ending(after_s=None, step=9), COMPLETE)
    assert scene.sizes == [2, 1, 2]
    assert scene.attempts[1].is_to_stop, "it was asked to save and to end"
    assert scene.now - scene.since >= GROW_SETTLE_S
    assert scene.opened[2] == (2, NO_STATE, 2), "nobody died, so nobody has to be careful"
    assert len(scene.of(WorkerLost)) == 1


def test_what_an_ended_group_gives_back_is_waited_for_though_there_has_long_been_room_for_fewer(scene: Scene) -> None:
    ended: list[float] = []

    def placed_late() -> None:
        if scene.attempts and scene.attempts[0].has_ended:
            ended.append(scene.now)
        scene.places = 1 if not ended or scene.now < ended[0] + 0.75 else 2

    scene.on_look = placed_late
    scene.fit(Ending(loss()), COMPLETE)
    assert scene.sizes == [2, 2]


def test_the_users_own_error_ends_the_run_at_once(scene: Scene) -> None:
    with pytest.raises(WorkerGroupError):
        scene.fit(Ending(raised(TaskError("Traceback", "loss"))))
    assert scene.of(WorkerLost) == []


def test_an_error_of_rays_own_checks_ends_the_run(scene: Scene) -> None:
    with pytest.raises(ValueError, match="odd"):
        scene.fit(Ending(lambda num: ValueError("odd")))


def test_losses_without_progress_end_the_run_and_name_the_last_one(scene: Scene) -> None:
    with pytest.raises(WorkersLostError, match=r"3 times in a row at step 5.*run.max_failures = 2"):
        scene.fit(*(Ending(loss(i), step=5 - i) for i in range(3)))


def test_progress_makes_up_for_losses(scene: Scene) -> None:
    scene.fit(*(Ending(loss(), step=i) for i in range(9)), COMPLETE)
    assert len(scene.attempts) == 10


def test_the_same_rows_that_kill_each_worker_are_named(scene: Scene) -> None:
    with pytest.raises(DeadlyRowsError) as caught:
        scene.fit(*(Ending(loss(1)) for _ in range(9)), max_failures=8)
    assert (caught.value.step, caught.value.logical) == (5, (2, 3))
    assert len(scene.attempts) == 3


@pytest.mark.parametrize("how", ["worker", "node"])
def test_what_the_cloud_takes_does_not_count(scene: Scene, how: str) -> None:
    class Taken(ActorDiedError):
        preempted = True

    class Preempted(ControllerError):
        preemption_info = "a node goes"

    def ending(num: int) -> BaseException:
        return WorkerGroupError("lost", {0: Taken()}) if how == "worker" else Preempted(RuntimeError("drained"))

    scene.fit(*(Ending(ending, step=5) for _ in range(5)), COMPLETE, max_failures=0)
    assert len(scene.attempts) == 6


def test_an_end_for_which_nobody_is_blamed_is_a_loss_of_all(scene: Scene) -> None:
    scene.fit(Ending(lambda num: ControllerError(RuntimeError("out of order"))), COMPLETE)
    assert [lost.worker for lost in scene.of(WorkerLost)] == ["w0", "w1"]
    assert all(lost.reason == "out of order" for lost in scene.of(WorkerLost))


def test_a_save_that_fails_only_because_of_a_planned_change_does_not_end_the_run(scene: Scene) -> None:
    scene.places = 1

    def more_room() -> None:
        if scene.places == 1 and scene.attempts:
            scene.places, scene.since = 2, scene.now

    scene.on_look = more_room
    scene.fit(Ending(raised(CheckpointError("full")), after_s=None), COMPLETE)
    assert scene.sizes == [1, 2]


def test_a_save_that_fails_at_the_end_of_the_run_is_an_error(scene: Scene) -> None:
    with pytest.raises(WorkerGroupError):
        scene.fit(Ending(raised(CheckpointError("full"))))


def test_r16_a_wish_to_stop_ends_the_run_after_the_attempt_and_before_the_next_one(scene: Scene) -> None:
    def wish() -> None:
        if scene.attempts:
            scene.relay.attempt = None  # nobody hears it any more
            scene.relay.stop.remote()

    scene.on_look = wish
    scene.fit(Ending(loss()))
    assert len(scene.attempts) == 1


def test_r16_a_wish_to_stop_is_passed_on_to_the_attempt() -> None:
    heard: list[int] = []
    relay = StopRelay()
    relay.stop.remote()
    relay.attempt = SimpleNamespace(  # type: ignore[assignment]
        rendezvous=SimpleNamespace(stop=SimpleNamespace(remote=lambda: heard.append(1)))
    )
    relay.stop.remote()
    assert heard == [1]
    assert relay.is_asked


def test_r11_too_little_room_is_told_and_ends_the_run_after_a_while(scene: Scene) -> None:
    scene.places = 1
    with pytest.raises(ResourceError, match="room for 1 for 60 s"):
        scene.fit(workers=(2, 2))
    (waiting,) = scene.of(WaitingForWorkers)
    assert (waiting.have, waiting.need) == (1, 2)


def test_r6_a_broken_group_that_ray_train_does_not_end_is_killed_and_then_given_up(scene: Scene) -> None:
    def breaks() -> None:
        for attempt in scene.attempts:
            attempt.broken_s += 1

    scene.on_look = breaks
    with pytest.raises(WorkersLostError, match="has not ended a broken group of 2 workers"):
        scene.fit(Ending(after_s=1e9))
    assert scene.attempts[0].num_kills
    assert scene.attempts[0].limits == [module.END_LIMIT_S]


def test_r16_whatever_ends_the_run_ends_its_workers(scene: Scene) -> None:
    def interrupt() -> None:
        if scene.attempts:
            raise KeyboardInterrupt

    scene.on_look = interrupt
    with pytest.raises(KeyboardInterrupt):
        scene.fit(Ending(after_s=1e9))
    assert scene.attempts[0].limits == [module.END_LIMIT_S]
    assert scene.asked == 0
