"""Ctrl-C and SIGTERM: a checkpoint, a plain statement, the right exit code, and nothing left behind."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytrain.events.kinds import CheckpointSaved, Event, RunEnded, StateRestored, StepsDone, WorkerStarting
from tests.cluster.job_process import JOB, JobProcess, events_of, wait_until_gone

TWICE = (
    JOB.partition("if __name__")[0]
    + """
if __name__ == "__main__":
    for name, step_s in (("first", "100"), ("second", "0")):
        os.environ["STEP_S"] = step_s
        config = raytrain.RunConfig(name=name, global_batch=4, cpus_per_worker=0.5, stop_grace_s=60)
        print("fit", name, flush=True)
        start = time.time()
        result = raytrain.Trainer(Line(), config).fit(Told())
        print(result.outcome, result.step, result.stopped_by, time.time() - start, flush=True)
"""
)
"""Two runs after one another; who watches says when workers train."""

TOLD = """
class Told:
    def on_events(self, events):
        for event in events:
            print(event.kind, getattr(event, "message", ""), flush=True)

    def tick(self, now):
        pass

    def say(self, text, now):
        pass

"""


@dataclass
class Stopped:
    """A job that was stopped by a signal: what it said, and how long it took to end."""

    job: JobProcess
    code: int
    took_s: float
    events: list[Event]

    @property
    def ended(self) -> RunEnded:
        (event,) = [event for event in self.events if isinstance(event, RunEnded)]
        return event


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def start(script: Path, name: str, step_s: float, *flags: str) -> JobProcess:
    words = ["--run.name", name, "--run.epochs", "10", "--run.workers", "1:2", "--run.stop-grace-s", "10", *flags]
    return JobProcess(script, *words, environment={"STEP_S": str(step_s)})


def finish(job: JobProcess, script: Path, name: str, asked: float) -> Stopped:
    """Waits for the end of a job that got its signal at `asked`, monotonic seconds."""
    code = job.finish()
    return Stopped(job, code, time.monotonic() - asked, events_of(script.parent / "runs", name))


@pytest.fixture(scope="module")
def stopped(script: Path) -> dict[str, Stopped]:
    """Two runs on one machine at the same time; each stopped in its own way, in the middle of training."""
    names = {"by-sigterm": signal.SIGTERM, "by-ctrl-c": signal.SIGINT}
    jobs = {name: start(script, name, 0.5) for name in names}
    for job in jobs.values():
        job.read_until(" step ")
    asked = time.monotonic()
    for name, job in jobs.items():
        job.signal(names[name], group=name == "by-ctrl-c")
    return {name: finish(job, script, name, asked) for name, job in jobs.items()}


@pytest.mark.parametrize(("name", "code"), [("by-sigterm", 143), ("by-ctrl-c", 130)])
def test_r16_a_signal_stops_the_run_at_a_step_with_a_checkpoint(stopped: dict[str, Stopped], name: str, code: int) -> None:
    run = stopped[name]
    assert (run.code, run.ended.outcome) == (code, "stopped"), run.job.out + run.job.err
    assert run.took_s < 10
    steps = max(event.first_step + len(event.losses) for event in run.events if isinstance(event, StepsDone))
    saved = [event.step for event in run.events if isinstance(event, CheckpointSaved)]
    assert 0 < steps < 40
    assert saved[-1] == steps == run.ended.step


@pytest.mark.parametrize("name", ["by-sigterm", "by-ctrl-c"])
def test_r16_it_says_what_was_saved_and_how_to_go_on_in_whole_lines(stopped: dict[str, Stopped], name: str) -> None:
    job, step = stopped[name].job, stopped[name].ended.step
    assert f"stopped      step {step} of 40" in job.out
    assert f"start the same job again: it goes on from step {step}" in job.out
    assert "\r" not in job.out
    assert "\x1b" not in job.out
    assert job.err == ""
    assert len([line for line in job.out.splitlines() if " loss " in line]) <= 2, "one line of progress per interval"


@pytest.mark.parametrize("name", ["by-sigterm", "by-ctrl-c"])
def test_r16_no_worker_died_of_the_signal_and_no_process_is_left(stopped: dict[str, Stopped], name: str) -> None:
    run = stopped[name]
    assert "worker_lost" not in [event.kind for event in run.events]
    assert wait_until_gone(run.job, 5) == []
    pids = [event.pid for event in run.events if isinstance(event, WorkerStarting)]
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@dataclass
class Later:
    """What came after: the same command again, and another process that runs twice; both at the same time."""

    again: JobProcess
    again_code: int
    twice: JobProcess
    twice_code: int


@pytest.fixture(scope="module")
def later(stopped: dict[str, Stopped], script: Path) -> Later:
    path = script.with_name("twice.py")
    path.write_text(TWICE.replace("if __name__", TOLD + "if __name__"))
    again, twice = start(script, "by-sigterm", 0), JobProcess(path)
    twice.read_until("generation_formed")
    twice.signal(signal.SIGINT)
    twice.signal(signal.SIGTERM)
    return Later(again, again.finish(), twice, twice.finish())


def test_r10_the_same_command_goes_on_and_completes_and_then_has_nothing_to_do(
    stopped: dict[str, Stopped], later: Later, script: Path
) -> None:
    assert later.again_code == 0, later.again.out + later.again.err
    events = events_of(script.parent / "runs", "by-sigterm")
    (restored,) = [e for e in events if isinstance(e, StateRestored) and e.checkpoint]
    assert restored.step == stopped["by-sigterm"].ended.step
    steps = [e.first_step + i for e in events if isinstance(e, StepsDone) for i in range(len(e.losses))]
    assert steps == list(range(40))
    complete = start(script, "by-sigterm", 0)
    assert complete.finish() == 0
    assert complete.out == f"by-sigterm: already complete, 40 steps in {script.parent}/runs/by-sigterm\n"


def test_r16_a_second_signal_ends_the_run_at_once_and_a_second_run_in_the_process_works(later: Later) -> None:
    assert later.twice_code == 0, later.twice.out + later.twice.err
    first, _, second = later.twice.out.partition("fit second")
    assert "run_ended a second signal ended it at once" in first
    *_, outcome = first.strip().splitlines()
    assert outcome.startswith("stopped 0 2 ")
    *_, outcome = second.strip().splitlines()
    assert outcome.startswith("completed 4 None ")
    assert later.twice.err == ""
    assert wait_until_gone(later.twice, 5) == []
