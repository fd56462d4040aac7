"""R8: the newest, the best and the pinned checkpoints stay; and a manifest is valid or refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.checkpoint.manifest import (
    Checkpoint,
    FileEntry,
    Manifest,
    best_of,
    directory_name,
    parse_name,
    ranked,
    to_delete,
)
from raytrain.errors import CheckpointError

BEST = "min:valid/loss"
GOOD: dict[str, Any] = Manifest(
    step=7, created=1.5, files={"state.pt": FileEntry(3, "0" * 64)}, metrics={"valid/loss": 0.25}, run={"batch": 64}
).to_json()


@settings(max_examples=40)
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
    back = Manifest.from_json(json.loads(json.dumps(manifest.to_json(), allow_nan=False)))
    assert (back.step, back.created, back.files, back.run) == (step, 12.5, files, run)
    assert {k: repr(v) for k, v in back.metrics.items()} == {k: repr(v) for k, v in metrics.items()}
    assert back.size_bytes == sum(sizes)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"created": math.nan}, "created"),
        ({"format": 2}, "format"),
        ({"files": [1]}, "files"),
        ({"files": {"../../etc/passwd": {"size_bytes": 1, "sha256": "0" * 64}}}, "files"),
        ({"files": {"a": {"size_bytes": -1, "sha256": "0" * 64}}}, "size_bytes"),
        ({"files": {"a": {"size_bytes": 1, "sha256": "xyz"}}}, "sha256"),
        ({"metrics": {"valid/loss": "low"}}, "valid/loss"),
        *[({key: None}, key) for key in GOOD],
    ],
)
def test_a_missing_or_malformed_field_is_refused_by_name(change: dict[str, Any], names: str) -> None:
    changed = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=names):
        Manifest.from_json(changed)
    with pytest.raises(CheckpointError, match="not an object"):
        Manifest.from_json([GOOD])


def test_directory_names_sort_by_step_then_attempt_and_others_are_not_checkpoints() -> None:
    names = [directory_name(*age) for age in ((2, 1), (10, 1), (10, 2), (10, 10), (10**9, 1))]
    assert names[1:3] == ["step-000000010", "step-000000010-2"]
    found = [Checkpoint(name, (parse_name(name) or (0, 0))[0], Manifest.from_json(GOOD)) for name in reversed(names)]
    assert [checkpoint.name for checkpoint in sorted(found, key=lambda c: c.order)] == names
    assert {parse_name(name) for name in ("step-12", "step-000000012-", "x-step-000000012", "step-000000012.new")} == {None}


def history(*scores: float | None) -> list[Checkpoint]:
    manifests = [
        Manifest(step=10 * (i + 1), created=0.0, files={}, metrics={} if score is None else {"valid/loss": score}, run={})
        for i, score in enumerate(scores)
    ]
    return [Checkpoint(directory_name(manifest.step, 1), manifest.step, manifest) for manifest in manifests]


def steps(found: list[Checkpoint]) -> list[int]:
    return [one.step for one in found]


scores = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.5, 1.0])
histories = st.lists(scores, max_size=8).map(lambda values: history(*values)).flatmap(st.permutations)


def rank(one: Checkpoint, mode: str) -> tuple[bool, float, int]:
    score = one.manifest.metrics.get("valid/loss", math.nan)
    finite = math.isfinite(score)
    return (not finite, (1 if mode == "min" else -1) * score if finite else 0.0, -one.step)


@settings(max_examples=60)
@given(histories, st.integers(0, 4), st.integers(0, 4), st.sampled_from(["min", "max"]), st.data())
def test_r8_exactly_the_newest_the_best_the_verified_and_the_pinned_stay(
    found: list[Checkpoint], keep_newest: int, keep_best: int, mode: str, data: st.DataObject
) -> None:
    names = st.sampled_from([one.name for one in found] or [""])
    limits, verified, pinned = (keep_newest, keep_best, f"{mode}:valid/loss"), data.draw(names), data.draw(st.sets(names))
    deleted = to_delete(found, *limits, verified=verified, pinned=pinned)
    newest = sorted(found, key=lambda one: -one.step)[: max(1, keep_newest)]
    best = sorted(found, key=lambda one: rank(one, mode))[:keep_best]
    assert {one.name for one in found} - {one.name for one in deleted} == (
        {one.name for one in [*newest, *best]} | {verified, *pinned} & {one.name for one in found}
    )
    assert steps(deleted) == sorted(steps(deleted))
    left = [one for one in found if one not in deleted]
    assert to_delete(left, *limits, verified=verified, pinned=pinned) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_r8_a_missing_or_non_finite_score_ranks_worst(bad: float | None, mode: str) -> None:
    assert set(steps(ranked(history(bad, 1e300, -1e300, bad), f"{mode}:valid/loss")[:2])) == {20, 30}


@pytest.mark.parametrize(
    ("values", "best", "step"),
    [
        ((0.2, 0.9, 0.4), BEST, 10),
        ((0.2, 0.9, 0.4), "max:valid/loss", 20),
        ((1.0, 0.5, 0.5), BEST, 30),
        ((None, math.nan), BEST, 20),
        ((0.1, *[0.9] * 20), BEST, 10),
        ((0.5, 0.7), "min:a:b", 20),
    ],
)
def test_r8_the_best_is_over_the_whole_history_and_else_the_newest(values: list[float], best: str, step: int) -> None:
    found = best_of(history(*values), best)
    assert found is not None
    assert found.step == step
    assert best_of([], best) is None
