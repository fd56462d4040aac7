"""How long does a sweep take, and how much of its workers' time trains: Ray Tune over Ray Train, and raytrain?

    python jobs/bench/sweep.py [--repeat 1] [--json]

Each side tries the same 12 learning rates in the same order with ASHA (after 1, 3 and 9 epochs the best third goes on), on a
cluster of its own on this machine with room for 4 workers of 0.5 CPU, one after the other. Steps wait as for a GPU, in
proportion to a worker's rows: a trial of 4 workers is nearly 4 times as fast as one of 1. Ray Tune's trials have a fixed
number of workers, 1 in each of 4 trials at a time, or 2 in each of 2; raytrain's have 1 to 4. Measured alike on all sides,
by lines that the training processes write after each optimizer step (`workload.build_clock`):

    wall       from the start of the command to its end; the cluster is up before
    trained    sum over steps of workers x the median time of a step with so many workers, as a part of 4 workers x wall
    in vain    steps of stopped trials after their last evaluation; repeated: steps that were done again
    per step   wall by all other steps
    handed on  from the last step of a stopped trial's worker to the first step of the next worker: who begins takes the
               place that has been free for longest

What is fair: same model, initial weights, rows, order, and wait per row, threads (1 per worker), an evaluation and a
checkpoint per epoch, local storage. Ray Tune's and Ray Train's own settings are kept, and its functions take no CPUs from
workers. The cluster has a dashboard: without one Ray Train (2.60) never gives back the workers of a stopped trial.

How to read it: which trials ASHA stops depends on the order in which values come in, above all those of trials that start
together, so a side may train half as many steps again as another, or as itself the next time: compare the time per step. On
few cores a sweep of minutes is mostly the starting of processes, on all sides; that weighs less and less on more cores and
as trials get longer. Idle workers at the end of a sweep, and steps in vain, do not. The exit code is 1 if two sides have
values of a trial and epoch that differ, or rank trials differently that both finished.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import workload
from ray.cluster_utils import Cluster
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException
from recovery import stop
from side_tune import DRIVERS
from workload import Lines, handed_on, median_of, read_steps, show_table, times_done_again, trained_worker_s

HERE = Path(__file__).parent
NUM_WORKERS = 4
OURS = "raytrain, 1 to 4 workers"
PER_TRIAL = {"Ray Tune, 4 trials x 1 worker": 1, "Ray Tune, 2 trials x 2 workers": 2, OURS: None}
"""Workers of each trial; None for an elastic one."""
LIMIT_S = 420.0
ALIKE = 1e-3
"""Relative difference of values that may come from the order of sums."""


@dataclass(frozen=True)
class Outcome:
    """What one run of one side showed; times in seconds."""

    wall_s: float
    first_step_s: float
    last_step_s: float
    trained: float
    steps: int
    in_vain: int
    repeated: int
    handed_on_s: dict[str, list[float]]
    """Of each stopped trial, one for each of its places that was used again."""
    values: dict[str, list[float]]
    """Loss of each trial on held-out rows after each epoch."""

    @property
    def per_step_s(self) -> float:
        return self.wall_s / (self.steps - self.in_vain)

    @property
    def finished(self) -> list[str]:
        """The trials that were not stopped early, the best one first."""
        whole = [trial for trial, values in self.values.items() if len(values) == workload.TRIAL_EPOCHS]
        return sorted(whole, key=lambda trial: self.values[trial][-1])

    @property
    def best(self) -> str:
        return min(self.values, key=lambda trial: min(self.values[trial]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each side; the one with the median time per step is shown"
    )
    parser.add_argument("--only", choices=PER_TRIAL, action="append", help="sides to run; all by default")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    runs = defaultdict(list)
    for number in range(arguments.repeat):
        for side in arguments.only or PER_TRIAL:
            print(f"run {number + 1} of {arguments.repeat}: {side}", file=sys.stderr, flush=True)
            runs[side].append(run(side))
    outcomes = {side: sorted(some, key=lambda outcome: outcome.per_step_s)[len(some) // 2] for side, some in runs.items()}
    if arguments.json:
        print(json.dumps({side: as_json(outcome) for side, outcome in outcomes.items()}, indent=1))
    else:
        show(outcomes)
    sys.exit(1 if disagreements(outcomes) else 0)


def run(side: str) -> Outcome:
    """Runs one side to its end, on a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch, cluster() as address:
        log_dir, values = Path(scratch, "steps"), Path(scratch, "values.json")
        for learning_rate in workload.TRIALS:
            workload.trial_directory(log_dir, learning_rate).mkdir(parents=True)
        environment = os.environ | {"RAY_ADDRESS": address}
        started = time.time()
        with open(os.path.join(scratch, "out"), "w") as out:
            child = subprocess.Popen(command(side, scratch), stdout=out, stderr=out, env=environment)
            try:
                code = child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(child)
        ended = time.time()
        if code != 0:
            sys.exit(f"{side} ended with {code}:\n{Path(scratch, 'out').read_text()[-3000:]}")
        lines = {path.name: found for path in log_dir.iterdir() if (found := read_steps(path))}
        return judge(lines, json.loads(values.read_text()), started, ended)


@contextmanager
def cluster() -> Iterator[str]:
    """A node with room for the workers; its address."""
    head = {"num_cpus": NUM_WORKERS * workload.WORKER_CPUS, "resources": {DRIVERS: NUM_WORKERS}, "include_dashboard": True}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        wait_for_dashboard(made.address)
        yield made.address
    finally:
        made.shutdown()


def wait_for_dashboard(address: str) -> None:
    until = time.time() + 60.0
    while time.time() < until:
        try:
            list_nodes(address=address)
        except (RayStateApiException, ConnectionError):
            time.sleep(0.5)
        else:
            return
    sys.exit("the dashboard of the cluster does not answer")


def command(side: str, scratch: str) -> list[str]:
    workers = PER_TRIAL[side]
    script = ["side_sweep.py"] if workers is None else ["side_tune.py", "--num-workers", str(workers)]
    places = {"log-dir": "steps", "storage": "storage", "values": "values.json"}
    flags = [word for name, place in places.items() for word in (f"--{name}", os.path.join(scratch, place))]
    return [sys.executable, str(HERE / script[0]), *script[1:], *flags, "--all-workers", str(NUM_WORKERS)]


def judge(lines: Lines, values: dict[str, list[float]], started: float, ended: float) -> Outcome:
    steps_per_epoch = -(-(workload.ROWS - workload.VALID_ROWS) // workload.TRIAL_BATCH)
    evaluated = {trial: len(values[trial]) * steps_per_epoch for trial in values}
    stopped = [trial for trial in lines if len(values[trial]) < workload.TRIAL_EPOCHS]
    steps = {trial: {line.step for line in some} for trial, some in lines.items()}
    everything = [line.finished for some in lines.values() for line in some]
    return Outcome(
        wall_s=ended - started,
        first_step_s=min(everything) - started,
        last_step_s=max(everything) - started,
        trained=trained_worker_s(lines) / (NUM_WORKERS * (ended - started)),
        steps=sum(len(some) for some in steps.values()),
        in_vain=sum(sum(step >= evaluated[trial] for step in some) for trial, some in steps.items()),
        repeated=sum(times_done_again(some) for some in lines.values()),
        handed_on_s=handed_on(lines, stopped),
        values=values,
    )


def as_json(outcome: Outcome) -> dict[str, object]:
    return asdict(outcome) | {"per_step_s": outcome.per_step_s, "finished": outcome.finished, "best": outcome.best}


def disagreements(outcomes: dict[str, Outcome]) -> list[str]:
    """What the sides do not agree on, of all that any two of them have."""
    found = []
    for (side, one), (other, two) in itertools.combinations(outcomes.items(), 2):
        for trial in one.values.keys() & two.values.keys():
            pairs = zip(one.values[trial], two.values[trial], strict=False)
            found += [f"{trial} has {a} in {side}, {b} in {other}" for a, b in pairs if abs(a / b - 1) > ALIKE]
        here, there = ([t for t in some.finished if t in rest.finished] for some, rest in ((one, two), (two, one)))
        if here != there:
            found.append(f"ranked {', '.join(here)} in {side}, {', '.join(there)} in {other}")
    return found


def show(outcomes: dict[str, Outcome]) -> None:
    rows = []
    for side, outcome in outcomes.items():
        handed_on_s = [seconds for some in outcome.handed_on_s.values() for seconds in some]
        cells = [f"{outcome.wall_s:.0f} s", f"{outcome.first_step_s:.0f} s", f"{outcome.trained:.0%}", f"{outcome.steps}"]
        cells += [f"{outcome.in_vain}", f"{outcome.repeated}", f"{1000 * outcome.per_step_s:.0f} ms"]
        cells += [f"{some(handed_on_s):.1f} s" if handed_on_s else "" for some in (median_of, max)]
        rows.append([side, *cells, ratio(outcomes, side)])
    header = ["", "wall", "first step", "trained", "steps", "in vain", "repeated", "per step", "handed on", "at worst"]
    show_table(f"{len(workload.TRIALS)} trials on {NUM_WORKERS} workers", [*header, "raytrain is faster by"], rows)
    for side, outcome in outcomes.items():
        print(f"{side}: best {outcome.best}; finished, best first: {', '.join(outcome.finished)}")
    if OURS in outcomes:
        handed_on = outcomes[OURS].handed_on_s.items()
        print(
            "handed on:", *(f"{trial} after {', '.join(f'{s:.1f} s' for s in some)};" for trial, some in handed_on if some)
        )
    for line in disagreements(outcomes):
        print(f"BROKEN: {line}")


def ratio(outcomes: dict[str, Outcome], side: str) -> str:
    """How many times as long as raytrain a side takes, in all and per step."""
    ours, theirs = outcomes.get(OURS), outcomes[side]
    if ours is None or theirs is ours:
        return ""
    return f"{theirs.wall_s / ours.wall_s:.2f} times, {theirs.per_step_s / ours.per_step_s:.2f} per step"


if __name__ == "__main__":
    main()
