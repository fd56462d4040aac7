"""How fast do rows of Parquet files reach the training, shuffled: through raytrain, and through what else there is?

    python jobs/bench/feed.py [--repeat 3] [--kind tabular] [--workers 1] [--only SIDE] [--json]

Numbers and pictures (`feed_data.py`) are written first. Then each side (`feed_sides.py`) reads them in a fresh process, one
after the other; its workers do nothing with a batch of 1024 rows but add up the labels. Measured:

    rows/s       in the second half of the time, when everything has started; the sum over workers
    first batch  from the call that starts to read to the first batch; the slowest worker
    resized      the same for a worker that reads on from there for other logical workers, in the same process
    worker       peak of the resident memory of a worker and of the processes that it started; the largest
    all          peak of the memory of all processes of the side, also of Ray's: private, and shared as in the last column
    shared       peak of shared memory, where Ray's object store is, and the batches of a DataLoader; of the whole machine

What is fair: all shuffle within 4 row groups (the scan not at all), all processes have one thread of PyTorch and of Arrow,
each worker of each side has 2 processes or Ray tasks that read for it, and the sources are opened before the clock starts.
The DataLoader and MosaicML streaming get what suits them: all 64 features in one array, and streaming its own format,
converted before. Ray Data is used as its documentation recommends for Ray Train, with a local shuffle, and once more with
none. The scan shows the limit: pyarrow's batches in file order, made into tensors in the thread that wants them. How to
read it: on as many cores as workers, what reads for a worker competes with it.

Streaming is left out unless `--streaming-python` names a Python that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
from feed_data import KINDS, Case, make_data
from feed_sides import LOADER, OURS_LOCAL, OURS_RAY, RAY_DATA, SCAN, SIDES, STREAMING, Outcome
from workload import median_of, show_table

SIDE = Path(__file__).with_name("feed_sides.py")
LIMIT_S = 600.0
LOOK_S, LOOK_AT_ALL_S = 0.1, 1.0
"""Seconds between two looks at shared memory, and at all processes, which takes 20 ms."""
RATIOS = ((OURS_RAY, RAY_DATA), (OURS_LOCAL, SCAN), (OURS_LOCAL, LOADER))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each side; medians are shown")
    parser.add_argument("--only", choices=SIDES, action="append", help="sides to run; all by default")
    parser.add_argument("--kind", choices=KINDS, action="append", help="data to read; both by default")
    parser.add_argument("--workers", type=int, choices=(1, 2), action="append", help="both by default")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of numbers")
    parser.add_argument("--pictures", type=int, default=50_000, help="rows of pictures")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each worker reads")
    parser.add_argument("--scratch", help="directory that keeps the data for the next time; by default they are deleted")
    parser.add_argument("--streaming-python", help="a Python that has mosaicml-streaming, besides what raytrain needs")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="feed-") as scratch:
        results = compare(arguments, arguments.scratch or scratch)
    if arguments.json:
        plain = {title: {side: [asdict(one) for one in some] for side, some in by.items()} for title, by in results.items()}
        print(json.dumps(plain, indent=1))
    else:
        for title, outcomes in results.items():
            show(title, outcomes)


def compare(arguments, scratch: str) -> dict[str, dict[str, list[Outcome]]]:
    """Runs the sides of each case in turn; the outcomes by case and side."""
    sides = [side for side in arguments.only or SIDES if side != STREAMING or arguments.streaming_python]
    results = {}
    for kind, num_workers in itertools.product(arguments.kind or KINDS, arguments.workers or (1, 2)):
        num_rows = arguments.rows if kind == "tabular" else arguments.pictures
        directory = make_data(scratch, kind, num_rows, arguments.streaming_python if STREAMING in sides else None)
        case = Case(kind, directory, num_workers, arguments.seconds)
        outcomes: dict[str, list[Outcome]] = {side: [] for side in sides}
        for number, side in itertools.product(range(arguments.repeat), sides):
            print(f"{case.title}: run {number + 1} of {arguments.repeat}: {side}", file=sys.stderr, flush=True)
            outcomes[side].append(run(arguments.streaming_python if side == STREAMING else sys.executable, side, case))
        results[case.title] = outcomes
    return results


def run(python: str, side: str, case: Case) -> Outcome:
    """Runs a side in a fresh process, with one thread per process, and watches its memory."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="feed-") as scratch:
        found, log = Path(scratch, "found"), Path(scratch, "log")
        with log.open("w") as out:
            words = [python, str(SIDE), side, json.dumps(asdict(case)), str(found)]
            shared_before = shared_bytes()
            child = subprocess.Popen(words, stdout=out, stderr=out, env=environment)
            memory = Memory(child.pid, shared_before)
            try:
                code = child.wait(LIMIT_S)
            finally:
                stop(child)
                memory.close()
        if code:
            sys.exit(f"{side} ended with {code}:\n{log.read_text()[-3000:]}")
        workers = [Outcome(**one) for one in json.loads(found.read_text())]
    return Outcome(
        rows_per_s=sum(one.rows_per_s for one in workers),
        first_s=max(one.first_s for one in workers),
        worker_bytes=max(one.worker_bytes for one in workers),
        resized_s=max((one.resized_s for one in workers if one.resized_s is not None), default=None),
        all_bytes=memory.all_bytes,
        shared_bytes=memory.shared_bytes,
    )


def stop(child: subprocess.Popen) -> None:
    """Ends a side that runs still, in a way that Ray's processes end with it."""
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()


class Memory(threading.Thread):
    """Watches the memory of a process and of all below it, and shared memory beyond what there was before."""

    def __init__(self, pid: int, shared_before: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._before, self._closed = pid, shared_before, threading.Event()
        self.all_bytes = self.shared_bytes = 0
        self.start()

    def run(self) -> None:
        for look in itertools.count():
            shared = shared_bytes() - self._before
            self.shared_bytes = max(self.shared_bytes, shared)
            if look % round(LOOK_AT_ALL_S / LOOK_S) == 0:
                self.all_bytes = max(self.all_bytes, shared + private_bytes(self._pid))
            if self._closed.wait(LOOK_S):
                return

    def close(self) -> None:
        self._closed.set()
        self.join()


def shared_bytes() -> int:
    return psutil.disk_usage("/dev/shm").used


def private_bytes(pid: int) -> int:
    """Memory of a process and of all below it that is theirs alone, without the files that they have mapped."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                info = process.memory_info()
                total += info.rss - info.shared
    return total


def show(title: str, outcomes: dict[str, list[Outcome]]) -> None:
    rows, rates = [], {}
    for side, some in outcomes.items():
        low, rates[side], high = np.percentile([one.rows_per_s for one in some], (25, 50, 75))
        cells = [f"{rates[side]:,.0f}", f"{low:,.0f} to {high:,.0f}", seconds([one.first_s for one in some])]
        cells.append(seconds([one.resized_s for one in some if one.resized_s is not None]))
        cells += [mb([getattr(one, field) for one in some]) for field in ("worker_bytes", "all_bytes", "shared_bytes")]
        rows.append([side, *cells])
    header = ["", "rows/s", "quartiles", "first batch", "resized", "worker", "all", "shared"]
    show_table(f"{title}; medians of {len(next(iter(outcomes.values())))}", header, rows)
    for ours, other in RATIOS:
        if ours in rates and other in rates:
            print(f"{ours} : {other} = {rates[ours] / rates[other]:.2f}")
    print()


def seconds(values: list[float]) -> str:
    return f"{median_of(values):.2f} s" if values else ""


def mb(values: list[int]) -> str:
    return f"{median_of(values) / 1e6:,.0f} MB"


if __name__ == "__main__":
    main()
