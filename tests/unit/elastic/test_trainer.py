"""The controller runs in a thread of the driver, which watches it, and is cancelled with all its workers."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.elastic import trainer as module
from raytrain.elastic.trainer import CONTROLLER_ENVIRONMENT, ElasticTrainer, NoRetries, StartOnce, _in_thread


def test_r16_cancelled_work_ends_with_its_thread() -> None:
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with _in_thread(work()):
        assert began.wait(10)
    assert ended.is_set()
    assert not any(thread.name == "controller" for thread in threading.enumerate())


def test_r16_work_that_does_not_end_is_waited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCEL_TIMEOUT_S", 0.05)
    began, go_on = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        go_on.wait(10)

    one = trainer(lambda: None)
    with _in_thread(work()) as (one._thread, running):
        assert began.wait(10)
    one.close(0.05)
    assert one._thread.is_alive()
    go_on.set()
    one.close(10)
    assert not one._thread.is_alive()
    assert running.done()


class Controller:
    """Runs until the test ends it; records its environment and its release."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.environment = arguments, {name: os.environ.get(name) for name in CONTROLLER_ENVIRONMENT}
        self.is_released, self.must_end, self.error = False, threading.Event(), None

    async def run(self) -> None:
        assert threading.current_thread().name == "controller"
        while not self.must_end.is_set():
            await asyncio.sleep(0.001)
        if self.error:
            raise self.error

    def get_result(self) -> str:
        return "result"

    def release(self) -> None:
        self.is_released = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Controller]:
    controllers: list[Controller] = []
    monkeypatch.setattr(
        module, "ElasticController", lambda **given: controllers.append(Controller(**given)) or controllers[-1]
    )
    monkeypatch.setattr(module, "WATCH_EVERY_S", 0.005)
    return controllers


def trainer(while_running: Any) -> ElasticTrainer:
    one: Any = object.__new__(ElasticTrainer)
    one._while_running = while_running
    one.scaling_config, one.run_config = None, SimpleNamespace(failure_config=None)
    return one  # type: ignore[no-any-return]


def test_the_driver_is_called_while_the_controller_runs(made: list[Controller]) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            made[0].must_end.set()

    assert trainer(look)._initialize_and_run_controller(scaling_policy="Ray's", failure_policy="Ray's") == "result"
    (controller,) = made
    assert len(looks) >= 3
    assert controller.is_released
    assert controller.environment == CONTROLLER_ENVIRONMENT
    assert isinstance(controller.arguments["scaling_policy"], StartOnce)
    assert isinstance(controller.arguments["failure_policy"], NoRetries)


@pytest.mark.parametrize("is_drivers", [True, False])
def test_r16_an_error_of_the_driver_or_controller_ends_the_run(made: list[Controller], is_drivers: bool) -> None:
    def look() -> None:
        if is_drivers:
            raise KeyboardInterrupt
        made[0].error = ValueError("odd")
        made[0].must_end.set()

    with pytest.raises(KeyboardInterrupt if is_drivers else ValueError):
        trainer(look)._initialize_and_run_controller()
    assert made[0].is_released
    assert not any(thread.name == "controller" for thread in threading.enumerate())
