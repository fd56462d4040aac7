"""Ray Train as its documentation has it: one group of workers, which is neither mended nor started again.

It uses public names only, and of those only what every Ray since 2.60 has. Runs in the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

VARIABLES = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
"""Read by Ray Train when `fit` begins: workers stay in their directory, and are looked at more often."""
BUDGETS = ("max_failures", "controller_failure_limit", "max_preemption_failures")
"""What Ray Train would start a group again for."""


class NoGroup(BackendConfig):
    """Takes the place of a `TorchConfig`: Ray Train forms no process group, since the workers form their own."""

    backend = "gloo"


@dataclass(frozen=True)
class Means:
    """How groups are made.

    Args:
        work: what each worker does.
        connect: the configuration of `work`, from the group's rendezvous and the number of its first worker.
        open_rendezvous: makes an `AttemptRendezvous`, from its arguments `num_workers`, `reached` and `after`.
        resources: of one worker.
        use_gpu: whether a worker has a GPU.
        storage: a directory for Ray Train, which insists on one.
        is_complete: whether the newest checkpoint is that of the last step.
    """

    work: Callable[[Mapping[str, Any]], None]
    connect: Callable[[Any, int], dict[str, Any]]
    open_rendezvous: Callable[[int, int, int], Any]
    resources: Mapping[str, float]
    use_gpu: bool
    storage: str
    is_complete: Callable[[], bool]


def plain_trainer(
    means: Means, work: Callable[[Mapping[str, Any]], None], config: dict[str, Any], num_workers: int, name: str
) -> TorchTrainer:
    """The trainer of a group.

    Args:
        means: see there.
        work: what each worker does, in the place of that of `means`.
        config: its argument.
        num_workers: of the group.
        name: below the storage, of this group alone.
    """
    return TorchTrainer(
        work,
        train_loop_config=config,
        torch_config=NoGroup(),
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu=means.use_gpu, resources_per_worker=dict(means.resources)
        ),
        run_config=RunConfig(name=name, storage_path=means.storage, failure_config=never_again()),
    )


def never_again() -> FailureConfig:
    """Without second tries of Ray Train's own, as far as this version knows of them."""
    known = {field.name for field in fields(FailureConfig)}
    return FailureConfig(**{name: 0 for name in BUDGETS if name in known})
