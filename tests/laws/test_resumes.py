"""P4, P5: a run that is killed whole and started again, with other workers, is the uninterrupted one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from raytrain import rundir
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import CheckpointError
from raytrain.events.kinds import CheckpointFailed, EvaluationDone, StateRestored
from raytrain.events.log import read
from raytrain.report.audit import audit
from tests.laws.compare import assert_same, by_hand, settings
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import TASKS, WithDropout


def frequent(config: RunConfig) -> RunConfig:
    """The same result with a checkpoint every 3 steps."""
    return RunConfig(**config.model_dump() | {"checkpoint_every": 3})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["dropout", "batch norm"])
def test_r1_r9_two_resumes_in_one_epoch_with_other_workers_change_nothing(kind: str, tmp_path: Path) -> None:
    config = frequent(settings())
    for plot in (Plot(2, abandon=5), Plot(3, abandon=11), Plot(1)):
        run = LocalRun(TASKS[kind], config, tmp_path, plot)
        steps = run.run()
    assert_same(run.run_dir, steps, by_hand(kind, settings()))
    report = audit(run.run_dir)
    assert report.passed, report.lines()
    restored = [event.step for event in read(run.run_dir) if isinstance(event, StateRestored)]
    assert len(restored) == 3
    assert 0 < restored[1] <= restored[2] < 13


@pytest.mark.timeout(120)
def test_p5_when_all_workers_die_training_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    deaths = [Kill("w0", "before commit", 17), Kill("w1", "before commit", 17)]
    run = LocalRun(TASKS["dropout"], frequent(settings()), tmp_path, Plot(2, kills=deaths))
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand("dropout", settings()))
    restored = [event.step for event in read(run.run_dir) if isinstance(event, StateRestored)]
    assert restored in ([0, 15], [0, 12])  # step 15 may still have been on its way to storage


class Silent(WithDropout):
    """Its workers' storage never answers when the last checkpoint is written."""

    def model(self) -> nn.Module:
        within = rundir.within

        def silent(limit_s: float, what: str, call: Any, *args: Any, **options: Any) -> Any:
            if what.startswith("write of") and "step-000000013/" in what:
                return within(0.3, what, time.sleep, 60.0)
            return within(limit_s, what, call, *args, **options)

        rundir.within = silent
        return super().model()


@pytest.mark.timeout(60)
def test_r6_a_storage_that_never_answers_ends_the_run_with_a_message(tmp_path: Path) -> None:
    run, start = LocalRun(Silent(), settings(epochs=1, checkpoint_every=6), tmp_path, Plot(2)), time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"the last checkpoint, of step 13, was not saved: .*has not answered for 0\.3 s"
    ):
        run.run()
    assert time.monotonic() - start < 30, "it is not tried again"
    failed = [event.step for event in read(run.run_dir) if isinstance(event, CheckpointFailed)]
    assert failed == [13]
    newest = CheckpointStore(run.run_dir).newest_verified()
    assert newest is not None
    assert newest.step == 12


class SlowEvaluation(WithDropout):
    """Its evaluations take a while, and say in a file when they have begun."""

    begun: str = ""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        if self.begun:
            Path(self.begun).touch()
            time.sleep(0.2)
        return super().metrics(model, batch)


@pytest.mark.timeout(120)
def test_r16_a_stop_during_an_evaluation_saves_the_step_and_a_resume_evaluates(tmp_path: Path) -> None:
    config, begun = settings(global_batch=4, epochs=2, checkpoint_every=1000), tmp_path / "begun"
    first = LocalRun(SlowEvaluation(begun=str(begun)), config, tmp_path, Plot(2))

    def stop() -> None:
        while not first.num_finished:
            time.sleep(0.01)
        begun.unlink(missing_ok=True)  # a worker evaluates some rows before its first step
        while not begun.exists():
            time.sleep(0.01)
        first.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    first.run()
    stopper.join()
    assert [event for event in read(first.run_dir) if isinstance(event, EvaluationDone)] == [], "it was interrupted"
    newest = CheckpointStore(first.run_dir).newest_verified()
    assert newest is not None
    assert newest.step == 51, "the end of the first epoch, where the evaluation was due"

    second = LocalRun(SlowEvaluation(), config, tmp_path, Plot(1))
    steps = second.run()
    evaluated = [event.step for event in read(second.run_dir) if isinstance(event, EvaluationDone)]
    assert evaluated == [51, 102]
    assert_same(second.run_dir, steps, by_hand("dropout", settings(global_batch=4, epochs=2)))
