"""How long does training stand still when it saves, when is the checkpoint on disk, and how long does loading it take?

    python jobs/bench/checkpoint.py [--repeat 3] [--only SIDE] [--json]

Each side (`checkpoint_sides.py`) trains the same perceptron with AdamW, 200 MB of state, in one worker, and saves it every
10 steps to the local disk, in a fresh process, one after the other. Measured alike on all sides, by lines that the training
thread writes after each optimizer step (`workload.build_clock`), and by the times of files:

    stall     how much longer than the median step a step takes in which the state is saved
    in all    how much longer 10 steps with a save take than 10 steps before the first save: the stall, and what the saving
              in the background takes away from the steps after it
    durable   from the end of the step that is saved to the last byte of the checkpoint's last file
    resume    in a fresh process, from the files to a model and an optimizer with the state of the last save

What is fair: same model, batch, threads (1), priority, and disk; nobody deletes old checkpoints. Ray Train is shown with
`ray.train.report` as it is, and with its asynchronous upload, where `torch.save` to a local directory still is in the step.
`dcp.async_save` is `torch.distributed.checkpoint` in a plain loop with a process group of one, which waits for the last save
before the next one, as its documentation says. raytrain also computes SHA-256 digests when it saves, and checks them when it
loads; the others do not. Files are in the page cache when they are loaded, on all sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from checkpoint_sides import ASYNC, DCP, OURS, SIDES, SYNC, Case
from workload import median_of, read_steps, show_table

SIDE = Path(__file__).with_name("checkpoint_sides.py")
WARM_UP = 2
LIMIT_S = 600.0
RAY_NICENESS = "15"  # Ray's default `worker_niceness`
RATIOS = (SYNC, ASYNC, DCP)


@dataclass(frozen=True)
class Outcome:
    """What one run of one side showed, in seconds: of each save, of the median step, and of loading the last one."""

    stall_s: list[float]
    in_all_s: list[float]
    durable_s: list[float]
    step_s: float
    resume_s: float
    checkpoint_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each side; medians of all their saves are shown")
    parser.add_argument("--only", choices=SIDES, action="append", help="sides to run; all by default")
    parser.add_argument("--width", type=int, default=2000, help="units of a hidden layer; by default 200 MB of state")
    parser.add_argument("--saves", type=int, default=10, help="saves of each run that count; the last step is saved, too")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {side: [] for side in arguments.only or SIDES}
    for number in range(arguments.repeat):
        for side, some in outcomes.items():
            print(f"run {number + 1} of {arguments.repeat}: {side}", file=sys.stderr, flush=True)
            some.append(run(side, arguments.width, arguments.saves, arguments.every))
    if arguments.json:
        print(json.dumps({side: [asdict(outcome) for outcome in some] for side, some in outcomes.items()}, indent=1))
    else:
        show(outcomes)


def run(side: str, width: int, num_saves: int, every: int) -> Outcome:
    """Trains with one side, and loads what it has saved."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as scratch:
        case = Case(scratch, width, (num_saves + 1) * every, every)
        os.mkdir(case.log_dir)
        os.mkdir(case.storage)
        call(side, case)
        loaded = Path(scratch, "loaded")
        call(side, case, str(loaded))
        return judge(side, case, float(loaded.read_text()))


def call(side: str, case: Case, *out: str) -> None:
    """Runs a part of a side to its end, with one thread per process and the priority of Ray's workers."""
    words = [sys.executable, str(SIDE), side, json.dumps(asdict(case)), *out]
    starts_ray = not out and side != DCP
    done = subprocess.run(
        ["nice", "-n", "0" if starts_ray else RAY_NICENESS, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": case.directory},
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{side} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def judge(side: str, case: Case, resume_s: float) -> Outcome:
    """Stalls and delays, from the lines of the training process and the times of the files."""
    finished = np.array([line.finished for line in read_steps(case.log_dir)])
    steps = np.diff(finished)  # steps[i] is from the end of step i to that of step i + 1, counted from 0
    saved = np.arange(case.every - 1, case.steps - 1, case.every)  # the steps that were saved, but for the last one
    plain = np.setdiff1d(np.arange(WARM_UP, len(steps)), saved)
    quiet_s = np.median(steps[WARM_UP : saved[0]])
    directories = case.find(SIDES[side].last)
    if len(finished) != case.steps or len(directories) != len(saved) + 1:
        sys.exit(f"{side}: {len(finished)} steps and {len(directories)} checkpoints, not {case.steps} and {len(saved) + 1}")
    files = [[file.stat() for file in directory.iterdir()] for directory in directories[:-1]]
    return Outcome(
        stall_s=(steps[saved] - np.median(steps[plain])).tolist(),
        in_all_s=[float(steps[i : i + case.every].sum() - case.every * quiet_s) for i in saved],
        durable_s=[max(s.st_mtime for s in some) - finished[i] for some, i in zip(files, saved, strict=True)],
        step_s=float(np.median(steps[plain])),
        resume_s=resume_s,
        checkpoint_bytes=sum(s.st_size for s in files[0]),
    )


def show(outcomes: dict[str, list[Outcome]]) -> None:
    rows, stalls = [], {}
    for side, some in outcomes.items():
        stalls[side], cells = quartiles([value for one in some for value in one.stall_s])
        for name in ("in_all_s", "durable_s"):
            cells.append(f"{1000 * median_of([value for one in some for value in getattr(one, name)]):,.0f} ms")
        for name in ("resume_s", "step_s"):
            cells.append(f"{1000 * median_of([getattr(one, name) for one in some]):,.0f} ms")
        rows.append([side, *cells, f"{some[0].checkpoint_bytes / 1e6:,.0f} MB"])
    saves = sum(len(one.stall_s) for one in next(iter(outcomes.values())))
    header = ["", "stall", "quartiles", "worst", "in all", "durable", "resume", "step", "size"]
    show_table(f"medians of {saves} saves", header, rows)
    for other in RATIOS:
        if OURS in stalls and other in stalls:
            print(f"stall, {OURS} : {other} = {stalls[OURS] / stalls[other]:.3f}")


def quartiles(values: list[float]) -> tuple[float, list[str]]:
    """The median, and in text the median, the quartiles and the largest value."""
    low, median, high = (1000 * np.percentile(values, (25, 50, 75))).tolist()
    return median, [f"{median:,.0f} ms", f"{low:,.0f} to {high:,.0f}", f"{1000 * max(values):,.0f} ms"]


if __name__ == "__main__":
    main()
