"""What the end of an attempt means: an error of a worker's function, a lost worker, or a node that is taken away."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError

from raytrain.elastic.fates import in_one_line, is_preemption, is_save_that_failed, losses, own_failures
from raytrain.errors import CheckpointError, TaskError

NAMES = ("w4", "w5")
DIED = ActorDiedError()


class Wrapped(Exception):
    """As Ray Train tells of a process that is gone."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a health check failed")
        self.health_check_failure = cause


class Taken(Exception):
    preempted = True


class Preempted(Exception):
    preemption_info = None


def failed(**failures: BaseException) -> WorkerGroupError:
    return WorkerGroupError("failed", {NAMES.index(name): failure for name, failure in failures.items()})


def test_a_process_that_is_gone_is_a_loss_with_a_reason() -> None:
    error = failed(w5=Wrapped(ValueError("the process died\nin two lines")))
    assert own_failures(error, NAMES, {}) == {}
    (lost,) = losses(error, NAMES, {}, {})
    assert (lost.worker, lost.reason, lost.preempted) == ("w5", "the process died", False)


def test_a_worker_that_was_given_up_is_lost_for_that_reason() -> None:
    (lost,) = losses(failed(w4=Wrapped(Taken())), NAMES, {}, {"w4": "no heartbeat for 10 s"})
    assert (lost.reason, lost.preempted) == ("no heartbeat for 10 s", False)


def test_a_process_that_the_cloud_took_does_not_count() -> None:
    (lost,) = losses(failed(w4=Wrapped(Taken())), NAMES, {}, {})
    assert lost.preempted


@pytest.mark.parametrize("error", [TaskError("Traceback", "loss"), CheckpointError("full")])
def test_errors_that_raytrain_knows_are_of_the_worker_itself(error: Exception) -> None:
    own = own_failures(failed(w4=error, w5=Wrapped(DIED)), NAMES, {})
    assert own == {"w4": error}
    assert [lost.worker for lost in losses(failed(w4=error, w5=Wrapped(DIED)), NAMES, {}, {})] == ["w5"]
    assert is_save_that_failed(own) == isinstance(error, CheckpointError)


def test_any_error_of_a_function_that_said_so_is_of_the_worker_itself() -> None:
    error = failed(w4=KeyError("odd"), w5=DIED)
    assert list(own_failures(error, NAMES, {"w4": True, "w5": False})) == ["w4"]


def test_an_end_for_which_nobody_is_blamed_has_no_losses() -> None:
    error: Any = ControllerError(RuntimeError("no room"))
    assert own_failures(error, NAMES, {}) == {}
    assert losses(error, NAMES, {}, {}) == []
    assert not is_preemption(error)
    assert is_preemption(Preempted())
    assert not is_save_that_failed({})


def test_a_reason_is_one_line_also_where_there_are_no_words() -> None:
    assert in_one_line(ValueError("a\nb")) == "a"
    assert in_one_line(ValueError()) == "ValueError"
    assert in_one_line(ControllerError(ValueError("no room"))) == "no room"
