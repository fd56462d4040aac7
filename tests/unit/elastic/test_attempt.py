"""The driver's view of one group: when it is over, when it is broken, and how it is ended."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raytrain.elastic import attempt as module
from raytrain.elastic.attempt import Attempt, in_background, told
from raytrain.elastic.attempt_rendezvous import Report
from raytrain.events.kinds import WorkerStarting
from raytrain.rendezvous.actor import Survey

LIMIT_S = 10.0
NAMES = ("w2", "w3")


class Actor:
    """Writes down what it is told, and answers with its report."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer: Any = Report()

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return self.answer if name == "report" else None

        return SimpleNamespace(remote=remote)


class Scene:
    """An attempt of two workers, whose Ray Train ends when it is told to, or by the error that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.killed, self.actor = 100.0, [], Actor()  # type: ignore[var-annotated]
        self.must_end = threading.Event()
        self.failure: Exception | None = None
        fake = SimpleNamespace(get=self._get, wait=lambda asked, timeout: (asked, []), kill=self.killed.append)
        monkeypatch.setattr(module, "ray", fake)
        self.attempt = Attempt(self._fit, self.actor, NAMES, clock=lambda: self.now)

    def _fit(self) -> None:
        self.must_end.wait(LIMIT_S)
        if self.failure is not None:
            raise self.failure

    def _get(self, answer: Any, timeout: float | None = None) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hear(self, **report: Any) -> None:
        self.actor.answer = Report(**report)
        self.attempt.look()
        self.attempt.look()

    def end(self) -> None:
        self.must_end.set()
        self.attempt._running.exception(LIMIT_S)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Scene(monkeypatch)
    yield made
    made.end()


def test_it_is_over_when_all_functions_have_ended_well_though_ray_train_takes_its_time(scene: Scene) -> None:
    scene.hear(ended={"w2": False})
    assert not scene.attempt.is_over
    scene.hear(ended={"w2": False, "w3": False})
    assert scene.attempt.is_over
    assert not scene.attempt.has_ended
    assert scene.attempt.error is None


def test_where_one_has_raised_the_error_comes_from_ray_train(scene: Scene) -> None:
    scene.hear(ended={"w2": False, "w3": True})
    assert not scene.attempt.is_over
    scene.failure = ValueError("odd")
    scene.end()
    assert scene.attempt.is_over
    assert scene.attempt.error is scene.failure


def test_what_a_rendezvous_forgets_that_was_started_anew_is_remembered(scene: Scene) -> None:
    scene.hear(known={"w2": ("10.0.0.1", 1)}, ended={"w2": False})
    scene.hear(known={"w3": ("10.0.0.1", 2)})
    assert scene.attempt.known == {"w2": ("10.0.0.1", 1), "w3": ("10.0.0.1", 2)}
    assert scene.attempt.ended == {"w2": False}


@pytest.mark.parametrize("away", [ActorDiedError(), GetTimeoutError("no answer")])
def test_while_the_rendezvous_is_away_the_last_report_stays(scene: Scene, away: Exception) -> None:
    scene.hear(step=7)
    scene.actor.answer = away
    scene.attempt.look_closely()
    assert scene.attempt.report.step == 7


def test_r6_a_group_is_broken_since_somebody_was_given_up(scene: Scene) -> None:
    scene.hear(survey=Survey({"w3": "silent"}, frozenset(), (), 0))
    assert scene.attempt.broken_for_s(600.0) == 0.0
    scene.now += 5
    assert scene.attempt.broken_for_s(600.0) == 5.0


def test_r6_a_group_that_does_not_begin_is_broken_after_its_limit(scene: Scene) -> None:
    scene.hear(known={"w2": ("", 1)})
    scene.now += 600
    assert scene.attempt.broken_for_s(600.0) == 0.0
    scene.now += 1
    assert scene.attempt.broken_for_s(600.0) == 0.0
    scene.now += 3
    assert scene.attempt.broken_for_s(600.0) == 3.0
    scene.hear(known={"w2": ("", 1), "w3": ("", 2)})
    assert scene.attempt.broken_for_s(600.0) == 0.0


def test_r16_what_is_left_is_killed(scene: Scene) -> None:
    scene.attempt.close(0.01)
    assert ("kill_all",) in scene.actor.calls
    assert scene.killed == [scene.actor]


def test_workers_that_have_finished_are_left_in_peace(scene: Scene) -> None:
    scene.hear(ended={"w2": False, "w3": False})
    scene.attempt.close(LIMIT_S)
    assert ("kill_all",) not in scene.actor.calls
    assert scene.killed == [scene.actor]


def test_a_stop_is_remembered(scene: Scene) -> None:
    scene.attempt.stop()
    assert scene.attempt.is_to_stop
    assert ("stop",) in scene.actor.calls


def test_work_in_the_background_leaves_no_thread_behind() -> None:
    seen: list[threading.Thread] = []
    running = in_background(lambda: seen.append(threading.current_thread()))
    running.result(LIMIT_S)
    seen[0].join(LIMIT_S)
    assert seen[0].daemon
    assert not seen[0].is_alive()


def test_r16_work_that_ray_ends_when_it_is_shut_down_says_nothing() -> None:
    def work() -> None:
        raise SystemExit(0)

    assert in_background(work).result(LIMIT_S) is None


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of rank 1."""
    fake = SimpleNamespace(
        train=SimpleNamespace(get_context=lambda: SimpleNamespace(get_world_rank=lambda: 1)),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
        get_runtime_context=lambda: SimpleNamespace(current_actor="handle"),
        get=lambda answer, timeout=None: answer,
    )
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module.os, "getpid", lambda: 77)
    return Actor(), Actor()


def test_a_worker_tells_of_its_beginning_and_its_end(in_worker: tuple[Actor, Actor]) -> None:
    (rendezvous, sink), done = in_worker, []
    told(done.append, rendezvous, sink, 2)({"a": 1})
    assert done == [{"a": 1}]
    assert rendezvous.calls == [("begin", "w3", "10.0.0.1", 77, "handle"), ("end", "w3", False)]
    assert sink.calls == [("append", [WorkerStarting(worker="w3", node="10.0.0.1", pid=77)])]


def fail(config: Any) -> None:
    raise KeyError("odd")


def test_an_error_of_the_work_is_told_and_goes_on_also_while_the_rendezvous_is_away(
    in_worker: tuple[Actor, Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(answer: Any, timeout: float | None = None) -> None:
        raise ActorUnavailableError("away", None)

    monkeypatch.setattr(module.ray, "get", away)
    with pytest.raises(KeyError):
        told(fail, *in_worker, 2)({})
    assert in_worker[0].calls[-1] == ("end", "w3", True)


def test_r16_a_worker_that_begins_after_the_run_was_called_off_ends_at_once(
    in_worker: tuple[Actor, Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(answer: Any, timeout: float | None = None) -> None:
        raise ActorDiedError()

    monkeypatch.setattr(module.ray, "get", gone)
    with pytest.raises(ActorDiedError):
        told(fail, *in_worker, 2)({})
