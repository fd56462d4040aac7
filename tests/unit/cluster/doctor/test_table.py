"""The table that people see, in 80 columns and without colour, and the plain values."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from raytrain.cluster.doctor import verdicts
from raytrain.cluster.doctor.table import render, to_json
from raytrain.cluster.doctor.verdicts import AllReduce, Clock, Disk, Row
from tests.golden import check
from tests.unit.cluster.doctor.test_verdicts import GIB, NOPE, VERSIONS, A, B, facts, node, part, torch


def green() -> list[Row]:
    nodes = {A: node(A, gpus=8.0), B: node(B, gpus=8.0)}
    both = dict.fromkeys(nodes, facts(gpu_drivers=("550.54.15",) * 8))
    torches = dict.fromkeys(nodes, torch(8, "2.27.5"))
    parts = {
        "gloo": dict.fromkeys(nodes, part()),
        "nccl": dict.fromkeys(nodes, part(latency_s=0.000055, bytes_per_s=90 * GIB)),
    }
    return [
        *(verdicts.nodes(nodes, {}), verdicts.packages(facts(), both, torches), verdicts.gpus(nodes, torches)),
        *(verdicts.drivers(both, torches), verdicts.storage("s3://bucket/runs", {}, 2), verdicts.all_reduce(parts, 15)),
        *(verdicts.interfaces(nodes, both), verdicts.clocks({A: Clock(0.0, 0.001), B: Clock(0.003, 0.001)})),
        *(verdicts.disk(None, both, GIB), verdicts.shared_memory(nodes, both), verdicts.open_files(both)),
        *(verdicts.cpus(96.0, 16, 4.0), verdicts.access(f"{A}:6379", True)),
    ]


def some_red() -> list[Row]:
    nodes = {A: node(A), B: node(B, gpus=2.0, drains_in_s=95.0), "10.0.0.3": node("10.0.0.3")}
    odd = facts(
        versions=VERSIONS | {"numpy": "0.0.1"},
        interface="",
        interface_address="127.0.1.1",
        open_files=1024,
        session_disk=Disk("/tmp/ray/session_2026-12-01_03-00-00_000000_42", GIB // 2, 20 * GIB),
        object_store="/tmp/ray/session_2026-12-01_03-00-00_000000_42",
        shm_bytes=GIB // 16,
    )
    both, torches = {A: facts(gpu_drivers=("550.54",)), B: odd}, {A: torch(), B: torch()}
    return [
        *(verdicts.nodes(nodes, {"10.0.0.3": "no answer in 30 s"}), verdicts.packages(facts(), both, torches)),
        verdicts.gpus(nodes, torches),
        verdicts.drivers({A: facts(gpu_drivers=("550.54",)), B: facts(gpu_drivers=("535.104",))}, torches),
        verdicts.storage("/root/runs", {B: "cannot read what the driver wrote (FileNotFoundError: [Errno 2] no file)"}, 2),
        verdicts.all_reduce({"gloo": {A: AllReduce("connecting"), B: AllReduce("connecting", NOPE)}}, 15),
        *(verdicts.interfaces(nodes, both), verdicts.clocks({A: Clock(0.0, 0.001), B: Clock(-100.0, 0.001)})),
        *(verdicts.disk(None, both, GIB), verdicts.shared_memory(nodes, both), verdicts.open_files(both)),
        *(verdicts.cpus(0.0, 2, 1.0), verdicts.access("8.8.8.8:6379", False)),
    ]


def rendered(rows: list[Row], width: int = 80, is_unicode: bool = True, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(render(rows, 8.24, width, is_unicode), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("name", "rows"), [("green", green()), ("red", some_red())])
def test_the_table_is_as_agreed(name: str, rows: list[Row]) -> None:
    text = rendered(rows)
    check(f"doctor_{name}.txt", text)
    assert max(map(len, text.splitlines())) <= 80
    assert {row.state for row in rows} == {"ok" if name == "green" else "red"}


def test_an_ascii_terminal_gets_words_and_a_narrow_one_more_lines() -> None:
    text = rendered([*some_red()[:2], Row("GPUs", "-", "no node has any")], is_unicode=False)
    assert text.startswith("RED  nodes     10.0.0.3: no answer")
    assert text.isascii()
    assert "\n-    GPUs      no node has any\n" in text
    assert max(map(len, rendered(some_red(), width=60).splitlines())) <= 60


def test_a_colour_terminal_shows_red_and_the_fix() -> None:
    assert "\x1b[1;31m✗" in rendered(some_red(), colour=True)
    assert "\x1b[1;33mfix: " in rendered(some_red(), colour=True)


def test_the_report_as_plain_values() -> None:
    values = to_json(some_red()[-1:] + green()[:1], 8.24391)
    assert (values["green"], values["seconds"]) == (False, 8.244)
    found = "2 nodes, all responding, none draining"
    assert values["rows"][1] == {"name": "nodes", "state": "ok", "found": found, "fix": ""}
    assert to_json(green(), 1.0)["green"]
