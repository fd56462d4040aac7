"""What makes a directory of files a checkpoint? Its manifest, which is written last and says what must be there.

Values and their JSON form only: nothing here touches a filesystem. Used in rank 0's process (writing) and in the driver
(listing, resuming).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from raytrain.errors import CheckpointError

FORMAT: Literal[1] = 1
"""Version of the layout of a checkpoint's directory; another one is not read, and never deleted."""

CLONED_FROM = "cloned_from"
"""Key in `Manifest.run` of a checkpoint that another run has saved, under other settings of the optimizer."""

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
        step: finished optimizer steps.
        created: Unix time in seconds.
        files: what lies beside the manifest, by name.
        metrics: evaluation metrics of these weights by name, "valid/loss" for example; may be NaN or infinite.
        run: plain values of the run that a resume compares, such as num_logical, global_batch, the data's fingerprint.
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
        """Plain values. JSON has no NaN: metrics that are not finite become "nan", "inf" and "-inf"."""
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
        """The manifest that `to_json` was called on.

        Raises:
            CheckpointError: a part is missing or is not what it should be, or the format is another version's.
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
    """A complete checkpoint: the name of its directory, its step, and its manifest."""

    name: str
    step: int
    manifest: Manifest

    @property
    def order(self) -> tuple[int, int]:
        """Sorts from old to new: by step, then by attempt."""
        return parse_name(self.name) or (self.step, 0)


@dataclass(frozen=True)
class Skipped:
    """A directory that is no checkpoint, and why."""

    name: str
    reason: str
    is_leftover: bool = False
    """True where there is no manifest: an unfinished save or an unfinished deletion, of no use to anybody."""


def directory_name(step: int, attempt: int) -> str:
    """(123, 1) -> 'step-000000123', (123, 2) -> 'step-000000123-2'."""
    return f"step-{step:09d}" + (f"-{attempt}" if attempt > 1 else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a directory's name, None if it is no checkpoint's."""
    match = _DIRECTORY.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None
