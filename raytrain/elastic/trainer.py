"""The `TorchTrainer` of an elastic run: carries the controller in a thread and looks after it until it ends.

Ray Train makes the controller an actor. Here it lives in the driver's process, on whose end the run ends anyway: one
process less that can die, that takes time from the workers, and that must start before they do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ray.train.torch import TorchTrainer

from raytrain.elastic.controller import QUIET, ElasticController, EndOnErrors, NoBackendConfig, StartOnce
from raytrain.elastic.variables import variables

LOOK_EVERY_S = 0.25
END_LIMIT_S = 2.0
"""What the controller may take to end its turn when it is called off."""


class ElasticTrainer(TorchTrainer):
    """A `TorchTrainer` whose `fit` calls `while_running` several times a second.

    Args:
        while_running: called in the thread that called `fit` while the run goes on; may raise to end the run.
        All others are those of `TorchTrainer`.
    """

    def __init__(self, *args: Any, while_running: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, torch_config=NoBackendConfig(), **kwargs)
        self._while_running = while_running
        self._thread: threading.Thread | None = None

    def close(self, limit_s: float) -> None:
        """Waits until the controller's thread has ended, since Ray must not be shut down under it; up to a limit."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def _create_default_callbacks(self) -> list[Any]:
        """None of Ray's: they form process groups, shard datasets and change directories."""
        return []

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["scaling_policy"] = StartOnce(self.scaling_config)
        kwargs["failure_policy"] = EndOnErrors(self.run_config.failure_config)
        with variables(QUIET):
            controller = ElasticController(**kwargs)
        logging.getLogger("ray.train.v2").setLevel(logging.CRITICAL)  # it would print errors that are told by us
        try:
            with _in_thread(controller.run()) as (self._thread, running):
                while not concurrent.futures.wait([running], LOOK_EVERY_S).done:
                    self._while_running()
                running.result()
            return controller.get_result()
        finally:
            controller.let_go()


@contextlib.contextmanager
def _in_thread(
    work: Coroutine[Any, Any, None],
) -> Iterator[tuple[threading.Thread, concurrent.futures.Future[None]]]:
    """Runs a coroutine in a thread of its own, and calls it off at the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="controller", daemon=True)
    thread.start()
    running = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        yield thread, running
    finally:
        running.cancel()
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)  # one turn later, so that the cancelled work has ended
        thread.join(END_LIMIT_S)
        if not thread.is_alive():
            loop.close()
