"""What is a checkpoint, which one is the best, and which ones may be deleted?

A directory is a checkpoint if it has a manifest, written last, that lists its files. Pure values and functions: nothing
here touches a filesystem. A score that is missing, NaN or infinite ranks worst, so a diverged run never displaces a good
checkpoint. Used in rank 0's process (writing) and in the driver (listing, resuming).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from raytrain.config import parse_best
from raytrain.errors import CheckpointError

FORMAT: Literal[1] = 1
"""Version of the layout of a checkpoint directory; other versions are neither read nor deleted."""

CLONED_FROM = "cloned_from"
"""Key in `Manifest.run` of a checkpoint that another run saved, with other optimizer settings."""

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]

_DIRECTORY = re.compile(r"step-(\d{9,})(?:-(\d+))?")


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 (lower-case hexadecimal) of one file of a checkpoint."""

    size_bytes: Annotated[int, Field(strict=True, ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Args:
        step: number of finished optimizer steps.
        created: Unix time in seconds.
        files: the other files of the directory, by name.
        metrics: evaluation metrics of these weights by name, for example "valid/loss"; may be NaN or infinite.
        run: plain values of the run that a resume compares, for example num_logical.
        format: version of the layout.
    """

    step: Annotated[int, Field(strict=True, ge=0)]
    created: Annotated[float, Field(allow_inf_nan=False)]
    files: Mapping[FileName, FileEntry]
    metrics: Mapping[str, float]
    run: Mapping[str, Any]
    format: Literal[1] = FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(entry.size_bytes for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values. JSON has no NaN: non-finite metrics become "nan", "inf" and "-inf"."""
        metrics = {key: float(value) for key, value in self.metrics.items()}
        return {
            "format": self.format,
            "step": self.step,
            "created": self.created,
            "files": {name: asdict(entry) for name, entry in self.files.items()},
            "metrics": {key: value if math.isfinite(value) else str(value) for key, value in metrics.items()},
            "run": dict(self.run),
        }

    @classmethod
    def from_json(cls, value: object) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            CheckpointError: a field is missing or invalid, or the format is another version.
        """
        if not isinstance(value, dict) or "format" not in value:
            raise CheckpointError("the manifest is not an object with a format")
        try:
            return _MANIFEST.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"the manifest's {path} is {first['input']!r}: {first['msg']}") from None


_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: directory name, number of finished steps, and manifest."""

    name: str
    step: int
    manifest: Manifest

    @property
    def order(self) -> tuple[int, int]:
        """Sort key from old to new: step, then attempt."""
        return parse_name(self.name) or (self.step, 0)


@dataclass(frozen=True)
class Skipped:
    """A directory that is not a checkpoint, and the reason."""

    name: str
    reason: str
    is_leftover: bool = False
    """Whether it has no manifest: an unfinished save or deletion, which can be removed."""


def directory_name(step: int, attempt: int) -> str:
    """(123, 1) -> 'step-000000123', (123, 2) -> 'step-000000123-2'."""
    return f"step-{step:09d}" + (f"-{attempt}" if attempt > 1 else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a directory name; None if it is not the name of a checkpoint."""
    match = _DIRECTORY.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def to_delete(
    checkpoints: Iterable[Checkpoint],
    keep_newest: int,
    keep_best: int,
    best: str,
    verified: str = "",
    pinned: Collection[str] = (),
) -> list[Checkpoint]:
    """The checkpoints that are neither among the newest nor among the best, oldest first.

    Args:
        checkpoints: all complete checkpoints, in any order.
        keep_newest: number of newest checkpoints to keep; at least one is kept.
        keep_best: number of best checkpoints to keep.
        best: "min:metric" or "max:metric".
        verified: name of the newest checkpoint with verified digests, which is kept. It may not be the newest by step:
            after a fallback to an older checkpoint, the damaged newer one still exists.
        pinned: names of checkpoints to keep because other runs refer to them.
    """
    by_age = sorted(checkpoints, key=lambda checkpoint: checkpoint.order)
    keep = {checkpoint.name for checkpoint in by_age[-max(1, keep_newest) :]} | {verified, *pinned}
    keep |= {checkpoint.name for checkpoint in ranked(by_age, best)[:keep_best]}
    return [checkpoint for checkpoint in by_age if checkpoint.name not in keep]


def best_of(checkpoints: Iterable[Checkpoint], best: str) -> Checkpoint | None:
    """The best checkpoint; the newest one if no score is finite, None if there is none."""
    return next(iter(ranked(checkpoints, best)), None)


def ranked(checkpoints: Iterable[Checkpoint], best: str) -> list[Checkpoint]:
    """From best to worst; the newer one first if scores are equal."""
    newest_first = sorted(checkpoints, key=lambda checkpoint: checkpoint.order, reverse=True)
    return sorted(newest_first, key=lambda checkpoint: _loss(checkpoint, best))


def _loss(checkpoint: Checkpoint, best: str) -> float:
    """The score with the sign with which smaller is better; infinite if it is not finite."""
    mode, metric = parse_best(best)
    score = checkpoint.manifest.metrics.get(metric, math.nan)
    if not math.isfinite(score):
        return math.inf
    return -score if mode == "max" else score
