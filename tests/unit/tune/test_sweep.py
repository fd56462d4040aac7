"""The settings of a sweep's runs, and its signals: the first one stops Ray Tune, and all handlers are restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, RunInUseError
from raytrain.launch import lock
from raytrain.sweep_config import SweepConfig
from raytrain.tune.sweep import STOP_TUNE, Sweep, run_config, stop_signals
from tests.support.tasks import Regression

NUMBERS = (signal.SIGINT, signal.SIGTERM, STOP_TUNE, signal.SIGHUP)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = handlers()
    yield
    signal.signal(STOP_TUNE, before[2])
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_ray_tune_and_the_second_interrupts(number: signal.Signals) -> None:
    calls: list[int] = []
    with stop_signals() as stop:
        stop.listen()
        signal.signal(STOP_TUNE, lambda number, frame: calls.append(number))
        signal.raise_signal(number)
        assert (stop.signal, calls) == (number, [STOP_TUNE])
        signal.raise_signal(number)  # of the same moment, as `timeout` sends it
        assert (stop.signal, calls) == (number, [STOP_TUNE])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        assert (stop.signal, calls) == (number, [STOP_TUNE])


@pytest.mark.parametrize("left", [signal.SIG_DFL, lambda number, frame: None], ids=["nothing", "an earlier sweep's"])
def test_a_signal_before_ray_tune_runs_ends_the_driver(left: Any) -> None:
    signal.signal(STOP_TUNE, left)
    with stop_signals() as stop:
        stop.listen()
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert (stop.signal, caught.value.code) == (signal.SIGTERM, 143)
    with stop_signals() as stop:
        stop.listen()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_error_restores_the_handlers_that_were_replaced_twice() -> None:
    before = handlers()

    def fails() -> None:
        with stop_signals() as stop:
            stop.listen()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as `ray.init` does
            stop.listen()
            assert signal.getsignal(signal.SIGTERM) == stop.on_signal
            signal.signal(STOP_TUNE, signal.SIG_IGN)  # as Ray Tune does
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert handlers() == before


def test_r10_a_second_driver_of_a_sweep_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.1)
    config = RunConfig(name="sweep", storage=str(tmp_path), best="min:valid/loss")
    sweep = Sweep(Regression, {"lr": tune.uniform(0.1, 1)}, config=config)
    with lock.locked(sweep.directory), pytest.raises(RunInUseError, match="in use by the driver with process"):
        sweep.fit()


def test_outside_the_main_thread_no_handler_is_installed() -> None:
    before, found = handlers(), list[Any]()

    def elsewhere() -> None:
        with stop_signals() as stop:
            stop.listen()
            found.append(handlers())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]


def test_the_runs_have_the_sweeps_name_metric_and_trial_workers() -> None:
    config = run_config(Regression, RunConfig(), SweepConfig(metric="valid/mae", mode="max"), (1, 3))
    assert (config.name, config.best, config.workers) == ("regression-sweep", "max:valid/mae", (1, 3))
    with pytest.raises(ConfigError, match="go together"):
        run_config(Regression, RunConfig(), SweepConfig(metric="valid/mae"), None)
