"""P3 to P6 in restart mode: the same rows and results, from the newest verified checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

import raytrain
from raytrain.elastic import contract, internals, restart
from raytrain.errors import TaskError
from raytrain.events.curve import curve
from raytrain.events.kinds import CheckpointSaved, GenerationFormed, StateRestored, WorkerDrained, WorkerLost, WorkerStarting
from tests.cluster.script import Script, Story, run, seen, signal_rank, then, trained
from tests.laws.compare import settings
from tests.support.tasks import Regression

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("small_ray")]


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_p5_restart_mode_grows_without_loss_and_a_loss_resumes_a_checkpoint(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(internals, "ReplicaGroup")
    monkeypatch.setattr(restart, "GROW_SETTLE_S", 1.0)
    assert contract.violations() == ["ReplicaGroup does not exist"]
    others = placement_group([{"CPU": 1.5}])
    ray.get(others.ready())
    grow = [trained(1), then(lambda _: remove_placement_group(others)), trained(2)]
    story, texts = Story(gate, *grow, seen(CheckpointSaved), signal_rank(1), seen(WorkerLost), trained(2)), []
    story.status = lambda text, now: texts.append(text)  # type: ignore[method-assign]
    _, events = run(tmp_path, story, gate, workers=(1, 2))
    assert len([text for text in texts if text.startswith("warning:")]) == 1

    begun, grown, *_ = of(StateRestored, events)
    assert begun.checkpoint == ""
    assert max(curve(events[: events.index(grown)])) + 1 == grown.step, "the group saved its last step before it ended"
    assert of(WorkerDrained, events)[0].worker == "w0"
    lost = of(WorkerLost, events)[0]
    assert lost.reason
    after = of(StateRestored, events[events.index(lost) :])[0]
    assert after.checkpoint == of(CheckpointSaved, events[: events.index(after)])[-1].checkpoint
    formed = of(GenerationFormed, events)
    workers = [{member.worker for member in each.members} for each in formed]
    assert not workers[0] & workers[-1]
    numbers = [each.generation for each in formed]
    assert numbers == sorted(set(numbers))


class Broken(Regression):
    def loss(self, model: Any, batch: Any) -> Any:
        raise KeyError("boom")


def test_r3_an_error_of_the_task_ends_the_run_with_its_traceback_and_without_a_retry(tmp_path: Path) -> None:
    class Watching(Script):
        def act(self) -> None:
            return None

    script, config = Watching(), settings(storage=str(tmp_path), workers=(2, 2), elasticity="restart")
    with pytest.raises(TaskError, match="KeyError: 'boom'"):
        raytrain.Trainer(Broken(), config).fit(script)
    assert len(script.of(WorkerStarting)) == 2
