from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from raytrain.data.loader import Loader
from raytrain.data.reading import LocalReader, ReadRequest
from raytrain.data.source import Columns, Source
from raytrain.plan import Plan, logical_workers_of
from tests.unit.data.every_source import SOURCES


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return SOURCES[request.param](tmp_path)


def as_bytes(columns: Columns) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(values.dtype), values.shape, values.tobytes()) for name, values in columns.items()}


def test_r1_r13_rows_are_the_same_however_they_are_read(source: Source) -> None:
    whole = source.take(np.arange(source.num_rows), (5, 2))
    assert tuple(whole) == tuple(source.columns)
    parts = np.array_split(np.random.default_rng(0).permutation(source.num_rows), 7)
    other = pickle.loads(pickle.dumps(source))
    with ThreadPoolExecutor(1 if source.runs_user_code else 7) as pool:
        for rows, taken in zip(parts, pool.map(lambda rows: other.take(rows, (5, 2)), parts), strict=True):
            assert as_bytes(taken) == as_bytes({name: values[rows] for name, values in whole.items()})
            assert all(values.flags.writeable for values in taken.values())


def test_r9_a_source_is_small_when_pickled_and_its_fingerprint_is_plain(source: Source, tmp_path: Path) -> None:
    assert len(pickle.dumps(source)) < 20_000
    fingerprint = source.fingerprint()
    assert fingerprint == pickle.loads(pickle.dumps(source)).fingerprint()
    assert all(isinstance(value, (str, int, float, list)) for value in fingerprint.values())
    assert sum(source.chunk_rows or (source.num_rows,)) == source.num_rows


def test_p3_p4_each_step_has_the_same_rows_for_any_workers(source: Source) -> None:
    plan = Plan(source.num_rows, source.chunk_rows, 16, 3, seed=4)

    def batches(rank: int, num_ranks: int, first: int, last: int) -> dict[tuple[int, int], list[object]]:
        request = ReadRequest(source, plan, None, tuple(logical_workers_of(rank, num_ranks, 3)), first, last)
        found = {}
        with closing(Loader(request, 4, LocalReader())) as loader:
            for step in range(first, last):
                for logical, micros in loader.step(step).items():
                    found[step, logical] = [
                        as_bytes({name: tensor.numpy() for name, tensor in micro.columns.items()}) for micro in micros
                    ]
        return found

    num_steps = 2 * plan.steps_per_epoch
    alone = batches(0, 1, 0, num_steps)
    assert batches(0, 2, 3, num_steps) | batches(1, 2, 3, num_steps) == {k: v for k, v in alone.items() if k[0] >= 3}
    assert batches(2, 3, 1, 9) == {k: v for k, v in alone.items() if k[1] == 2 and 1 <= k[0] < 9}
