"""Did two runs come to the same result, to the last bit, and if not, where do they part?

Pure: two outcomes in, a verdict out. Weights and optimizer are compared by their digests, losses by their bits, and the
files of checkpoints by their SHA-256. Workers do not count, settings that could explain a difference are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.errors import ConfigError
from raytrain.events.kinds import StateDigest
from raytrain.events.words import count_of
from raytrain.report.outcome import Outcome

EXPLAINING = ("micro_batch", "precision", "exactness", "clip_norm", "accelerator", "threads_per_worker")
"""Settings of a run that can change bits, besides those of the plan, which must be equal."""


@dataclass(frozen=True)
class StateDifference:
    """The first digests that differ.

    Args:
        step: finished steps.
        equal_until: finished steps of the last digests before it, which are equal; None if it is the first.
        tensors: names of what differs, in the model's order.
        num_tensors: how many names there are.
    """

    step: int
    equal_until: int | None
    tensors: tuple[str, ...]
    num_tensors: int


@dataclass(frozen=True)
class LossDifference:
    """The first losses that differ; the step counts from 0."""

    step: int
    losses: tuple[float, float]


@dataclass(frozen=True)
class FileCompared:
    """A file that the checkpoints of both runs after `step` finished steps have."""

    step: int
    name: str
    is_equal: bool

    @property
    def is_proof(self) -> bool:
        """Whether a difference means other weights: pickled files may differ in form alone."""
        return self.name.endswith(".safetensors")


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what came out.

    Args:
        runs: the directories.
        own_digests: how many digests each run has.
        digests: finished steps after which both have one.
        state: where these differ first; None if they do not.
        losses: steps of which both have the loss.
        loss: where these differ first; None if they do not.
        files: files of checkpoints of equal steps.
        settings: what could explain a difference, in words.
        is_bitwise: whether both runs promise that their workers do not change a bit.
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
        """As far as is known; files that may differ in form alone do not count."""
        return self.state is None and self.loss is None and all(file.is_equal or not file.is_proof for file in self.files)

    @property
    def through_step(self) -> int:
        """Finished steps through which all that was compared says something: the last digests, else the last losses."""
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
    """Compares what two runs have in common.

    Raises:
        ConfigError: their plans differ, or no step is known of both, so there is nothing to compare.
    """
    _check_plans(first, second)
    digests, losses = _common(first.digests, second.digests), _common(first.losses, second.losses)
    files = tuple(_compare_files(first.files, second.files))
    if not digests and not losses and not files:
        have = " and ".join(count_of(len(run.losses), "finished step") for run in (first, second))
        raise ConfigError(
            _both(first, second), have, "the runs have a step in common", "wait until both have finished a step"
        )
    return Comparison(
        runs=(first.directory, second.directory),
        own_digests=(len(first.digests), len(second.digests)),
        digests=digests,
        state=_compare_digests(first.digests, second.digests, digests),
        losses=losses,
        loss=_compare_losses(first.losses, second.losses, losses),
        files=files,
        settings=tuple(_differences(_explaining(first), _explaining(second))),
        is_bitwise=all(run.facts.get("run", {}).get("exactness") == "bitwise" for run in (first, second)),
    )


def _check_plans(first: Outcome, second: Outcome) -> None:
    if differences := _differences(first.facts["plan"], second.facts["plan"], "plan"):
        rule = "steps are compared where they have the same rows in the same order, so the plans are equal"
        fix = "compare runs of the same data, run.seed, run.global_batch and run.logical_workers"
        raise ConfigError(_both(first, second), "\n         ".join(differences), rule, fix)


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
    """By their shortest exact texts: these tell -0.0 from 0.0, and NaN is equal to NaN."""
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
    """What a result may depend on besides the plan."""
    settings = run.facts.get("run", {})
    parts = {key: run.facts.get(key) for key in ("task", "data", "num_steps", "versions")}
    return {**parts, "run": {name: settings.get(name) for name in EXPLAINING}, "workers": dict(run.conditions)}


def _differences(first: Any, second: Any, name: str = "") -> list[str]:
    """What differs, as "name: one and other"."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys, prefix = dict.fromkeys([*first, *second]), f"{name}." if name else ""
        return [line for key in keys for line in _differences(first.get(key), second.get(key), f"{prefix}{key}")]
    return [] if first == second else [f"{name}: {_short(first)} and {_short(second)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
