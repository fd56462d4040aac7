"""The table that people see, in 80 columns and without colour, and the plain values."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from raytrain.cluster.doctor import verdicts_machine as machine
from raytrain.cluster.doctor import verdicts_network as network
from raytrain.cluster.doctor.facts import Clock, Disk, Ring, Row
from raytrain.cluster.doctor.table import is_green, render, to_json
from tests.golden import check
from tests.unit.cluster.doctor.values import GIB, VERSIONS, A, B, facts, node, ring, torch

NOPE = "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: nope0"


def green() -> list[Row]:
    nodes = {A: node(A, gpus=8.0), B: node(B, gpus=8.0)}
    both = dict.fromkeys(nodes, facts(gpu_drivers=("550.54.15",) * 8))
    torches = dict.fromkeys(nodes, torch(8, "2.27.5"))
    rings = {
        "gloo": dict.fromkeys(nodes, ring()),
        "nccl": dict.fromkeys(nodes, ring(latency_s=0.000055, bytes_per_s=90 * GIB)),
    }
    return [
        network.nodes(nodes, {}),
        machine.packages(facts(), both, torches),
        machine.gpus(nodes, torches),
        machine.drivers(both, torches),
        network.storage("s3://bucket/runs", {}, 2),
        network.all_reduce(rings, 15),
        network.interfaces(nodes, both),
        network.clocks({A: Clock(0.0, 0.001), B: Clock(0.003, 0.001)}),
        machine.disk(None, both, GIB),
        machine.shared_memory(nodes, both),
        machine.open_files(both),
        machine.cpus(96.0, 16, 4.0),
        network.access(f"{A}:6379", True),
    ]


def some_red() -> list[Row]:
    nodes = {A: node(A), B: node(B, gpus=2.0, leaves_in_s=95.0), "10.0.0.3": node("10.0.0.3")}
    odd = facts(
        versions=VERSIONS | {"numpy": "0.0.1"},
        interface="",
        interface_address="127.0.1.1",
        open_files=1024,
        temp=Disk("/tmp/ray/session_2026-12-01_03-00-00_000000_42", GIB // 2, 20 * GIB),
        object_store="/tmp/ray/session_2026-12-01_03-00-00_000000_42",
        shm_bytes=GIB // 16,
    )
    both, torches = {A: facts(gpu_drivers=("550.54",)), B: odd}, {A: torch(), B: torch()}
    return [
        network.nodes(nodes, {"10.0.0.3": "no answer in 30 s"}),
        machine.packages(facts(), both, torches),
        machine.gpus(nodes, torches),
        machine.drivers({A: facts(gpu_drivers=("550.54",)), B: facts(gpu_drivers=("535.104",))}, torches),
        network.storage("/root/runs", {B: "cannot read what the driver wrote (FileNotFoundError: [Errno 2] no file)"}, 2),
        network.all_reduce({"gloo": {A: Ring("connecting"), B: Ring("connecting", NOPE)}}, 15),
        network.interfaces(nodes, both),
        network.clocks({A: Clock(0.0, 0.001), B: Clock(-100.0, 0.001)}),
        machine.disk(None, both, GIB),
        machine.shared_memory(nodes, both),
        machine.open_files(both),
        machine.cpus(0.0, 2, 1.0),
        network.access("8.8.8.8:6379", False),
    ]


def drawn(rows: list[Row], width: int = 80, is_unicode: bool = True, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(render(rows, 8.24, width, is_unicode), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("name", "rows"), [("green", green()), ("red", some_red())])
def test_the_table_is_as_agreed(name: str, rows: list[Row]) -> None:
    text = drawn(rows)
    check(f"doctor_{name}.txt", text)
    assert max(map(len, text.splitlines())) <= 80


def test_every_row_that_is_red_says_what_to_do() -> None:
    assert [row.name for row in some_red() if row.state != "red"] == []
    assert all(row.fix for row in some_red())
    assert {row.state for row in green()} == {"ok"}
    assert [row.name for row in green()] == [row.name for row in some_red()]


def test_a_terminal_without_signs_gets_words_and_a_narrow_one_more_lines() -> None:
    text = drawn([*some_red()[:2], Row("GPUs", "-", "no node has any")], is_unicode=False)
    assert text.startswith("RED  nodes     10.0.0.3: no answer")
    assert text.isascii()
    assert "\n-    GPUs      no node has any\n" in text
    assert max(map(len, drawn(some_red(), width=60).splitlines())) <= 60


def test_red_is_red_on_a_terminal() -> None:
    assert "\x1b[1;31m✗" in drawn(some_red(), colour=True)
    assert "\x1b[1;33mfix: " in drawn(some_red(), colour=True)


def test_the_plain_values() -> None:
    values = to_json(some_red()[-1:] + green()[:1], 8.24391)
    assert (values["green"], values["seconds"]) == (False, 8.244)
    assert values["rows"][1] == {"name": "nodes", "state": "ok", "found": "2 nodes, all answer and stay", "fix": ""}
    assert is_green(green())
    assert to_json(green(), 1.0)["green"]
