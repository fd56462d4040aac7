"""Restart mode: what each end of an attempt leads to, how large the next one is, when the run fails, and its rendezvous."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.train import BackendConfig, ControllerError, FailureConfig, WorkerGroupError
from ray.train import RunConfig as RayRunConfig

from raytrain.elastic import attempt as module
from raytrain.elastic import membership, placement, restart
from raytrain.elastic.attempt import AttemptRendezvous, AttemptStatus, Loss
from raytrain.elastic.controller_config import ControllerConfig
from raytrain.elastic.restart import RestartTrainer
from raytrain.errors import CheckpointError, InternalError, PoisonRowsError, ResourceError, TaskError, WorkersLostError
from raytrain.events.kinds import Event, WaitingForWorkers, WorkerDrained, WorkerLost
from raytrain.rendezvous.health import WAITING, Heartbeat
from raytrain.rendezvous.state import NO_STATE, JoinRequest
from tests.unit.rendezvous import handles

USERS_ERROR, DIED = TaskError("Traceback", "loss"), Loss("it died")


@dataclass
class End:
    """How an attempt ends after a while: all functions end (once they are asked to, if `on_stop`), or what is given."""

    lost: int | None = None
    loss: Loss = DIED
    raised: Any = None
    error: BaseException | None = None
    step: int = 5
    after_s: float = 1.0
    on_stop: bool = False
    starts: bool = True
    joins: bool = True


class FakeAttempt(module.Attempt):
    def __init__(self, scene: Scene, end: End, first: int, num: int) -> None:
        self._scene, self._end, self.began, self.num_closes = scene, end, scene.now, 0
        self.names = tuple(f"w{first + i}" for i in range(num))
        self.is_to_stop, self.has_ended, self.error = False, False, None
        started = dict.fromkeys(self.names if end.starts else (), ("10.0.0.1", 1))
        self.status = AttemptStatus(self.names if end.joins else (), end.step, len(scene.attempts) + 1, started)

    def poll(self, timeout_s: float = 0.0) -> None:
        end = self._end
        if not (self.is_to_stop if end.on_stop else self._scene.now >= self.began + end.after_s):
            return
        if end.lost is not None:
            self.status = replace(self.status, lost={self.names[end.lost % len(self.names)]: end.loss})
        elif end.error:
            self.has_ended, self.error = True, end.error
        else:
            self.status = replace(self.status, finished=dict.fromkeys(self.names, end.raised))

    def stop(self) -> None:
        self.is_to_stop = True

    def close(self) -> None:
        self.num_closes += 1


class Scene:
    """A cluster with slots for some workers, in which time passes while the trainer sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slots, self.requested = 100.0, 2, list[Any]()
        self.attempts, self.starts, self.events = list[FakeAttempt](), list[tuple[int, ...]](), list[Event]()
        self.relay, self.resources = restart.StopRelay(), {"CPU": 0.2}
        self.while_running: Callable[[], None] = lambda: None
        monkeypatch.setattr(restart, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(placement.Slots, "request", lambda slots: self._take())
        monkeypatch.setattr(membership, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 0.2}))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        is_running = self.attempts and not self.attempts[-1].num_closes
        for number, slot in enumerate(self.requested):
            slot.is_placed = number < self.slots - (len(self.attempts[-1].names) if is_running else 0)

    def _take(self) -> Any:
        slot = SimpleNamespace(is_placed=False)
        slot.release = lambda: self.requested.remove(slot)
        self.requested.append(slot)
        return slot

    def start(self, writer: Any, *arguments: int) -> FakeAttempt:
        self.starts.append(arguments)
        self.attempts.append(FakeAttempt(self, self.ends[len(self.attempts)], arguments[1], arguments[0]))
        return self.attempts[-1]

    def fit(self, *ends: End, workers: tuple[int, int] = (1, 2), max_failures: int = 2) -> None:
        self.ends = ends
        writer = SimpleNamespace(append=SimpleNamespace(remote=self.events.extend))
        config = ControllerConfig(*workers, max_failures, 60.0, 1800.0, 600.0, 4, self.relay, writer)
        try:
            RestartTrainer(self, config, lambda: False, self.while_running).fit()  # type: ignore[arg-type]
        finally:
            assert [attempt.num_closes for attempt in self.attempts] == [1] * len(self.attempts), "workers are left"
            assert self.requested == [], "slots are not given back"

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_after_a_loss_all_restart_under_new_names_and_know_the_step(scene: Scene) -> None:
    scene.fit(End(lost=1), End())
    assert scene.starts == [(2, 0, NO_STATE, 0), (2, 2, 5, 1)]
    (lost,), (left,) = scene.of(WorkerLost), scene.of(WorkerDrained)
    assert (lost.worker, lost.node, lost.pid, lost.reason, left.worker) == ("w1", "10.0.0.1", 1, "it died", "w0")


def test_fewer_start_where_a_node_is_gone_and_more_after_they_have_saved(scene: Scene) -> None:
    def change_slots() -> None:
        is_back = len(scene.attempts) > 1 and scene.now > scene.attempts[1].began + 5
        scene.slots = 2 if is_back or not scene.attempts else 1

    scene.while_running = change_slots
    scene.fit(End(lost=0), End(on_stop=True, raised=CheckpointError("full"), step=9), End())
    assert scene.starts == [(2, 0, NO_STATE, 0), (1, 2, 5, 1), (2, 3, NO_STATE, 2)], "a save that failed is excused"
    assert scene.attempts[2].began - scene.attempts[1].began > 5 + restart.GROW_SETTLE_S


def test_a_group_without_a_finished_step_is_not_ended_for_a_larger_one(scene: Scene) -> None:
    scene.slots, scene.while_running = 1, lambda: setattr(scene, "slots", 2 if scene.attempts else 1)
    scene.fit(End(step=0, after_s=60.0))
    assert not scene.attempts[0].is_to_stop


@pytest.mark.parametrize("error", [USERS_ERROR, CheckpointError("full")])
@pytest.mark.parametrize("is_reported", [True, False])
def test_an_error_of_a_train_function_ends_the_run_without_a_retry(scene: Scene, error: Any, is_reported: bool) -> None:
    with pytest.raises(type(error)):
        scene.fit(End(raised=error) if is_reported else End(error=WorkerGroupError("failed", {0: error})))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (End(lost=1), "it died"),
        (End(lost=1, joins=False), "it died"),
        (End(error=ControllerError(RuntimeError("no place\nat all"))), "no place"),
        (End(starts=False, after_s=1e9), "no start within 600 s"),
    ],
)
def test_failures_without_progress_end_the_run_and_name_the_last_one(scene: Scene, end: End, reason: str) -> None:
    with pytest.raises(WorkersLostError, match=rf"3 times in a row at step 5.*run.max_failures = 2.*{reason}$"):
        scene.fit(End(lost=0, step=5), replace(end, step=4), replace(end, step=3))


def test_progress_and_preemptions_do_not_spend_the_failure_budget(scene: Scene) -> None:
    class Preempted(ControllerError):
        preemption_info = "a node goes"

    preempted = [End(lost=0, loss=Loss("it went", preempted=True)), End(error=Preempted(RuntimeError("drained")))]
    scene.fit(*preempted * 3, *(End(lost=0, step=i) for i in range(6, 12)), End(), max_failures=1)
    assert len(scene.starts) == 13


def test_rows_that_kill_their_worker_three_times_are_named_unless_it_was_evicted(scene: Scene) -> None:
    evicted = [End(lost=1, loss=Loss("stuck", evicted=True))] * 4
    with pytest.raises(PoisonRowsError) as caught:
        scene.fit(*evicted, *[End(lost=1)] * 4, max_failures=8)
    assert (caught.value.step, caught.value.logical, len(scene.starts)) == (5, (2, 3), 7)


def test_r16_a_stop_request_reaches_the_attempt_and_ends_the_run_although_it_breaks(scene: Scene) -> None:
    calls: list[Any] = []

    def stop() -> None:
        if scene.attempts:
            scene.attempts[-1].rendezvous = Actor(calls)
            scene.relay.stop.remote()

    scene.while_running = stop
    scene.fit(End(lost=0), max_failures=0)
    assert ("stop",) in calls


def test_r16_an_interrupt_ends_the_workers(scene: Scene) -> None:
    scene.while_running = lambda: pytest.exit("now") if scene.attempts else None
    with pytest.raises(pytest.exit.Exception):
        scene.fit(End(after_s=1e9))


def test_r11_too_little_room_is_reported_and_ends_the_run_after_the_timeout(scene: Scene) -> None:
    scene.slots = 1
    with pytest.raises(ResourceError, match="1 for 60 s"):
        scene.fit(workers=(2, 2))
    assert [(event.have, event.need) for event in scene.of(WaitingForWorkers)] == [(1, 2)]


class Handle(handles.Handle):
    @property
    def __ray_ready__(self) -> Any:
        return SimpleNamespace(remote=lambda: self.execute.remote(int))


async def join(rendezvous: AttemptRendezvous, step: int, *workers: Handle, last: int = 0) -> Any:
    requests = [JoinRequest(f"w{i}", step, ("127.0.0.1", 1), last_generation=last) for i in range(len(workers))]
    return await asyncio.gather(*map(rendezvous.join, requests, workers))


@handles.story
async def test_generations_of_an_attempt_count_on_and_have_all_its_workers() -> None:
    rendezvous, workers = AttemptRendezvous(2, max_step=9, last=4), (Handle(), Handle())
    first, _ = await join(rendezvous, NO_STATE, *workers)
    assert (first.number, first.cause, first.max_step) == (5, "start", 9)
    assert (await rendezvous.report()).step == NO_STATE, "nobody of this attempt has finished a step"
    again, _ = await join(rendezvous, 3, *workers)
    assert (again.number, len(again.members)) == (6, 2), "a collective failed, though all of them live"
    workers[1].error = ActorDiedError()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(join(rendezvous, 3, workers[0], last=6), 0.1)
    workers[0].error = ActorDiedError()  # killed by Ray Train since its peer is lost
    rendezvous._probed_at = 0.0
    assert (await rendezvous.report()).lost.keys() == {"w1"}


@handles.story
async def test_the_rendezvous_reports_who_started_finished_and_died() -> None:
    rendezvous = AttemptRendezvous(4)
    errors = (ActorDiedError(), ActorDiedError(), ActorUnavailableError("", None), None)
    for number, error in enumerate(errors):
        await rendezvous.begin(f"w{number}", "10.0.0.1", number, Handle(error))
    await rendezvous.heartbeat(Heartbeat("w0", 7, WAITING, 0.0, False))
    await rendezvous.end("w0", USERS_ERROR)
    rendezvous._evicted |= {"w0": "silent", "w3": "silent"}
    status = await rendezvous.report()
    assert (status.step, status.started["w1"], status.finished) == (7, ("10.0.0.1", 1), {"w0": USERS_ERROR})
    assert status.lost.keys() == {"w1", "w3"}
    assert status.lost["w3"] == Loss("silent", evicted=True)
    assert "w0" not in rendezvous._health.unhealthy(1e9), "the silence of a worker that has finished means nothing"


class Actor:
    """Answers each call at once, and keeps the calls."""

    def __init__(self, calls: list[Any], answer: Any = None) -> None:
        self.calls, self.answer = calls, answer

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: (self.calls.append((name, *given)), self.answer)[1])


@pytest.fixture
def actors_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Any, timeout: float = 0.0) -> Any:
        if isinstance(answer, RayError):
            raise answer
        return answer

    context = SimpleNamespace(get_world_rank=lambda: 1, current_actor="handle")
    train, util = SimpleNamespace(get_context=lambda: context), SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    fake = {"get": get, "wait": lambda calls, timeout: ([call for call in calls if call != "pending"], [])}
    monkeypatch.setattr(module, "ray", SimpleNamespace(**fake, train=train, util=util, get_runtime_context=lambda: context))


@pytest.mark.usefixtures("actors_answer")
@pytest.mark.parametrize(("error", "kind"), [(USERS_ERROR, TaskError), (KeyError("odd"), InternalError)])
def test_a_worker_reports_its_start_and_its_error(error: Exception, kind: type) -> None:
    def train(config: Any) -> None:
        raise error

    calls: list[Any] = []
    with pytest.raises(type(error)):
        module.reporting(train, Actor(calls), Actor([]), 2)({})
    begin, (name, worker, reported) = calls
    assert (begin[:3], name, worker, type(reported)) == (("begin", "w3", "10.0.0.1"), "end", "w3", kind)
    with pytest.raises(ActorDiedError):  # the run has ended meanwhile
        module.reporting(pytest.fail, Actor([], ActorDiedError()), Actor([]), 2)({})  # type: ignore[arg-type]


@pytest.mark.usefixtures("actors_answer")
def test_a_restarted_rendezvous_does_not_make_the_driver_forget() -> None:
    rendezvous = Actor([], AttemptStatus(started={"w0": ("", 1)}, finished={"w0": None}))
    attempt = module.Attempt("pending", rendezvous, ("w0", "w1"))
    for answer in (ActorUnavailableError("away", None), AttemptStatus(started={"w1": ("", 2)}), None):
        rendezvous.answer = answer  # to the next call; a poll takes the answer to the previous one
        attempt.poll()
    assert (attempt.status.started, attempt.status.finished) == ({"w0": ("", 1), "w1": ("", 2)}, {"w0": None})


def test_ray_train_neither_retries_nor_resizes_nor_forms_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls, error = list[Any](), list[Any](), ControllerError(RuntimeError("no room"))
    monkeypatch.setattr(module.TorchTrainer, "fit", lambda trainer: made.append(trainer) or (_ for _ in ()).throw(error))
    opened = (lambda rendezvous, first: {"first": first}, lambda *given: Actor([]), Actor(calls))
    factory = module.AttemptFactory(
        print, *opened, resources={"CPU": 0.2}, use_gpu=False, run_config=RayRunConfig(storage_path="/x")
    )
    assert factory.start(None, 2, 3, NO_STATE, 0).names == ("w3", "w4")
    actor = module.FitActor()
    with actor._variables:
        assert actor.fit(*calls[0][1:]) is error
    scaling, failures = made[0].scaling_config, made[0].run_config.failure_config
    assert (scaling.num_workers, scaling.resources_per_worker, made[0].train_loop_config) == (2, {"CPU": 0.2}, {"first": 3})
    assert failures == FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0)
    assert made[0].backend_config.backend_cls is BackendConfig().backend_cls
