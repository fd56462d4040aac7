"""How much does raytrain get done while its workers are killed again and again, and does it keep its promises meanwhile?

    python jobs/bench/churn.py [--every 15] [--minutes 5] [--seed 0] [--json]

Trains the benchmarks' workload with two workers on an embedded Ray of this machine. From the first step on `kill -9` hits a
random worker every 15 s (`raytrain chaos` does it); the run goes on to the first step after the last kill and is stopped
then. Read from the run's own events:

    goodput   training time of the committed steps, as a part of the time from the first step to the end of the churn; of
              the steps that a change of workers stood in the way of, only the median time of a step counts
    pauses    from the last finished step before a change of workers to the next generation: losses, and joins

The exit code is 1 if a promise is broken: a kill that the run did not notice, a step that a process applied twice or that is
recorded twice, rows that `raytrain audit` does not find where they were planned, a job that does not stop as it should.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from recovery import stop
from workload import StepLine, median_of, read_steps, show_table

from raytrain.cluster.chaos import ChaosRunner, RunEvents, open_running, random_schedule
from raytrain.cluster.fault_injection import FaultInjector
from raytrain.events.curve import curve
from raytrain.events.kinds import Event, FaultInjected, GenerationFormed, StateRestored, StepsDone, WorkerLost
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir

HERE = Path(__file__).parent
STEPS, CHECKPOINT_EVERY = 1_000_000, 100
START_LIMIT_S, LIMIT_S = 120.0, 60.0
STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Outcome:
    """What the run showed; times in seconds."""

    seconds: float
    steps: int
    goodput: float
    pauses_s: list[float]
    joins_s: list[float]
    kills: int
    unnoticed: list[str]
    """Workers that were killed, and that the run did not report as lost."""
    restores: int
    """Starts from a checkpoint, after all workers were gone."""
    applied_twice: int
    recorded_twice: int
    audit: list[str]
    """The report."""
    audit_passed: bool
    exit_code: int

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept."""
        kept = {
            "at least one kill": self.kills > 0,
            "each kill is noticed": not self.unnoticed,
            "no step is applied twice": self.applied_twice == 0,
            "no step is recorded twice": self.recorded_twice == 0,
            "the audit passes": self.audit_passed,
            f"the job stops with exit code {STOPPED}": self.exit_code == STOPPED,
        }
        return [promise for promise, is_kept in kept.items() if not is_kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between kills")
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes for which workers are killed")
    parser.add_argument("--seed", type=int, default=0, help="which workers are killed")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    outcome = run(arguments.every, 60 * arguments.minutes, arguments.seed)
    if arguments.json:
        print(json.dumps(asdict(outcome) | {"broken": outcome.broken}, indent=1))
    else:
        show(outcome, arguments.every)
    sys.exit(1 if outcome.broken else 0)


def run(every_s: float, for_s: float, seed: int) -> Outcome:
    """Trains, kills, stops, and reads what the run wrote down."""
    with tempfile.TemporaryDirectory(prefix="churn-") as scratch:
        log_dir = os.path.join(scratch, "steps")
        os.mkdir(log_dir)
        run_dir = RunDir.at(os.path.join(scratch, "storage"), "bench")
        with open(os.path.join(scratch, "out"), "w") as out:
            child = subprocess.Popen(command(scratch, log_dir), stdout=out, stderr=out, env=environment())
            try:
                record = wait_for_steps(child, run_dir, scratch)
                ChaosRunner(record, random_schedule(every_s, for_s, ["kill"], seed), FaultInjector().inject, tell).run()
                wait_for_a_step(child, record, scratch)
                ended = time.time()
            finally:
                stop(child)
        return judge(run_dir, read_steps(log_dir), ended, child.returncode)


def command(scratch: str, log_dir: str) -> list[str]:
    storage = os.path.join(scratch, "storage")
    settings = {"storage": storage, "steps": STEPS, "workers": "1:2", "checkpoint-every": CHECKPOINT_EVERY}
    flags = [word for name, value in settings.items() for word in (f"--run.{name}", str(value))]
    return [sys.executable, str(HERE / "side_raytrain.py"), *flags, "--run.audit", "--log-dir", log_dir]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wait_for_steps(child: subprocess.Popen, run_dir: RunDir, scratch: str) -> RunEvents:
    """The run's record, once both workers have trained."""
    until = time.time() + START_LIMIT_S
    record = None
    while time.time() < until and child.poll() is None:
        if record is None and run_dir.exists("events.jsonl"):
            record = open_running(run_dir)
        if record is not None and record.refresh().step and len(record.view.members) == 2:
            return record
        time.sleep(0.1)
    sys.exit(f"no steps of two workers; exit code {child.poll()}:\n{Path(scratch, 'out').read_text()[-3000:]}")


def wait_for_a_step(child: subprocess.Popen, record: RunEvents, scratch: str) -> None:
    """Until a step is finished that was not when the churn ended, by a generation after the last kill."""
    until = time.time() + LIMIT_S
    generations, step = record.view.num_generations, record.view.step
    while time.time() < until and child.poll() is None:
        view = record.refresh()
        if view.num_generations > generations and view.step > step:
            return
        time.sleep(0.1)
    sys.exit(f"no step after the last kill; exit code {child.poll()}:\n{Path(scratch, 'out').read_text()[-3000:]}")


def judge(run_dir: RunDir, lines: list[StepLine], ended: float, exit_code: int) -> Outcome:
    events = list(read(run_dir))
    killed = [event.target for event in events if isinstance(event, FaultInjected)]
    lost = {event.worker for event in events if isinstance(event, WorkerLost)}
    formed = [event for event in events if isinstance(event, GenerationFormed)]
    report = audit(run_dir)
    seconds, steps, useful_s = useful(events, ended)
    return Outcome(
        seconds=seconds,
        steps=steps,
        goodput=useful_s / seconds,
        pauses_s=[event.pause_s for event in formed if event.cause == "loss"],
        joins_s=[event.pause_s for event in formed if event.cause == "join"],
        kills=len(killed),
        unnoticed=[worker for worker in killed if worker not in lost],
        restores=sum(isinstance(event, StateRestored) and bool(event.checkpoint) for event in events),
        applied_twice=repeats((line.pid, line.step) for line in lines),
        recorded_twice=recorded_twice(events),
        audit=report.lines(),
        audit_passed=report.passed,
        exit_code=exit_code,
    )


def useful(events: list[Event], ended: float) -> tuple[float, int, float]:
    """Seconds from the first step to the end, steps in them, and the training time of these steps."""
    finished = {step: record.finished for step, record in curve(events).items() if record.finished <= ended}
    changed = {event.step for event in events if isinstance(event, GenerationFormed)}
    times = {later: finished[later] - finished[step] for step, later in itertools.pairwise(sorted(finished))}
    plain = [seconds for step, seconds in times.items() if step not in changed]
    training_s = sum(plain) + median_of(plain) * (len(times) - len(plain))
    return ended - finished[min(finished)], len(finished), training_s


def recorded_twice(events: list[Event]) -> int:
    """Steps that are in the record more than once, but for those above a checkpoint that the run went back to."""
    twice, seen = 0, set()
    for event in events:
        if isinstance(event, StateRestored):
            seen = {step for step in seen if step < event.step}
        elif isinstance(event, StepsDone):
            steps = set(range(event.first_step, event.first_step + len(event.losses)))
            twice += len(steps & seen)
            seen |= steps
    return twice


def repeats(values) -> int:
    return sum(count - 1 for count in Counter(values).values())


def show(outcome: Outcome, every_s: float) -> None:
    rows = [
        ["steps", f"{outcome.steps} in {outcome.seconds:.0f} s"],
        ["goodput", f"{outcome.goodput:.1%}"],
        ["kills", str(outcome.kills)],
        ["pauses after a loss", spread(outcome.pauses_s)],
        ["pauses for a newcomer", spread(outcome.joins_s)],
        ["starts from a checkpoint", str(outcome.restores)],
        ["steps applied twice", str(outcome.applied_twice + outcome.recorded_twice)],
        ["exit code", str(outcome.exit_code)],
    ]
    show_table(f"two workers, one killed every {every_s:g} s", ["", ""], rows)
    print("\n".join(outcome.audit))
    for promise in outcome.broken:
        print(f"BROKEN: {promise}")


def spread(pauses_s: list[float]) -> str:
    if not pauses_s:
        return "none"
    return f"median {median_of(pauses_s):.3f} s, worst {max(pauses_s):.3f} s of {len(pauses_s)}"


if __name__ == "__main__":
    main()
