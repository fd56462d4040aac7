"""How long does training stand still when a worker is killed: Ray Train as it is, and raytrain?

    python jobs/bench/recovery.py [--repeat 3] [--json]

Each side trains the same model on the same rows with two workers in a fresh `python` process, one after the other, on
this machine. In the middle one of the two workers is killed with SIGKILL. Measured alike on all sides, by lines that the
training processes write after each optimizer step (`workload.build_clock`):

    first step   from the start of the command to the first finished step
    pause        from the last finished step before the kill to the first step that nobody had done before
    repeated     steps that were done again
    new          worker processes whose first step was after the kill
    full again   from the kill to the first step that as many workers as before finished, one of them new

What is fair: same model, batch, threads (1 per worker), checkpoint cadence (10 steps), local storage, and Ray Train's own
elastic mode (`num_workers=(1, 2)`, `FailureConfig`). It is shown with its default settings, and once more with its
controller polling every 0.2 s instead of 2 s (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S), which shortens its pause. What is not
measured: a lost node, where both must first find out (seconds), and models whose checkpoint takes long to load, where Ray
Train's pause grows and raytrain's does not. With two workers on few cores the starting replacement competes with
the survivor for CPU; that is so on all sides.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from workload import CHECKPOINT_EVERY, StepLine, median_of, read_steps, show_table

HERE = Path(__file__).parent
KILL_AFTER_STEP, STEPS = 65, 400
LIMIT_S = 240.0
QUICK_POLLS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
SPARE = "raytrain, one spare"
SIDES = ("Ray Train", "Ray Train, polling at 0.2 s", "raytrain", SPARE)


@dataclass(frozen=True)
class Outcome:
    """What one run of one side showed; times in seconds."""

    first_step_s: float
    pause_s: float
    repeated: int
    restarted: int
    full_again_s: float
    step_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each side; medians are shown")
    parser.add_argument("--rank", type=int, default=1, help="rank of the worker that is killed")
    parser.add_argument("--only", choices=SIDES, action="append", help="sides to run; all by default")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    sides = arguments.only or list(SIDES)
    outcomes: dict[str, list[Outcome]] = {side: [] for side in sides}
    for number in range(arguments.repeat):
        for side in sides:
            print(f"run {number + 1} of {arguments.repeat}: {side}", file=sys.stderr, flush=True)
            outcomes[side].append(run(side, arguments.rank))
    if arguments.json:
        print(json.dumps({side: [asdict(outcome) for outcome in some] for side, some in outcomes.items()}, indent=1))
    else:
        show(outcomes)


def run(side: str, rank: int) -> Outcome:
    """Runs one side to its end, with one kill."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        log_dir = os.path.join(scratch, "steps")
        os.mkdir(log_dir)
        started = time.time()
        with open(os.path.join(scratch, "out"), "w") as out:
            child = subprocess.Popen(command(side, scratch, log_dir), stdout=out, stderr=out, env=environment(side))
            try:
                victim = wait_for_victim(child, log_dir, rank)
                os.kill(victim.pid, signal.SIGKILL)
                killed = time.time()
                code = child.wait(LIMIT_S)
            finally:
                stop(child)
        lines = read_steps(log_dir)
        if code or not any(line.step == STEPS - 1 for line in lines):
            sys.exit(f"{side} ended with {code}:\n{Path(scratch, 'out').read_text()[-3000:]}")
        return judge(lines, started, killed)


def command(side: str, scratch: str, log_dir: str) -> list[str]:
    storage = os.path.join(scratch, "storage")
    if not side.startswith("raytrain"):
        script = [str(HERE / "side_ray_train.py"), "--storage", storage, "--steps", str(STEPS)]
    else:
        settings = {"storage": storage, "steps": str(STEPS), "workers": "1:2", "checkpoint-every": str(CHECKPOINT_EVERY)}
        settings |= {"spares": "1", "cpus-per-worker": "0.5"} if side == SPARE else {}
        flags = [word for name, value in settings.items() for word in (f"--run.{name}", value)]
        script = [str(HERE / "side_raytrain.py"), *flags]
    return [sys.executable, *script, "--log-dir", log_dir]


def environment(side: str) -> dict[str, str]:
    return os.environ | (QUICK_POLLS if side.endswith("0.2 s") else {})


def wait_for_victim(child: subprocess.Popen, log_dir: str, rank: int) -> StepLine:
    """The latest line of the worker to kill, once training is in its middle."""
    until = time.time() + LIMIT_S
    while time.time() < until and child.poll() is None:
        lines = [line for line in read_steps(log_dir) if line.rank == rank]
        if lines and lines[-1].step >= KILL_AFTER_STEP:
            return lines[-1]
        time.sleep(0.005)
    raise SystemExit(f"no rank {rank} at step {KILL_AFTER_STEP}; exit code {child.poll()}")


def stop(child: subprocess.Popen) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()


def judge(lines: list[StepLine], started: float, killed: float) -> Outcome:
    """Pause, repeats and restarts, from the lines of all processes."""
    before = [line for line in lines if line.finished <= killed]
    height = max(line.step for line in before)
    first_new = next(line for line in lines if line.finished > killed and line.step > height)
    again = {line.step for line in lines if line.finished > killed and line.step <= height}
    done = {line.step for line in before}
    late = {line.pid for line in lines} - {line.pid for line in before}
    by_rank = [line.finished for line in before if line.rank == 0]
    steps_ms = [1000 * (b - a) for a, b in itertools.pairwise(by_rank)]
    return Outcome(
        first_step_s=lines[0].finished - started,
        pause_s=first_new.finished - max(line.finished for line in before if line.step == height),
        repeated=len(again & done - unfinished(lines, killed, height)),
        restarted=len(late),
        full_again_s=full_again(lines, late) - killed,
        step_ms=median_of(steps_ms),
    )


def full_again(lines: list[StepLine], late: set[int]) -> float:
    """When two workers finished the same step, one of which was started after the kill; Unix seconds."""
    by_step: dict[int, list[StepLine]] = {}
    for line in lines:
        others = by_step.setdefault(line.step, [])
        if any(other.pid != line.pid and {other.pid, line.pid} & late for other in others):
            return line.finished
        others.append(line)
    return float("inf")


def unfinished(lines: list[StepLine], killed: float, height: int) -> set[int]:
    """The newest step, where a survivor finished after the kill what the killed one had finished before: done once."""
    survivors = {line.pid for line in lines if line.finished <= killed} & {
        line.pid for line in lines if line.finished > killed
    }
    counts = [sum(line.pid == pid and line.step == height for line in lines) for pid in survivors]
    return {height} if survivors and max(counts) <= 1 else set()


def show(outcomes: dict[str, list[Outcome]]) -> None:
    names = {"first step": "first_step_s", "pause": "pause_s", "repeated": "repeated", "restarted": "restarted"}
    names["full again"] = "full_again_s"
    medians = {
        side: {name: median_of([getattr(o, field) for o in some]) for name, field in names.items()}
        for side, some in outcomes.items()
    }
    rows = []
    for side, values in medians.items():
        step_ms = median_of([outcome.step_ms for outcome in outcomes[side]])
        cells = [f"{values['first step']:.1f} s", f"{values['pause']:.3f} s", f"{values['repeated']:g}"]
        cells += [f"{values['restarted']:g}", f"{values['full again']:.1f} s"]
        rows.append([side, *cells, f"{step_ms:.0f} ms", ratio(medians, side)])
    show_table(
        f"one of two workers killed after step {KILL_AFTER_STEP}; medians of {len(next(iter(outcomes.values())))}",
        ["", "first step", "pause", "repeated", "new", "full again", "step", "raytrain's pause is shorter by"],
        rows,
    )


def ratio(medians: dict[str, dict[str, float]], side: str) -> str:
    ours = medians.get("raytrain")
    return "" if not ours or side.startswith("raytrain") else f"{medians[side]['pause'] / ours['pause']:.0f} times"


if __name__ == "__main__":
    main()
