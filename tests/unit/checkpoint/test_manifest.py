"""A manifest goes to JSON and back, and anything malformed is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.checkpoint.manifest import Checkpoint, FileEntry, Manifest, directory_name, parse_name
from raytrain.errors import CheckpointError

ENTRY = FileEntry(3, "0" * 64)
GOOD: dict[str, Any] = Manifest(
    step=7, created=1.5, files={"state.pt": ENTRY}, metrics={"valid/loss": 0.25}, run={"global_batch": 64}
).to_json()


@given(
    step=st.integers(0, 10**12),
    metrics=st.dictionaries(st.text(max_size=8), st.floats(), max_size=4),
    run=st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.none(), max_size=3),
    sizes=st.lists(st.integers(0, 2**50), max_size=3),
)
def test_a_manifest_survives_strict_json(
    step: int, metrics: dict[str, float], run: dict[str, Any], sizes: list[int]
) -> None:
    files = {f"file{i}.bin": FileEntry(size, f"{i:064x}") for i, size in enumerate(sizes)}
    manifest = Manifest(step=step, created=12.5, files=files, metrics=metrics, run=run)
    text = json.dumps(manifest.to_json(), allow_nan=False)
    back = Manifest.from_json(json.loads(text))
    assert (back.step, back.created, back.files, back.run) == (step, 12.5, files, run)
    assert {k: repr(v) for k, v in back.metrics.items()} == {k: repr(v) for k, v in metrics.items()}
    assert back.size_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"step": -1}, "step"),
        ({"step": "seven"}, "step"),
        ({"step": True}, "step"),
        ({"created": math.nan}, "created"),
        ({"format": 2}, "format"),
        ({"files": [1]}, "files"),
        ({"files": {"../../etc/passwd": {"size_bytes": 1, "sha256": "0" * 64}}}, "files"),
        ({"files": {"a": {"size_bytes": -1, "sha256": "0" * 64}}}, "size_bytes"),
        ({"files": {"a": {"size_bytes": 1, "sha256": "xyz"}}}, "sha256"),
        ({"files": {"a": {"size_bytes": 1}}}, "sha256"),
        ({"metrics": {"valid/loss": "low"}}, "valid/loss"),
        ({"run": 3}, "run"),
    ],
)
def test_a_malformed_part_is_refused_by_name(change: dict[str, Any], names: str) -> None:
    with pytest.raises(CheckpointError, match=names):
        Manifest.from_json({**GOOD, **change})


@pytest.mark.parametrize("part", sorted(GOOD))
def test_a_missing_part_is_refused_by_name(part: str) -> None:
    with pytest.raises(CheckpointError, match=part):
        Manifest.from_json({key: value for key, value in GOOD.items() if key != part})


@pytest.mark.parametrize("value", [None, 3, [], "text", {}])
def test_something_that_is_no_manifest_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="not an object"):
        Manifest.from_json(value)


@given(step=st.integers(0, 10**11), attempt=st.integers(1, 50))
def test_a_directory_name_tells_step_and_attempt(step: int, attempt: int) -> None:
    assert parse_name(directory_name(step, attempt)) == (step, attempt)


def test_names_of_other_things_are_no_checkpoints() -> None:
    assert [parse_name(name) for name in ("step-12", "step-000000012-", "x-step-000000012", "step-000000012.new")] == [
        None
    ] * 4


def test_age_is_the_step_and_then_the_attempt_not_the_text() -> None:
    names = ["step-000000002", "step-000000010", "step-000000010-2", "step-000000010-10", "step-1000000000"]
    manifest = Manifest.from_json(GOOD)
    found = [Checkpoint(name, (parse_name(name) or (0, 0))[0], manifest) for name in reversed(names)]
    assert [checkpoint.name for checkpoint in sorted(found, key=lambda c: c.order)] == names
