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


def test_p5_another_ray_restarts_by_itself_a_larger_group_loses_no_step_and_a_loss_goes_back_to_a_checkpoint(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(internals, "ReplicaGroup")
    monkeypatch.setattr(room, "GROW_SETTLE_S", 1.0)
    assert contract.violations() == ["there is no ReplicaGroup"]
    others = placement_group([{"CPU": 1.5}])
    ray.get(others.ready())

    grow = [trained(1), then(lambda _: remove_placement_group(others)), trained(2)]
    story = Told(gate, *grow, seen(CheckpointSaved), signal_rank(1), seen(WorkerLost), trained(2))
    _, events = run(tmp_path, story, gate, workers=(1, 2))
    assert len([text for text in story.texts if text.startswith("warning:")]) == 1

    first_loss = events.index(of(WorkerLost, events)[0])
    begun, *grown = of(StateRestored, events[:first_loss])
    assert begun.checkpoint == ""
    for again in grown:
        assert story.finished_in(events[: events.index(again)]) == again.step, (
            "the group saved its last step before it ended"
        )
    assert of(WorkerLeft, events)[0].worker == "w0"

    lost, after = events[first_loss], of(StateRestored, events[first_loss:])[0]
    assert lost.reason
    assert after.checkpoint == of(CheckpointSaved, events[: events.index(after)])[-1].checkpoint
    numbers = [formed.generation for formed in of(GenerationFormed, events)]
    assert numbers == sorted(numbers)
    workers = [{member.worker for member in formed.members} for formed in of(GenerationFormed, events)]
    assert not workers[0] & workers[-1], "all have begun again"


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
