"""The controller runs in a thread of the driver, which looks after it, and is called off with everything that it holds."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.elastic import trainer as module
from raytrain.elastic.controller import QUIET, EndOnErrors, StartOnce
from raytrain.elastic.trainer import ElasticTrainer, _in_thread


def test_the_work_is_done_in_another_thread_and_its_result_comes_back() -> None:
    async def work() -> None:
        seen.append(threading.current_thread().name)

    seen: list[str] = []
    with _in_thread(work()) as (_, running):
        running.result(10)
    assert seen == ["controller"]
    assert not any(thread.name == "controller" for thread in threading.enumerate())


def test_an_error_of_the_work_comes_back() -> None:
    async def work() -> None:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"), _in_thread(work()) as (_, running):
        running.result(10)


def test_r16_work_that_is_called_off_ends_its_turn_and_its_thread() -> None:
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


def test_r16_work_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_LIMIT_S", 0.05)
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
    """Runs until it is told to end; notes with which variables it was made, and that it was let go."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.quiet = arguments, {name: os.environ.get(name) for name in QUIET}
        self.is_gone, self.must_end = False, threading.Event()

    async def run(self) -> None:
        while not self.must_end.is_set():
            await asyncio.sleep(0.001)

    def get_result(self) -> str:
        return "result"

    def let_go(self) -> None:
        self.is_gone = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Controller]:
    controllers: list[Controller] = []

    def make(**arguments: Any) -> Controller:
        controllers.append(Controller(**arguments))
        return controllers[-1]

    monkeypatch.setattr(module, "ElasticController", make)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.005)
    return controllers


def trainer(while_running: Any) -> ElasticTrainer:
    one: Any = object.__new__(ElasticTrainer)
    one._while_running = while_running
    one.scaling_config, one.run_config = None, SimpleNamespace(failure_config=None)
    return one  # type: ignore[no-any-return]


def test_the_driver_looks_while_the_controller_runs_and_gets_its_result(made: list[Controller]) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            made[0].must_end.set()

    assert trainer(look)._initialize_and_run_controller(scaling_policy="Ray's", failure_policy="Ray's") == "result"
    (controller,) = made
    assert len(looks) >= 3
    assert controller.is_gone
    assert controller.quiet == QUIET
    assert isinstance(controller.arguments["scaling_policy"], StartOnce)
    assert isinstance(controller.arguments["failure_policy"], EndOnErrors)


def test_r16_an_error_of_the_driver_ends_the_controller_and_its_workers(made: list[Controller]) -> None:
    def look() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(look)._initialize_and_run_controller()
    assert made[0].is_gone
    assert not any(thread.name == "controller" for thread in threading.enumerate())
