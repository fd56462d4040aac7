"""What retention may delete, as properties over any history of scores."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.checkpoint.manifest import Checkpoint, Manifest, directory_name
from raytrain.checkpoint.retention import best_of, ranked, to_delete

BEST = "min:valid/loss"


def checkpoint(step: int, score: float | None, metric: str = "valid/loss") -> Checkpoint:
    metrics = {} if score is None else {metric: score}
    return Checkpoint(directory_name(step, 1), step, Manifest(step=step, created=0.0, files={}, metrics=metrics, run={}))


def history(*scores: float | None) -> list[Checkpoint]:
    return [checkpoint(10 * (i + 1), score) for i, score in enumerate(scores)]


def steps(found: list[Checkpoint]) -> list[int]:
    return [one.step for one in found]


scores = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.5, 1.0])
histories = st.lists(scores, max_size=8).map(lambda values: history(*values)).flatmap(st.permutations)


def key(one: Checkpoint, sign: int) -> tuple[bool, float, int]:
    score = one.manifest.metrics.get("valid/loss", math.nan)
    finite = math.isfinite(score)
    return (not finite, sign * score if finite else 0.0, -one.step)


@given(histories, st.integers(1, 4), st.integers(0, 4), st.sampled_from(["min", "max"]), st.data())
def test_r8_exactly_the_newest_the_best_and_the_verified_stay(
    found: list[Checkpoint], keep_newest: int, keep_best: int, mode: str, data: st.DataObject
) -> None:
    verified = data.draw(st.sampled_from([one.name for one in found] or [""]))
    deleted = to_delete(found, keep_newest, keep_best, f"{mode}:valid/loss", verified=verified)
    newest = sorted(found, key=lambda one: -one.step)[:keep_newest]
    best = sorted(found, key=lambda one: key(one, 1 if mode == "min" else -1))[:keep_best]
    stay = {one.name for one in [*newest, *best]} | {verified}
    assert {one.name for one in deleted} == {one.name for one in found} - stay
    assert steps(deleted) == sorted(steps(deleted))


@given(histories, st.integers(0, 2), st.sampled_from(["min", "max"]))
def test_r8_deleting_twice_deletes_nothing_more(found: list[Checkpoint], keep_best: int, mode: str) -> None:
    best = f"{mode}:valid/loss"
    left = [one for one in found if one not in to_delete(found, 2, keep_best, best)]
    assert to_delete(left, 2, keep_best, best) == []


@given(histories)
def test_r8_the_newest_stays_even_if_nothing_is_to_be_kept(found: list[Checkpoint]) -> None:
    deleted = to_delete(found, 0, 0, BEST)
    assert steps(deleted) == sorted(steps(found))[:-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_r8_a_score_that_is_missing_or_not_finite_ranks_worst(bad: float | None, mode: str) -> None:
    found = history(bad, 1e300, -1e300, bad)
    assert set(steps(ranked(found, f"{mode}:valid/loss")[:2])) == {20, 30}


def test_r8_of_equal_scores_the_newer_is_better() -> None:
    found = history(1.0, 0.5, 0.5, 0.7)
    assert steps(ranked(found, BEST)) == [30, 20, 40, 10]
    assert best_of(found, BEST) == found[2]


def test_r8_the_best_of_the_whole_history_stays_however_old_it_is() -> None:
    found = history(0.1, *[0.9] * 20)
    assert 10 not in steps(to_delete(found, 2, 1, BEST))


def test_r8_the_direction_is_part_of_best() -> None:
    found = history(0.2, 0.9, 0.4)
    assert best_of(found, "max:valid/loss") == found[1]
    assert best_of(found, "min:valid/loss") == found[0]


def test_a_metric_name_may_hold_a_colon() -> None:
    found = [checkpoint(1, 0.5, "a:b"), checkpoint(2, 0.7, "a:b")]
    assert best_of(found, "min:a:b") == found[0]


def test_without_scores_the_best_is_the_newest_and_without_checkpoints_there_is_none() -> None:
    best = best_of(history(None, math.nan), BEST)
    assert best is not None
    assert best.step == 20
    assert best_of([], BEST) is None


def test_r8_after_a_fallback_the_verified_one_stays_though_a_damaged_one_is_newer() -> None:
    damaged_is_newest = history(0.5, 0.4, 0.3)
    assert steps(to_delete(damaged_is_newest, 1, 0, BEST, verified=damaged_is_newest[1].name)) == [10]


@given(histories, st.sets(st.sampled_from([directory_name(10 * step, 1) for step in range(1, 12)])), st.integers(0, 2))
def test_r8_one_to_which_somebody_refers_stays_and_changes_nothing_for_the_others(
    found: list[Checkpoint], pinned: set[str], keep_best: int
) -> None:
    deleted = to_delete(found, 2, keep_best, BEST, pinned=pinned)
    assert steps(deleted) == steps([one for one in to_delete(found, 2, keep_best, BEST) if one.name not in pinned])


def test_one_to_which_somebody_refers_stays() -> None:
    found = history(None, None, None, None)
    kept = to_delete(found, keep_newest=1, keep_best=0, best="min:valid/loss", pinned={found[1].name})
    assert found[1] not in kept
    assert len(kept) == 2
