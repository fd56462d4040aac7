"""What does raytrain cost in each step, compared with a plain DistributedDataParallel loop under torchrun?

    python jobs/bench/step.py [--repeat 3] [--json]

Both sides train the same model from the same weights on the same rows in the same order (raytrain's plan), with one thread
per worker, and write down the time of each finished step alike (`workload.build_clock`). They run one after the other,
A B A B, since a machine has better and worse minutes; the first steps are left out. The losses of all steps are compared
too: they show that both did the same work.

The plain loop takes its rows from tensors in memory and does nothing else: it sums no losses over ranks, and has no
telemetry, no checkpoints, no seeds per step. It runs with the low priority that Ray gives to its workers (nice 15), so that
whatever else runs on the machine disturbs both sides alike. The last case is a run of two logical workers on one worker,
that is, one that lost the other: raytrain makes two passes of half the rows, the plain loop one pass of all.

How to read it: where the workers take all cores of a machine, Ray's own processes and those of
the run compete with them, and a step of two workers waits for the slower one. In the last case gradients are
added up in another order: the losses part after some hundred steps, as those of a plain loop in one and in two passes do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from workload import median_of, read_steps, show_table

from raytrain.events.curve import curve
from raytrain.events.log import read
from raytrain.rundir import RunDir

HERE = Path(__file__).parent
CASES = {"1 worker": (1, 1), "2 workers": (2, 2), "2 logical on 1 worker": (1, 2)}
"""Workers and logical workers."""
STEPS, WARM_UP = 230, 30
LIMIT_S = 300.0
RAY_NICENESS = "15"  # Ray's default `worker_niceness`


@dataclass(frozen=True)
class Measured:
    """Milliseconds from each step's end to the next one's on rank 0, and the losses of all steps."""

    milliseconds: list[float]
    losses: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each side and case")
    parser.add_argument("--case", choices=CASES, action="append", help="cases to run; all by default")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    results = [compare(case, arguments.repeat) for case in arguments.case or CASES]
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


def compare(case: str, repeat: int) -> dict[str, object]:
    """Runs both sides of a case in turn; times in milliseconds."""
    plain, ours = [], []
    for number in range(repeat):
        print(f"{case}: run {number + 1} of {repeat}", file=sys.stderr, flush=True)
        plain.append(run_plain(*CASES[case]))
        ours.append(run_raytrain(*CASES[case]))
    expected = np.array(plain[0].losses)
    difference = max(float(np.max(np.abs(np.array(some.losses) / expected - 1))) for some in ours)
    sides = {}
    for name, some in (("plain", plain), ("raytrain", ours)):
        times = [time for measured in some for time in measured.milliseconds]
        sides[name] = {
            "median": median_of(times),
            "mean": float(np.mean(times)),
            "best run's median": min(median_of(measured.milliseconds) for measured in some),
        }
    ratios = {name: sides["raytrain"][name] / sides["plain"][name] for name in sides["plain"]}
    return {"case": case, **sides, "ratio": ratios, "largest relative difference of losses": difference}


def run_plain(num_workers: int, num_logical: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="step-") as log_dir:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
        call([*launch, str(HERE / "side_torchrun.py"), "--log-dir", log_dir], num_logical)
        losses = json.loads(Path(log_dir, "losses.json").read_text())
        return Measured(times_of(log_dir), losses)


def run_raytrain(num_workers: int, num_logical: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="step-") as log_dir:
        settings = {
            "workers": num_workers,
            "logical-workers": num_logical,
            "steps": STEPS,
            "checkpoint-every": STEPS,
            "storage": log_dir,
        }
        flags = [word for name, value in settings.items() for word in (f"--run.{name}", str(value))]
        call([str(HERE / "side_raytrain.py"), "--log-dir", log_dir, *flags])
        losses = [record.loss for record in curve(read(RunDir.at(log_dir, "bench"))).values()]
        return Measured(times_of(log_dir), losses)


def call(words: list[str], num_logical: int | None = None) -> None:
    """Runs a Python script to its end, with one thread per process."""
    nice = "0"
    if num_logical is not None:
        nice = RAY_NICENESS
        words = [*words, "--steps", str(STEPS), "--logical", str(num_logical)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        ["nice", "-n", nice, sys.executable, *words],
        env=environment,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def times_of(log_dir: str) -> list[float]:
    finished = [line.finished for line in read_steps(log_dir) if line.rank == 0 and line.step >= WARM_UP]
    return [1000 * (after - before) for before, after in itertools.pairwise(finished)]


def show(results: list[dict[str, object]]) -> None:
    rows = []
    for result in results:
        for name in result["plain"]:
            cells = [f"{result[side][name]:.1f} ms" for side in ("plain", "raytrain")]
            rows.append([f"{result['case']}, {name}", *cells, f"{result['ratio'][name]:.3f}"])
    show_table("time per step", ["", "torchrun", "raytrain", "ratio"], rows)
    for result in results:
        print(f"{result['case']}: losses differ by {result['largest relative difference of losses']:.1e} at most")


if __name__ == "__main__":
    main()
