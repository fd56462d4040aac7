"""What do preemptions with notice cost: Ray Train as it is, Ray Train with just-in-time checkpoints, and raytrain?

    python jobs/bench/preemption.py [--steps 1400] [--deadline 8] [--json]

The protocol of Ray's own nightly benchmark, scaled to a small machine: a fixed number of steps, a checkpoint every quarter
of them, 4 preemptions with notice. Each side trains the same model on the same rows on a cluster of its own, one after the
other on this machine: a head without CPUs, and nodes of 1 CPU, for one worker each. When 10, 30, 50 and 70 % of the steps
are finished for the first time, the node of a worker (of rank 1, 0, 1, 0) is drained through the cluster's control store
with a deadline, and a new node is added; at the deadline the node is killed with all its processes. Measured alike on all
sides, by lines that the training processes write after each optimizer step (`workload.build_clock`):

    wall             from the first finished step to the last one
    wasted           steps that were done again
    goodput          the time that so many steps take where nothing fails (median step), as a part of wall
    standstill       longest time without a step that nobody had done before
    worker-seconds   time from the first finished step to the last one, over all nodes that there were

What is fair: same model, batch, threads (1 per worker), checkpoint cadence, local storage, notices and deadlines, and Ray
Train's own elastic mode (`num_workers=(1, 2)`). Its defaults are kept: it polls workers every 2 s and notices every 5 s, and
thinks about growing every 60 s; at the deadline it restarts from its newest checkpoint. With just-in-time checkpoints it
saves once, as soon as it sees the notice (it asks every 10 steps), and goes on, as its documentation shows. Lost nodes are
noticed after 1.5 s instead of 13 s, on all sides: that helps Ray Train.

How to read it: in Ray's nightly the notice is 7 % of a checkpoint interval, and here it is most of one, since it cannot be
shorter than the 5 s after which Ray Train sees it. What just-in-time checkpoints waste (the steps between the save and the
deadline) is the same number of seconds in both; what periodic ones waste grows with the interval. `--steps 6000` comes
nearer to the nightly. The nodes share the machine's cores: a starting replacement slows the others down, on all sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import Machine, parent_of
from recovery import stop
from workload import StepLine, longest_standstill, median_of, read_steps, show_table, times_done_again

HERE = Path(__file__).parent
NOTICES = (0.1, 0.3, 0.5, 0.7)
"""Parts of the steps after which a notice is given."""
UNDISTURBED, PERIODIC, IN_TIME, OURS = SIDES = (
    "Ray Train, nothing fails",
    "Ray Train, periodic",
    "Ray Train, just in time",
    "raytrain",
)
LIMIT_S = 300.0
WIDTH = 1152  # 3 million weights, 40 to 60 ms a step
LOOK_EVERY_S = 0.05
SETTLED_S = 1.0
"""After a kill a survivor may still finish the step in flight; lines after this come from training that has gone on."""


@dataclass(frozen=True)
class Outcome:
    """What one run of one side showed; times in seconds."""

    wall_s: float
    wasted: int
    step_ms: float
    standstill_s: float
    worker_s: float
    preemptions: int
    resumed_at: list[int]
    """First steps of all processes that started after the first notice."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--deadline", type=float, default=8.0, help="seconds from the notice to the end of the node")
    parser.add_argument("--only", choices=SIDES, action="append", help="sides to run; all by default")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    outcomes = {}
    for side in arguments.only or SIDES:
        print(side, file=sys.stderr, flush=True)
        outcomes[side] = run(side, arguments.steps, arguments.deadline)
    if arguments.json:
        sides = {
            side: asdict(outcome) | {"goodput": goodput(outcomes, side, arguments.steps)}
            for side, outcome in outcomes.items()
        }
        print(json.dumps(sides, indent=1))
    else:
        show(outcomes, arguments.steps, arguments.deadline)


def run(side: str, steps: int, deadline_s: float) -> Outcome:
    """Runs one side to its end, with its preemptions."""
    machine = Machine()
    with tempfile.TemporaryDirectory(prefix="preemption-") as scratch:
        try:
            machine.add()
            machine.add()
            lines, killed = train(side, scratch, machine, steps, deadline_s)
        finally:
            machine.close()
    return judge(lines, killed, machine)


def train(side: str, scratch: str, machine: Machine, steps: int, deadline_s: float) -> tuple[list[StepLine], list[float]]:
    """The lines of all processes, and when nodes were killed."""
    log_dir = os.path.join(scratch, "steps")
    os.mkdir(log_dir)
    environment = os.environ | {"RAY_ADDRESS": machine.address}
    killed: list[float] = []
    with open(os.path.join(scratch, "out"), "w") as out:
        child = subprocess.Popen(command(side, scratch, log_dir, steps), stdout=out, stderr=out, env=environment)
        try:
            for number, part in enumerate(NOTICES if side != UNDISTURBED else ()):
                raylet, line = wait_for_victim(child, log_dir, int(part * steps), number, killed)
                tell(f"notice after step {line.step}, for rank {line.rank}")
                preempt(machine, raylet, deadline_s)
                killed.append(time.time())
                tell(f"killed after step {read_steps(log_dir)[-1].step}")
            code = child.wait(LIMIT_S)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            sys.exit(f"{side}: {error}\n{Path(scratch, 'out').read_text()[-3000:]}")
        finally:
            stop(child)
    lines = read_steps(log_dir)
    if code or not any(line.step == steps - 1 for line in lines):
        sys.exit(f"{side} ended with {code}:\n{Path(scratch, 'out').read_text()[-3000:]}")
    if killed and killed[-1] > lines[-1].finished:
        sys.exit(f"{side} was done before the last node was killed: give it more --steps")
    return lines, killed


def command(side: str, scratch: str, log_dir: str, steps: int) -> list[str]:
    storage, cadence = os.path.join(scratch, "storage"), steps // 4
    if side == OURS:
        settings = {"storage": storage, "steps": steps, "workers": "1:2", "checkpoint-every": cadence}
        flags = [word for name, value in settings.items() for word in (f"--run.{name}", str(value))]
        script = [str(HERE / "side_raytrain.py"), *flags]
    else:
        script = [str(HERE / "side_ray_train.py"), "--storage", storage, "--steps", str(steps)]
        script += ["--checkpoint-every", str(cadence), *(["--just-in-time"] if side == IN_TIME else [])]
    return [sys.executable, *script, "--log-dir", log_dir, "--width", str(WIDTH)]


def wait_for_victim(
    child: subprocess.Popen, log_dir: str, step: int, number: int, killed: list[float]
) -> tuple[int, StepLine]:
    """The raylet and the last line of the worker whose node is the next to go, once it trains beyond `step`."""
    until = time.time() + LIMIT_S
    while time.time() < until and child.poll() is None:
        lines = [line for line in read_steps(log_dir) if not killed or line.finished > killed[-1] + SETTLED_S]
        if lines and lines[-1].step >= step:
            newest = {line.rank: line for line in lines}
            living = [(parent, line) for _, line in sorted(newest.items()) if (parent := parent_of(line.pid))]
            if living:
                return living[(number + 1) % len(living)]
        time.sleep(LOOK_EVERY_S)
    raise RuntimeError(f"no worker at step {step}; exit code {child.poll()}")


def tell(what: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)


def preempt(machine: Machine, raylet: int, deadline_s: float) -> None:
    """A notice, a new node, and the end of the old one."""
    ends = time.time() + deadline_s
    machine.announce(raylet, deadline_s)
    machine.add()
    time.sleep(max(0.0, ends - time.time()))
    machine.take(raylet)


def judge(lines: list[StepLine], killed: list[float], machine: Machine) -> Outcome:
    start, end = lines[0].finished, lines[-1].finished
    first_steps: dict[int, int] = {}
    for line in lines:
        first_steps.setdefault(line.pid, line.step)
    return Outcome(
        wall_s=end - start,
        wasted=times_done_again(lines),
        step_ms=median_step_ms(lines),
        standstill_s=longest_standstill(lines),
        worker_s=machine.seconds(start, end),
        preemptions=len(killed),
        resumed_at=[step for step in first_steps.values() if step],
    )


def median_step_ms(lines: list[StepLine]) -> float:
    by_process: dict[int, float] = {}
    times = []
    for line in lines:
        if line.pid in by_process:
            times.append(1000 * (line.finished - by_process[line.pid]))
        by_process[line.pid] = line.finished
    return median_of(times)


def goodput(outcomes: dict[str, Outcome], side: str, steps: int) -> float:
    ideal = outcomes.get(UNDISTURBED, outcomes[side])
    return (steps - 1) * ideal.step_ms / 1000 / outcomes[side].wall_s


def show(outcomes: dict[str, Outcome], steps: int, deadline_s: float) -> None:
    rows = []
    for side, outcome in outcomes.items():
        cells = [f"{outcome.wall_s:.1f} s", f"{outcome.wasted}", f"{goodput(outcomes, side, steps):.1%}"]
        cells += [
            f"{outcome.standstill_s:.2f} s",
            f"{outcome.step_ms:.0f} ms",
            f"{outcome.worker_s:.0f}",
            saved(outcomes, side),
        ]
        rows.append([side, *cells])
    show_table(
        f"{steps} steps, a checkpoint every {steps // 4}, {len(NOTICES)} preemptions with a notice of {deadline_s:g} s",
        ["", "wall", "wasted", "goodput", "standstill", "step", "worker-seconds", "saved against periodic"],
        rows,
    )


def saved(outcomes: dict[str, Outcome], side: str) -> str:
    base = outcomes.get(PERIODIC)
    if base is None or side in (PERIODIC, UNDISTURBED):
        return ""
    seconds = base.worker_s - outcomes[side].worker_s
    return f"{seconds:.0f} ({seconds / base.worker_s:.0%})"


if __name__ == "__main__":
    main()
