"""The `TorchTrainer` of an elastic run: starts the controller and looks after it until it ends. In the driver's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from raytrain.elastic.controller import ElasticController, EndOnErrors, NoBackendConfig, StartOnce

LOOK_EVERY_S = 0.25


class ElasticTrainer(TorchTrainer):
    """A `TorchTrainer` whose `fit` calls `while_running` several times a second.

    Args:
        while_running: called in the driver's main thread while the run goes on; may raise to end the run.
        All others are those of `TorchTrainer`.
    """

    def __init__(self, *args: Any, while_running: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, torch_config=NoBackendConfig(), **kwargs)
        self._while_running = while_running

    def _create_default_callbacks(self) -> list[Any]:
        """None of Ray's: they form process groups, shard datasets and change directories."""
        return []

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["scaling_policy"] = StartOnce(self.scaling_config)
        kwargs["failure_policy"] = EndOnErrors(self.run_config.failure_config)
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        controller = ray.remote(num_cpus=0, label_selector=here)(ElasticController).remote(**kwargs)
        try:
            running = controller.run.remote()
            while not ray.wait([running], timeout=LOOK_EVERY_S)[0]:
                self._while_running()
            ray.get(running)
            return ray.get(controller.get_result.remote())
        finally:
            ray.kill(controller)
