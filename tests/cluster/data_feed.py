"""Loaders that read with Ray Data, on one Ray; in most tests Ray Data takes over as soon as it can.

`test_data_feed` runs these in a process of their own: Ray Data leaves threads behind, and Ray ends the whole process,
without a word, when one of them touches it after a shutdown.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from numpy.typing import NDArray

from raytrain.config import RunConfig
from raytrain.data import ray_reader
from raytrain.data.in_memory import DatasetSource, dataset
from raytrain.data.loader import Loader
from raytrain.data.parquet import ParquetSource, parquet
from raytrain.data.ray_reader import RayReader, ReaderSwitch
from raytrain.data.reading import LocalReader, ReadRequest, ReadTask, RowBatch, Transform
from raytrain.data.source import Columns, Seed
from raytrain.data.tables import ray as ray_source
from raytrain.errors import DataError
from raytrain.launch.trainer import Trainer
from raytrain.plan import Plan
from raytrain.task import Task
from tests.unit.data.every_source import SOURCES

JOBS = Path(__file__).parents[2] / "jobs"

pytestmark = pytest.mark.usefixtures("small_ray")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ParquetSource:
    """12,000 rows in 24 row groups of columns of several types, "id" being the row's id."""
    directory = tmp_path_factory.mktemp("rows")
    for file in range(3):
        ids = np.arange(file * 4000, (file + 1) * 4000)
        vector = pa.FixedSizeListArray.from_arrays(np.repeat(ids, 6).astype("f4"), 6)
        columns = {"id": ids, "half": ids.astype("f2"), "flag": ids % 2 == 0, "vector": vector}
        pq.write_table(pa.table(columns), directory / f"{file}.parquet", row_group_size=500)
    return parquet(directory)


class AtOnce(ReaderSwitch):
    """Does not wait for Ray Data to run, else it would read little of the small data here."""

    def __init__(self, request: ReadRequest) -> None:
        super().__init__(request)
        self._later = super().agree()

    def agree(self) -> Iterator[ReadTask]:
        return self._later


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "ReaderSwitch", AtOnce)


def loading(request: ReadRequest, reader: Any = None) -> closing[Loader]:
    return closing(Loader(request, 50, reader or RayReader()))


def noisy(columns: Columns) -> Columns:
    """Changes shapes and types, and draws from all random generators."""
    num_rows = len(columns["id"])
    noise = np.random.rand(num_rows), [random.random() for _ in range(num_rows)], torch.rand(num_rows)
    shaped = {"vector": columns["vector"].reshape(-1, 2, 3) * 2, "small": columns["id"].astype("i4")}
    return {**columns, **shaped, **dict(zip("npt", noise, strict=True))}


def check_equal(loader: Loader, direct: Loader, step: int, request: ReadRequest, has_ids: bool = True) -> None:
    got, wanted = loader.step(step), direct.step(step)
    assert tuple(got) == request.assigned
    for logical, batches in got.items():
        assert [row for micro in batches for row in micro.row_ids.tolist()] == request.plan.row_ids(step, logical).tolist()
        for micro, other in zip(batches, wanted[logical], strict=True):
            assert not has_ids or micro.columns["id"].tolist() == micro.row_ids.tolist()
            assert micro.columns.keys() == other.columns.keys()
            for name, values in micro.columns.items():
                assert values.dtype == other.columns[name].dtype
                assert values.equal(other.columns[name])
                values.zero_()  # as a hook may do; the step may be asked for again


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("transform", "assigned", "first"), [(noisy, (0, 1, 2), 0), (None, (0, 2), 117)])
def test_r1_r13_ray_data_and_direct_reading_give_identical_micro_batches(
    source: ParquetSource,
    monkeypatch: pytest.MonkeyPatch,
    transform: Transform | None,
    assigned: tuple[int, ...],
    first: int,
) -> None:
    if transform is None:  # many small datasets, one after the other
        monkeypatch.setattr(ray_reader, "TASK_ROWS", 500)
        monkeypatch.setattr(ray_reader, "TASKS_PER_DATASET", 6)
    plan = Plan(source.num_rows, source.chunk_rows, 128, 3, shuffle_window=3)
    request = ReadRequest(source, plan, transform, assigned, first, first + plan.steps_per_epoch + 20)
    with loading(request) as loader, loading(request, LocalReader()) as direct:
        for step in range(first, request.last_step):
            check_equal(loader, direct, step, request)
            check_equal(loader, direct, step, request)


class Augmented:
    """A map-style dataset whose rows have numbers from all random generators."""

    def __len__(self) -> int:
        return 12_000

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"id": row, "noise": torch.rand(3) + np.random.rand(3) + random.random()}


@pytest.mark.usefixtures("at_once")
def test_r13_rows_of_a_dataset_have_the_same_random_numbers_in_ray_data_and_directly() -> None:
    source = dataset(Augmented())
    assert isinstance(source, DatasetSource)
    plan = Plan(12_000, None, 128, 2)
    request = ReadRequest(source, plan, None, (0, 1), 3, 3 + plan.steps_per_epoch)
    with loading(request) as loader, loading(request, LocalReader()) as direct:
        for step in range(3, request.last_step):
            check_equal(loader, direct, step, request)


class Unlucky(Exception):
    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def fails_late(columns: Columns) -> Columns:
    if (columns["id"] == 11_999).any():
        raise Unlucky(11_999)
    return columns


def loses_rows_late(columns: Columns) -> Columns:
    return {name: values[:-1] for name, values in columns.items()} if columns["id"][-1] > 9000 else columns


def run_through(source: Any, transform: Transform | None) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 500, 1, shuffle=False)
    with loading(ReadRequest(source, plan, transform, (0,), 0, plan.steps_per_epoch)) as loader:
        list(map(loader.step, range(plan.steps_per_epoch)))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("transform", "error", "args"), [(fails_late, Unlucky, (11_999,)), (loses_rows_late, DataError, ("499 rows",))]
)
def test_an_error_in_ray_data_is_raised_as_it_was_with_its_traceback(
    source: ParquetSource,
    capfd: pytest.CaptureFixture[str],
    transform: Transform,
    error: type[Exception],
    args: tuple[object],
) -> None:
    with pytest.raises(error) as caught:
        run_through(source, transform)
    assert type(caught.value) is error
    assert set(args) <= set(caught.value.args)
    own_frame = "in fails_late" if error is Unlucky else "in transformed"  # the task's, where there is one
    assert own_frame in str(caught.value.__cause__)
    assert "Traceback" not in "".join(capfd.readouterr())


@ray.remote(num_cpus=0)
class Counter:
    count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


@pytest.mark.usefixtures("at_once")
@pytest.mark.timeout(120)
def test_data_come_silently_while_actors_have_all_cpus(source: ParquetSource, capfd: pytest.CaptureFixture[str]) -> None:
    actors = [Counter.options(num_cpus=1).remote() for _ in range(2)]
    assert ray.get([actor.add.remote(0) for actor in actors]) == [0, 0]
    assert ray.available_resources().get("CPU", 0) == 0
    run_through(source, noisy)
    assert capfd.readouterr() == ("", "")
    for actor in actors:
        ray.kill(actor)


class Wide:
    """Windows of 4 MiB; an actor counts those that are read."""

    columns = ("id", "wide")
    runs_user_code = decodes = False
    left_out: dict[str, str] = {}
    chunk_rows, num_rows = (2000,) * 60, 120_000

    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def take(self, row_ids: NDArray[np.int64], seed: Seed = (0, 0)) -> Columns:
        ray.get(self.counter.add.remote(1))
        return {"id": row_ids.copy(), "wide": np.zeros((len(row_ids), 2**8))}

    def fingerprint(self) -> dict[str, Any]:
        return {}


@pytest.mark.usefixtures("at_once")
def test_memory_is_bounded_while_training_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "STORE_BYTES", 64 * 2**20)  # of finished blocks: 16 windows; some more are on the way
    monkeypatch.setattr(ray_reader, "BLOCK_BYTES", 2 * 2**20)
    counter = Counter.remote()
    plan = Plan(120_000, Wide.chunk_rows, 2000, 1, shuffle_window=1)
    with loading(ReadRequest(Wide(counter), plan, None, (0,), 0, 60)) as loader:
        loader.step(0)
        num_read = 0
        while num_read < (now := ray.get(counter.add.remote(0))):
            num_read = now
            time.sleep(1)  # until no window is read for a second
        assert 3 < num_read < 40
        assert [len(loader.step(step)[0]) for step in range(1, 60)] == [40] * 59
        assert ray.get(counter.add.remote(0)) == 60


@pytest.mark.usefixtures("at_once")
def test_close_returns_at_once_and_reading_stops(source: ParquetSource) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 100, 1)
    loader = Loader(ReadRequest(source, plan, None, (0,), 0, 10**6), None, RayReader())
    list(map(loader.step, range(100)))
    streams = list(loader._streams)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 0.3
    assert all(stream.join(30) for stream in streams)


def test_direct_reading_goes_on_until_ray_data_runs(source: ParquetSource, monkeypatch: pytest.MonkeyPatch) -> None:
    may_run, agreed, original = threading.Event(), threading.Event(), (RayReader._run, ReaderSwitch.agree)
    switched: list[int] = []

    def run(self: RayReader, shipped: Any, tasks: list[list[ReadTask]]) -> Iterator[RowBatch]:
        assert may_run.wait(60)
        yield from original[0](self, shipped, tasks)

    def agree(self: ReaderSwitch) -> Iterator[ReadTask]:
        later = original[1](self)
        switched.append(self._step or 0)
        agreed.set()
        return later

    monkeypatch.setattr(RayReader, "_run", run)
    monkeypatch.setattr(ReaderSwitch, "agree", agree)
    request = ReadRequest(source, Plan(source.num_rows, source.chunk_rows, 500, 2), noisy, (0, 1), 7, 1000)
    with loading(request) as loader, loading(request, LocalReader()) as direct:
        step = 7
        while step < 40 or step < switched[0] + 20:
            check_equal(loader, direct, step, request)
            step += 1
            if step == 40:
                assert not switched
                may_run.set()
                assert agreed.wait(60)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", SOURCES)
def test_r1_r13_ray_data_reads_every_source_as_the_worker_does(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path)
    plan = Plan(source.num_rows, source.chunk_rows, 16, 2, seed=3)
    request = ReadRequest(source, plan, None, (0, 1), 2, 140)  # more rows than are read directly for being few
    with loading(request) as loader, loading(request, LocalReader()) as direct:
        for step in range(2, 60):
            check_equal(loader, direct, step, request, has_ids=False)


def test_rows_of_a_ray_dataset_are_those_of_its_blocks_and_its_values_tell_a_resume() -> None:
    def numbers(rows: Columns) -> Columns:  # travels by value, as its module takes seconds to import
        pair = np.stack([rows["id"] / 2, rows["id"] / 4], axis=1)
        return {"id": rows["id"], "pair": pair, "text": rows["id"].astype(str)}

    made = ray.data.range(1000, override_num_blocks=4).filter(lambda row: row["id"] % 3 == 0).map_batches(numbers)
    source, again = ray_source(made), ray_source(made)
    assert source.fingerprint() == again.fingerprint()
    assert source.fingerprint()["digest"] != ray_source(ray.data.range(334)).fingerprint()["digest"]
    taken = source.take(np.array([333, 0, 5]))
    assert taken["id"].tolist() == [999, 0, 15]
    assert taken["pair"].tolist() == [[499.5, 249.75], [0, 0], [7.5, 3.75]]
    assert source.left_out.keys() == {"text"}
    plan = Plan(source.num_rows, source.chunk_rows, 50, 2)
    with loading(ReadRequest(source, plan, None, (0, 1), 0, 7), LocalReader()) as loader:
        seen = [
            int(row) for step in range(7) for micros in loader.step(step).values() for m in micros for row in m.columns["id"]
        ]
    assert sorted(seen) == list(range(0, 1000, 3))
    with pytest.raises(DataError, match="0 rows"):
        ray_source(made.filter(lambda row: False))
    nothing = ray.data.from_items([{"x": 1}, {"x": None}, {"x": 3}], override_num_blocks=1)
    with pytest.raises(DataError, match=r"row 1, column 'x'"):
        ray_source(nothing).take(np.arange(3))


EXAMPLES = {
    "images": ["--run.epochs", "1", "--run.best", "min:valid/loss"],
    "heatmaps": ["--run.steps", "10", "--width", "8"],
}


@pytest.mark.parametrize("job", EXAMPLES)
def test_the_examples_with_files_train_on_two_workers(job: str, small_ray: str, tmp_path: Path) -> None:
    workers = ["--run.workers", "2", "--run.cpus-per-worker", "0.5"]
    done = subprocess.run(
        [sys.executable, str(JOBS / f"{job}.py"), "--cache", "made", *workers, *EXAMPLES[job]],
        env=os.environ | {"RAY_ADDRESS": small_ray},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "valid/loss" in done.stdout


class RayRows(Task):
    """A task whose rows are made by Ray Data."""

    def data(self) -> Any:
        rows = ray.data.range(300, override_num_blocks=3)
        return {"train": rows.map_batches(lambda rows: {"x": rows["id"] / 300})}

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, dtype=torch.float64)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return (model(batch["x"][:, None])[:, 0] - batch["x"]) ** 2


def test_a_run_trains_on_a_ray_dataset(tmp_path: Path) -> None:
    config = RunConfig(storage=str(tmp_path), workers=2, cpus_per_worker=0.5, epochs=3, global_batch=50)
    result = Trainer(RayRows(), config).fit()
    assert (result.outcome, result.step) == ("completed", 18)
