"""How does each side of `feed.py` read a case? Runs one side, in its own processes, and writes what its workers saw.

    python jobs/bench/feed_sides.py SIDE CASE OUT

raytrain's Loader is driven as a worker drives it: in Ray tasks where Ray Data reads, else in plain processes. Workers that
wait for each other where an epoch begins, those of Ray Data and of streaming, stop together at the end of an epoch.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from feed_data import GROUPS, WINDOW, Case, decode, decode_columns, to_arrays, to_rows, to_tensors

BATCH, NUM_LOGICAL = 1024, 2
READERS = 2
"""Processes or Ray tasks that read for each worker, and batches that each of them may be ahead of it, as in a DataLoader."""
LEAST_BATCHES = 6


@dataclass
class Outcome:
    """What a worker of a side saw, or, put together, all of them; seconds and bytes."""

    rows_per_s: float
    first_s: float
    worker_bytes: int
    resized_s: float | None = None
    all_bytes: int = 0
    shared_bytes: int = 0


class Meter:
    """Counts the rows of one worker, for so many seconds from its first batch on. Time begins when it is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began, self._marks = seconds, time.perf_counter(), []
        self.total = 0

    @property
    def is_done(self) -> bool:
        return len(self._marks) >= LEAST_BATCHES and self._marks[-1][0] - self._marks[0][0] >= self._seconds

    def add(self, *batches) -> None:
        """Counts what came at once."""
        self.total += sum(int(batch["label"].sum()) for batch in batches)
        if not self.is_done:
            self._marks.append((time.perf_counter(), sum(len(batch["label"]) for batch in batches)))

    def outcome(self) -> Outcome:
        first, last = self._marks[0][0], self._marks[-1][0]
        late = [mark for mark in self._marks if mark[0] >= (first + last) / 2 or mark in self._marks[-2:]]
        rows = sum(rows for _, rows in late[1:])
        mine = psutil.Process()
        peak = sum(peak_bytes(process.pid) for process in (mine, *mine.children(recursive=True)))
        return Outcome(rows / (last - late[0][0]), first - self._began, peak)


def peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def feed_raytrain(case: Case, rank: int, reader) -> Outcome:
    """Reads, and then once more as after a change of the workers: from 1 worker to 2, or from 2 to 1."""
    import raytrain
    from raytrain.data.loader import Loader
    from raytrain.data.reading import ReadRequest
    from raytrain.plan import Plan, logical_workers_of

    source = raytrain.parquet(case.directory)
    plan = Plan(source.num_rows, source.chunk_rows, BATCH * case.num_workers, NUM_LOGICAL, shuffle_window=WINDOW)
    transform = decode_columns if case.kind == "pictures" else None

    def load(num_workers: int, first_step: int) -> Loader:
        assigned = tuple(logical_workers_of(rank % num_workers, num_workers, NUM_LOGICAL))
        return Loader(ReadRequest(source, plan, transform, assigned, first_step, sys.maxsize), None, reader)

    meter = Meter(case.seconds)
    loader = load(case.num_workers, 0)
    for step in itertools.count():
        micro_batches = itertools.chain.from_iterable(loader.step(step).values())
        meter.add(*(micro_batch.columns for micro_batch in micro_batches))
        if meter.is_done:
            break
    outcome = meter.outcome()
    loader.close()
    began = time.perf_counter()
    loader = load(NUM_LOGICAL + 1 - case.num_workers, step + 1)
    loader.step(step + 1)
    outcome.resized_s = time.perf_counter() - began
    loader.close()
    return outcome


def feed_with_ray(case: Case, rank: int) -> Outcome:
    from raytrain.data.ray_reader import RayReader

    return feed_raytrain(case, rank, RayReader(READERS))


def feed_locally(case: Case, rank: int) -> Outcome:
    from raytrain.data.reading import LocalReader

    return feed_raytrain(case, rank, LocalReader())


def feed_data_loader(case: Case, rank: int) -> Outcome:
    """Row groups are shuffled, and the rows of 4 of them as arrays; each process has row groups of its own."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Rows(IterableDataset):
        def __iter__(self):
            generator = np.random.default_rng(get_worker_info().seed)
            part = slice(rank * READERS + get_worker_info().id, None, case.num_workers * READERS)
            groups = list(itertools.product(case.files, range(GROUPS)))[part]
            while True:
                order = generator.permutation(len(groups))
                for first in range(0, len(groups), WINDOW):
                    some = [groups[i] for i in order[first : first + WINDOW]]
                    tables = [pq.ParquetFile(file).read_row_group(group) for file, group in some]
                    yield from self.batches(to_rows(pa.concat_tables(tables)), generator)

        def batches(self, arrays, generator):
            order = generator.permutation(len(arrays["label"]))
            for first in range(0, len(order), BATCH):
                yield to_tensors({name: values[order[first : first + BATCH]] for name, values in arrays.items()})

    torch.set_num_threads(1)
    options = {"num_workers": READERS, "prefetch_factor": READERS, "multiprocessing_context": "fork"}
    return run_alone(Meter(case.seconds), iter(DataLoader(Rows(), batch_size=None, **options)))


def feed_scan(case: Case, rank: int) -> Outcome:
    def batches() -> Iterator:
        while True:
            for batch in ds.dataset(case.files[rank :: case.num_workers]).to_batches(batch_size=BATCH):
                yield to_tensors(to_arrays(batch))

    return run_alone(Meter(case.seconds), batches())


def feed_streaming(case: Case, rank: int) -> Outcome:
    import torch
    import torch.distributed as dist
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Rows(StreamingDataset):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return row if case.kind == "tabular" else {**row, "pixels": decode(row["pixels"][None])[0]}

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.num_workers, "LOCAL_WORLD_SIZE": case.num_workers}
    os.environ.update({name: str(value) for name, value in place.items()})
    store = f"file://{tempfile.gettempdir()}/feed-store-{os.getppid()}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.num_workers)
    rows = Rows(local=f"{case.directory}/mds", shuffle=True, shuffle_block_size=case.window_rows, batch_size=BATCH)
    options = {"num_workers": READERS, "prefetch_factor": READERS, "multiprocessing_context": "fork"}
    loader = DataLoader(rows, batch_size=BATCH, persistent_workers=True, **options)
    meter = Meter(case.seconds)
    run_together(meter, lambda: loader)
    return meter.outcome()


def run_alone(meter: Meter, batches: Iterator) -> Outcome:
    while not meter.is_done:
        meter.add(next(batches))
    return meter.outcome()


def run_together(meter: Meter, epoch) -> None:
    """Runs epochs until all workers are done."""
    import torch
    import torch.distributed as dist

    done = torch.zeros(1)
    while not done:
        for batch in epoch():
            meter.add(batch)
            if meter.is_done and dist.get_world_size() == 1:
                return
        done.fill_(meter.is_done)
        dist.all_reduce(done, dist.ReduceOp.MIN)


def in_processes(feed, case: Case) -> list[Outcome]:
    """Runs a feed in as many new processes as workers, all of which begin together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(case.num_workers)
    with ProcessPoolExecutor(case.num_workers, context, enter, (barrier,)) as pool:
        return list(pool.map(functools.partial(feed, case), range(case.num_workers)))


def enter(barrier) -> None:
    import torch  # noqa: F401 - takes seconds, and not the same in all processes

    barrier.wait()


def in_ray(feed, case: Case) -> list[Outcome]:
    """Runs a feed in as many Ray tasks as workers."""
    import ray

    init_ray(case)
    return ray.get([ray.remote(num_cpus=1)(feed).remote(case, rank) for rank in range(case.num_workers)])


def init_ray(case: Case) -> None:
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=case.num_workers * (1 + READERS))


def in_ray_train(is_shuffled: bool, case: Case) -> list[Outcome]:
    """Runs Ray Data in a TorchTrainer; its workers write down what they saw."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    init_ray(case)
    data = ray.data.read_parquet(case.files, shuffle="files" if is_shuffled else None)
    if case.kind == "pictures":
        data = data.map_batches(decode_columns, batch_size=BATCH)
    buffer_rows = case.window_rows if is_shuffled else None

    def train(config) -> None:
        shard = ray.train.get_dataset_shard("train")
        meter = Meter(case.seconds)
        run_together(meter, lambda: shard.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=buffer_rows))
        rank = ray.train.get_context().get_world_rank()
        Path(config["scratch"], str(rank)).write_text(json.dumps(asdict(meter.outcome())))

    with tempfile.TemporaryDirectory() as scratch:
        TorchTrainer(
            train,
            train_loop_config={"scratch": scratch},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=case.num_workers),
            run_config=RunConfig(name="feed", storage_path=f"{scratch}/storage"),
            datasets={"train": data},
        ).fit()
        return [Outcome(**json.loads(Path(scratch, str(rank)).read_text())) for rank in range(case.num_workers)]


OURS_RAY, OURS_LOCAL = "raytrain, Ray Data", "raytrain, local"
RAY_DATA, LOADER, STREAMING, SCAN = "Ray Data", "DataLoader", "MosaicML streaming", "scan"
SIDES = {
    OURS_RAY: functools.partial(in_ray, feed_with_ray),
    OURS_LOCAL: functools.partial(in_processes, feed_locally),
    RAY_DATA: functools.partial(in_ray_train, True),
    f"{RAY_DATA}, not shuffled": functools.partial(in_ray_train, False),
    LOADER: functools.partial(in_processes, feed_data_loader),
    STREAMING: functools.partial(in_processes, feed_streaming),
    SCAN: functools.partial(in_processes, feed_scan),
}


if __name__ == "__main__":
    found = SIDES[sys.argv[1]](Case(**json.loads(sys.argv[2])))
    Path(sys.argv[3]).write_text(json.dumps([asdict(one) for one in found]))
