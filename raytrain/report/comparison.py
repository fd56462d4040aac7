"""Do two runs have the same result, to the last bit, and if not, where is the first difference?

A pure function of two outcomes. Compares weights and optimizer state by digest, losses by their bits, and checkpoint files
by SHA-256. Lists settings that can explain a difference; the number of workers is not one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.errors import ConfigError, differences
from raytrain.events.kinds import StateDigest
from raytrain.events.messages import count_of
from raytrain.report.outcome import Outcome

SEPARATOR = " and "

EXPLAINING = ("micro_batch", "precision", "exactness", "clip_norm", "accelerator", "threads_per_worker")
"""Settings that can change bits, besides those of the plan, which must be equal."""


@dataclass(frozen=True)
class StateDifference:
    """The first digests that differ.

    Args:
        step: number of finished steps.
        equal_until: number of finished steps of the previous, equal digest; None if there is none.
        tensors: names of the tensors that differ, in the model's order.
        num_tensors: number of all tensors.
    """

    step: int
    equal_until: int | None
    tensors: tuple[str, ...]
    num_tensors: int


@dataclass(frozen=True)
class LossDifference:
    """The first losses that differ; step numbers start at 0."""

    step: int
    losses: tuple[float, float]


@dataclass(frozen=True)
class FileCompared:
    """A file in the checkpoints of both runs after `step` finished steps."""

    step: int
    name: str
    is_equal: bool

    @property
    def is_proof(self) -> bool:
        """Whether a difference means different weights: pickled files can differ with equal content."""
        return self.name.endswith(".safetensors")


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        runs: the run directories.
        own_digests: number of digests of each run.
        digests: numbers of finished steps with a digest in both runs.
        state: first difference of these; None if there is none.
        losses: steps with a loss in both runs.
        loss: first difference of these; None if there is none.
        files: files of checkpoints of the same step.
        settings: settings that can explain a difference, as "name: one and other".
        is_bitwise: whether both runs have `run.exactness` bitwise.
    """

    runs: tuple[str, str]
    own_digests: tuple[int, int]
    digests: tuple[int, ...]
    state: StateDifference | None
    losses: tuple[int, ...]
    loss: LossDifference | None
    files: tuple[FileCompared, ...]
    settings: tuple[str, ...]
    is_bitwise: bool

    @property
    def is_identical(self) -> bool:
        """Whether everything recorded by both runs is equal; pickled files are ignored."""
        return self.state is None and self.loss is None and all(file.is_equal or not file.is_proof for file in self.files)

    @property
    def through_step(self) -> int:
        """Number of finished steps that the comparison covers: last digests, else last losses, else last files."""
        return self.digests[-1] if self.digests else self.losses[-1] + 1 if self.losses else self.files[-1].step

    def to_json(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite becomes "nan", "inf" or "-inf"."""
        state, loss = self.state, self.loss
        return {
            "identical": self.is_identical,
            "through_step": self.through_step if self.is_identical else None,
            "runs": list(self.runs),
            "digests": {
                "compared": len(self.digests),
                "first_difference": state and asdict(state),
            },
            "losses": {
                "compared": len(self.losses),
                "first_difference": loss and {"step": loss.step, "losses": [_plain(value) for value in loss.losses]},
            },
            "files": [{"step": file.step, "name": file.name, "equal": file.is_equal} for file in self.files],
            "settings": list(self.settings),
            "bitwise": self.is_bitwise,
        }


def compare(first: Outcome, second: Outcome) -> Comparison:
    """Compares what both runs have recorded.

    Raises:
        ConfigError: the plans differ, or the runs have no step in common.
    """
    _check_plans(first, second)
    digests, losses = _common(first.digests, second.digests), _common(first.losses, second.losses)
    files = tuple(_compare_files(first.files, second.files))
    if not digests and not losses and not files:
        have = " and ".join(count_of(len(run.losses), "finished step") for run in (first, second))
        raise ConfigError(
            _both(first, second), have, "the runs have a step in common", "wait until both runs have finished a step"
        )
    return Comparison(
        runs=(first.directory, second.directory),
        own_digests=(len(first.digests), len(second.digests)),
        digests=digests,
        state=_compare_digests(first.digests, second.digests, digests),
        losses=losses,
        loss=_compare_losses(first.losses, second.losses, losses),
        files=files,
        settings=tuple(differences("", _explaining(first), _explaining(second), SEPARATOR)),
        is_bitwise=all(run.metadata.get("run", {}).get("exactness") == "bitwise" for run in (first, second)),
    )


def _check_plans(first: Outcome, second: Outcome) -> None:
    if found := differences("plan", first.metadata["plan"], second.metadata["plan"], SEPARATOR):
        rule = "both runs have the same plan, because only steps with the same rows can be compared"
        fix = "compare runs with the same data, run.seed, run.global_batch and run.logical_workers"
        raise ConfigError(_both(first, second), "\n         ".join(found), rule, fix)


def _both(first: Outcome, second: Outcome) -> str:
    return f"{first.directory} and {second.directory}"


def _common(first: Mapping[int, Any], second: Mapping[int, Any]) -> tuple[int, ...]:
    return tuple(sorted(first.keys() & second.keys()))


def _compare_digests(
    first: Mapping[int, StateDigest], second: Mapping[int, StateDigest], steps: tuple[int, ...]
) -> StateDifference | None:
    for i, step in enumerate(steps):
        here, there = first[step], second[step]
        if here.digest != there.digest:
            names = list(dict.fromkeys([*here.tensors, *there.tensors]))
            other = tuple(name for name in names if here.tensors.get(name) != there.tensors.get(name))
            return StateDifference(step, steps[i - 1] if i else None, other, len(names))
    return None


def _compare_losses(
    first: Mapping[int, float], second: Mapping[int, float], steps: tuple[int, ...]
) -> LossDifference | None:
    """Compares by `repr`, so -0.0 differs from 0.0 and NaN equals NaN."""
    for step in steps:
        losses = (float(first[step]), float(second[step]))
        if repr(losses[0]) != repr(losses[1]):
            return LossDifference(step, losses)
    return None


def _compare_files(
    first: Mapping[int, Mapping[str, str]], second: Mapping[int, Mapping[str, str]]
) -> Iterable[FileCompared]:
    for step in _common(first, second):
        for name in first[step]:
            if name in second[step]:
                yield FileCompared(step, name, first[step][name] == second[step][name])


def _explaining(run: Outcome) -> dict[str, Any]:
    """What a result can depend on besides the plan."""
    settings = run.metadata.get("run", {})
    parts = {key: run.metadata.get(key) for key in ("task", "data", "num_steps", "versions")}
    return {**parts, "run": {name: settings.get(name) for name in EXPLAINING}, "workers": dict(run.environment)}


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
