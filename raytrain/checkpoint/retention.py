"""Which checkpoints may be deleted, and which one is the best?

Pure functions of manifests: nothing is read or deleted here. A score that is missing, NaN or infinite ranks worst, so
a diverged run never pushes out a good checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from raytrain.checkpoint.manifest import Checkpoint


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
        checkpoints: all that are complete, in any order.
        keep_newest: how many of the newest stay; the newest one always does.
        keep_best: how many of the best stay besides.
        best: "min:metric" or "max:metric".
        verified: name of the newest one whose digests are known to be right; it always stays. It need not be the
            newest by step: after a fallback to an older checkpoint, the damaged one that was skipped still lies there.
        pinned: names of those that stay because somebody else refers to them.
    """
    by_age = sorted(checkpoints, key=lambda checkpoint: checkpoint.order)
    keep = {checkpoint.name for checkpoint in by_age[-max(1, keep_newest) :]} | {verified, *pinned}
    keep |= {checkpoint.name for checkpoint in ranked(by_age, best)[:keep_best]}
    return [checkpoint for checkpoint in by_age if checkpoint.name not in keep]


def best_of(checkpoints: Iterable[Checkpoint], best: str) -> Checkpoint | None:
    """The best checkpoint, None if there are none; where no score is finite, the newest one."""
    return next(iter(ranked(checkpoints, best)), None)


def ranked(checkpoints: Iterable[Checkpoint], best: str) -> list[Checkpoint]:
    """From best to worst; of equal scores the newer one comes first."""
    newest_first = sorted(checkpoints, key=lambda checkpoint: checkpoint.order, reverse=True)
    return sorted(newest_first, key=lambda checkpoint: _loss(checkpoint, best))


def _loss(checkpoint: Checkpoint, best: str) -> float:
    """The score as something to be as small as possible."""
    mode, _, metric = best.partition(":")
    score = checkpoint.manifest.metrics.get(metric, math.nan)
    if not math.isfinite(score):
        return math.inf
    return -score if mode == "max" else score
