"""Each row about machines: green where all is well, red for each fault, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.cluster.doctor import verdicts_machine as verdicts
from raytrain.cluster.doctor.facts import Disk
from tests.unit.cluster.doctor.values import GIB, VERSIONS, A, B, facts, node, torch

NODES = {A: node(A), B: node(B)}


def test_gpus_that_ray_offers_and_torch_sees_are_green() -> None:
    nodes = {A: node(A, gpus=8.0), B: node(B, gpus=4.0)}
    row = verdicts.gpus(nodes, {A: torch(8), B: torch(4)})
    assert (row.state, row.found) == ("ok", "12 on all 2 nodes")
    assert verdicts.gpus(NODES, {A: torch(), B: torch()}).state == "-"


@pytest.mark.parametrize(
    ("offered", "seen", "fix"), [(2.0, 0, "install a torch with CUDA"), (0.0, 2, "--num-gpus set to what torch sees")]
)
def test_gpus_that_only_one_of_them_knows_are_red(offered: float, seen: int, fix: str) -> None:
    row = verdicts.gpus({A: node(A), B: node(B, gpus=offered)}, {A: torch(), B: torch(seen)})
    assert (row.state, row.found) == ("red", f"{B}: Ray offers {offered:g}, torch sees {seen}")
    assert fix in row.fix


def test_a_node_without_torch_is_told_with_the_packages_and_not_with_the_gpus() -> None:
    torches = {A: torch(), B: torch(error="libcudart.so.12: not found")}
    assert verdicts.gpus({A: node(A), B: node(B, gpus=2.0)}, torches).state == "-"
    row = verdicts.packages(facts(), {A: facts(), B: facts()}, torches)
    assert (row.state, row.found) == ("red", f"{B}: torch cannot be imported (libcudart.so.12: not found)")


def test_one_driver_and_one_nccl_are_green() -> None:
    both = {A: facts(gpu_drivers=("550.54",) * 8), B: facts(gpu_drivers=("550.54",))}
    row = verdicts.drivers(both, {A: torch(8, "2.27.5"), B: torch(1, "2.27.5")})
    assert (row.state, row.found) == ("ok", "driver 550.54, NCCL 2.27.5 on all 2 nodes")
    assert verdicts.drivers({A: facts()}, {A: torch()}).state == "-"


@pytest.mark.parametrize(
    ("drivers", "nccl", "found"),
    [
        (("535.1", "535.1"), "2.27.5", f"{A}: driver 550.54, NCCL 2.27.5; {B}: driver 535.1, NCCL 2.27.5"),
        (("550.54",), "2.21.5", f"{A}: driver 550.54, NCCL 2.27.5; {B}: driver 550.54, NCCL 2.21.5"),
        (("550.54", "535.1"), "2.27.5", f"{A}: driver 550.54, NCCL 2.27.5; {B}: driver 550.54 and 535.1, NCCL 2.27.5"),
    ],
)
def test_two_drivers_or_two_versions_of_nccl_are_red(drivers: tuple[str, ...], nccl: str, found: str) -> None:
    both = {A: facts(gpu_drivers=("550.54",)), B: facts(gpu_drivers=drivers)}
    row = verdicts.drivers(both, {A: torch(1, "2.27.5"), B: torch(1, nccl)})
    assert (row.state, row.found) == ("red", found)


def test_the_same_packages_are_green() -> None:
    row = verdicts.packages(facts(), {A: facts(), B: facts()}, {A: torch(), B: torch()})
    assert (row.state, row.found) == ("ok", "python 3.11.7, ray 2.60.0, torch 2.13.0+cu128, 14 more alike")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"versions": VERSIONS | {"numpy": "0.0.1"}}, "numpy 0.0.1 (driver: 1.0)"),
        ({"versions": VERSIONS | {"numpy": ""}}, "no numpy (driver: 1.0)"),
        ({"versions": VERSIONS | {"raytrain": ""}, "raytrain_files": ""}, "no raytrain (driver: 0.1.0)"),
        ({"raytrain_files": "xyz"}, "raytrain's files are not those of the driver"),
        (
            {"versions": dict.fromkeys(VERSIONS, "7")},
            "python 7 (driver: 3.11.7), raytrain 7 (driver: 0.1.0), ray 7 (driver: 2.60.0) and 14 more",
        ),
    ],
)
def test_other_packages_than_the_drivers_are_red(more: dict[str, Any], found: str) -> None:
    row = verdicts.packages(facts(), {A: facts(), B: facts(**more)}, {})
    assert (row.state, row.found) == ("red", f"{B}: {found}")


def test_disks_with_room_are_green_and_the_fullest_is_told() -> None:
    row = verdicts.disk(Disk("/shared/runs", 7 * GIB, 100 * GIB), {A: facts(), B: facts()}, GIB)
    assert (row.state, row.found) == ("ok", "at least 7.0 GiB free")
    assert verdicts.disk(None, {}, GIB).state == "-"


@pytest.mark.parametrize(
    ("free", "total", "least", "found"),
    [
        (0.5, 2, 1, "512.0 MiB of 2.0 GiB free at /tmp/ray"),
        (40, 1000, 1, "40.0 GiB of 1000.0 GiB free at /tmp/ray"),
        (8, 100, 10, "8.0 GiB of 100.0 GiB free at /tmp/ray"),
    ],
)
def test_a_disk_that_is_short_of_the_least_or_too_full_for_spilling_is_red(
    free: float, total: float, least: float, found: str
) -> None:
    full = facts(temp=Disk("/tmp/ray", int(free * GIB), int(total * GIB)))
    row = verdicts.disk(None, {A: facts(), B: full}, least * GIB)
    assert (row.state, row.found) == ("red", f"{B}: {found}")


def test_a_full_storage_is_red() -> None:
    row = verdicts.disk(Disk("/shared/runs", 0, 100 * GIB), {A: facts()}, GIB)
    assert (row.state, row.found) == ("red", "storage: 0 B of 100.0 GiB free at /shared/runs")


def test_object_stores_in_memory_are_green() -> None:
    row = verdicts.shared_memory(NODES, {A: facts(), B: facts()})
    assert (row.state, row.found) == ("ok", "object stores of 2.0 GiB or more, in /dev/shm")
    assert verdicts.shared_memory(NODES, {A: facts(shm_bytes=0)}).state == "-"


@pytest.mark.parametrize(
    ("store", "shm", "found"),
    [
        ("/tmp/ray", GIB // 16, "store of 2.0 GiB in /tmp/ray, /dev/shm has 64.0 MiB"),
        ("/dev/shm", GIB, "store of 2.0 GiB in /dev/shm, /dev/shm has 1.0 GiB"),
        ("", GIB, "store of 2.0 GiB in /dev/shm, /dev/shm has 1.0 GiB"),
    ],
)
def test_an_object_store_that_is_larger_than_shared_memory_is_red(store: str, shm: int, found: str) -> None:
    row = verdicts.shared_memory(NODES, {A: facts(), B: facts(object_store=store, shm_bytes=shm)})
    assert (row.state, row.found) == ("red", f"{B}: {found}")


@pytest.mark.parametrize(
    ("limit", "state", "found"),
    [
        (8192, "ok", "limit 8,192 or more"),
        (8191, "red", f"{B}: limit 8,191"),
        (1024, "red", f"{B}: limit 1,024"),
        (-1, "ok", "limit 65,536 or more"),
    ],
)
def test_open_files(limit: int, state: str, found: str) -> None:
    row = verdicts.open_files({A: facts(), B: facts(open_files=limit)})
    assert (row.state, row.found) == (state, found)


def test_no_limit_of_open_files_is_green() -> None:
    assert verdicts.open_files({A: facts(open_files=-1)}).found == "no limit"


@pytest.mark.parametrize(
    ("free", "workers", "cpus", "state", "found"),
    [
        (1.0, 0, 1.0, "ok", "1 free; reading needs 1"),
        (0.5, 0, 1.0, "red", "0.5 free; reading needs 1"),
        (9.0, 4, 2.0, "ok", "9 free; 4 workers and reading need 9"),
        (8.0, 4, 2.0, "red", "8 free; 4 workers and reading need 9"),
        (2.0, 1, 0.5, "ok", "2 free; 1 worker and reading need 1.5"),
    ],
)
def test_free_cpus(free: float, workers: int, cpus: float, state: str, found: str) -> None:
    row = verdicts.cpus(free, workers, cpus)
    assert (row.state, row.found, bool(row.fix)) == (state, found, state == "red")
