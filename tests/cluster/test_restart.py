"""P3 to P6 where each change restarts all workers: the same rows and results, from the newest verified checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raytrain.elastic import contract, internals, room
from raytrain.events.curve import curve
from raytrain.events.kinds import CheckpointSaved, GenerationFormed, StateRestored, WorkerLeft, WorkerLost
from tests.cluster.script import Story, run, seen, signal_rank, then, trained

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("small_ray")]


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_p5_a_killed_worker_restarts_all_from_the_newest_checkpoint(tmp_path: Path, gate: Path) -> None:
    story = Story(gate, trained(2), seen(CheckpointSaved), signal_rank(1), seen(WorkerLost), trained(2))
    _, events = run(tmp_path, story, gate, workers=(1, 2), elasticity="restart")
    (lost,), (begun, again) = of(WorkerLost, events), of(StateRestored, events)
    assert lost.worker in ("w0", "w1")
    assert lost.reason
    before = events[: events.index(again)]
    assert again.checkpoint == of(CheckpointSaved, before)[-1].checkpoint
    assert begun.checkpoint == ""
    first, second = of(GenerationFormed, events)
    assert second.generation > first.generation
    assert {m.worker for m in second.members} == {"w2", "w3"}


def test_another_ray_restarts_by_itself_and_a_larger_group_loses_no_step(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(internals, "ReplicaGroup")
    monkeypatch.setattr(room, "GROW_SETTLE_S", 1.0)
    assert contract.violations() == ["there is no ReplicaGroup"]
    others = placement_group([{"CPU": 1.5}])
    ray.get(others.ready())

    story = Told(gate, trained(1), then(lambda _: remove_placement_group(others)), trained(2))
    _, events = run(tmp_path, story, gate, workers=(1, 2))
    assert len([text for text in story.texts if text.startswith("warning:")]) == 1
    for again in of(StateRestored, events)[1:]:
        before = events[: events.index(again)]
        assert story.finished_in(before) == again.step, "the group saved its last step before it ended"
    assert [left.worker for left in of(WorkerLeft, events)][:1] == ["w0"]
    assert not of(WorkerLost, events)


class Told(Story):
    """Also keeps what the driver says."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.texts: list[str] = []

    def say(self, text: str, now: float) -> None:
        self.texts.append(text)

    @staticmethod
    def finished_in(events: list[Any]) -> int:
        """How many steps these events know of."""
        return max(curve(events)) + 1
