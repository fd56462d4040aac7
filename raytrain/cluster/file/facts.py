"""What must the checks know that is not in the file? What this machine has, and what the run and this project need.

`facts_of_this_machine` is the one place that looks; the checks get a `Facts` and stay pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

PYTHONS, TORCHES = ">=3.10,<3.14", ">=2.8,<2.14"
"""Versions that this project works with; a test compares them with pyproject.toml."""


@dataclass(frozen=True)
class Facts:
    """What is known besides the file.

    Args:
        exists: whether a path, as the file writes it, is there on this machine.
        ray: version of the Ray here; nodes get the same one.
        schema: Ray's own, of a cluster file.
        defaults: what Ray puts where the file says nothing, by provider.
        workers: smallest and largest number of workers of the run, if it is known.
    """

    exists: Callable[[str], bool]
    ray: str
    schema: Mapping[str, Any]
    defaults: Mapping[str, Mapping[str, Any]]
    workers: tuple[int, int] | None = None


def facts_of_this_machine(directory: Path, workers: tuple[int, int] | None = None) -> Facts:
    """Looks at this machine and at the Ray that is installed here.

    Args:
        directory: relative paths in the file start here: where `ray up` will be run.
        workers: smallest and largest number of workers of the run, if it is known.
    """
    import json

    import ray
    import ray.autoscaler
    import yaml

    home = Path(ray.autoscaler.__file__).parent
    files = {kind: home / kind / "defaults.yaml" for kind in ("aws", "gcp", "azure", "local", "aliyun", "vsphere")}
    return Facts(
        exists=partial(_exists, directory),
        ray=ray.__version__,
        schema=json.loads((home / "ray-schema.json").read_text(encoding="utf-8")),
        defaults={kind: yaml.safe_load(file.read_text(encoding="utf-8")) for kind, file in files.items() if file.exists()},
        workers=workers,
    )


def _exists(directory: Path, path: str) -> bool:
    try:
        return (directory / Path(path).expanduser()).exists()
    except (OSError, RuntimeError, ValueError):  # too long, a user that is not there, no path at all
        return False
