"""Cluster files for tests: rendered ones, edited ones, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from raytrain.cluster.file.checks import mistakes
from raytrain.cluster.file.document import Facts, Mistake, facts_of_this_machine
from raytrain.cluster.file.render import render
from raytrain.cluster.file.spec import ClusterSpec

REPOSITORY = Path(__file__).parents[4]
NEEDED: dict[str, dict[str, Any]] = {
    "aws": {},
    "gcp": {"project_id": "my-project"},
    "azure": {},
    "local": {"head_ip": "10.77.0.1", "worker_ips": ("10.77.0.2", "10.77.0.3"), "ssh_user": "root"},
    "kubernetes": {},
}
"""Settings that each provider requires."""


def rendered(provider: str, **settings: Any) -> str:
    return render(ClusterSpec.model_validate({"provider": provider, **NEEDED[provider], **settings}))


@functools.cache
def _here() -> Facts:
    return facts_of_this_machine(REPOSITORY)


def facts(**changes: Any) -> Facts:
    """Those of this machine, with exactly the files of a user who follows the instructions."""
    there = {"~/.ray/auth_token", "~/.ssh/id_ed25519", "~/.ssh/id_ed25519.pub"}
    exists = lambda path: path in there or (path[:1] != "~" and _here().exists(path))  # noqa: E731
    return dataclasses.replace(_here(), **{"exists": exists, **changes})


def found(text: str, **changes: Any) -> list[Mistake]:
    return mistakes(text, facts(**changes))


def places(text: str, **changes: Any) -> list[str]:
    """Where the mistakes are."""
    return [mistake.where for mistake in found(text, **changes)]


def edited(text: str, old: str, new: str, count: int = 1) -> str:
    assert text.count(old) == count, f"{old!r} is there {text.count(old)} times"
    return text.replace(old, new)
