from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from raytrain.data import ray_reader
from raytrain.data.arrays import arrays
from raytrain.data.ray_reader import RayReader, _in_turn, _tasks
from raytrain.data.reading import Block, Unit, Work
from raytrain.plan.order import Plan


def some_units(*lengths: int) -> list[Unit]:
    ends = np.cumsum(lengths).tolist()
    return [Unit(0, 0, end - n, end, end - n, end) for n, end in zip(lengths, ends, strict=True)]


def block(unit: Unit) -> Block:
    return Block(0, unit.begin, np.arange(unit.begin, unit.end), {})


def test_units_share_a_task_up_to_its_rows_and_a_larger_one_has_its_own() -> None:
    tasks = list(_tasks(iter(some_units(10, 20, 70, 1, 300, 60, 40)), max_rows=100))
    assert [[unit.end - unit.begin for unit in task] for task in tasks] == [[10, 20, 70], [1], [300], [60, 40]]


def test_the_blocks_of_all_datasets_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "FIRST_TASKS", 3)
    monkeypatch.setattr(ray_reader, "TASKS_PER_DATASET", 7)
    tasks = list(_tasks(iter(some_units(*[5] * 100)), max_rows=10))
    sizes = []

    def run(some: list[list[Unit]]) -> Iterator[Block]:
        sizes.append(len(some))
        return (block(unit) for task in some for unit in task)

    made = list(_in_turn(run, iter(tasks)))
    assert [row for one in made for row in one.rows.tolist()] == list(range(500))
    assert sizes == [3] + [7] * 6 + [5]


def test_the_next_dataset_starts_while_the_latest_one_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_reader, "FIRST_TASKS", 6)
    started = threading.Semaphore(0)

    def run(some: list[list[Unit]]) -> Iterator[Block]:
        started.release()
        for task in some:
            yield from map(block, task)

    blocks = _in_turn(run, iter([[unit] for unit in some_units(*[5] * 60)]))
    assert next(blocks).place == 0
    assert started.acquire(timeout=10)
    next(blocks)
    next(blocks)
    assert started.acquire(timeout=10)  # four of its six tasks were left
    assert next(blocks).place == 15
    assert not started.acquire(blocking=False)  # one at a time
    blocks.close()


def test_few_rows_are_read_directly() -> None:
    source = arrays(id=np.arange(10_000))
    plan = Plan(10_000, None, 100, 2)
    assert len(RayReader().parts(Work(source, plan, dict, (0, 1), 30, 50))) == 1
    assert len(RayReader().parts(Work(source, plan, dict, (0, 1), 30, 51))) == 2
