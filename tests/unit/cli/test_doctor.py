"""`raytrain doctor`: addresses that it cannot use, exit codes, the table and JSON."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest

from raytrain.cli.app import run
from raytrain.cluster.doctor import examine
from raytrain.cluster.doctor.verdicts import Row
from raytrain.launch import cluster
from tests.unit.cluster.doctor.test_table import green, some_red


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No Ray: the rows to answer with come first, and the order that was given is added."""
    given: list[Any] = [green()]

    def look(order: examine.DoctorConfig) -> list[Row]:
        given.append(order)
        rows: list[Row] = given[0]
        return rows

    monkeypatch.setattr(cluster, "connected", contextlib.nullcontext)
    monkeypatch.setattr(examine, "examine", look)
    return given


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("http://head:8265", "run it there: ray job submit --address http://head:8265 -- raytrain doctor"),
        ("ray://head:10001", "run it on a node: ray exec cluster.yaml 'raytrain doctor --address auto'"),
    ],
)
def test_an_address_of_another_kind_is_refused(
    address: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--address", address]) == 2
    assert capsys.readouterr().err.splitlines()[1::2] == [f"  value: {address}", f"  fix:   {fix}"]
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert run(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("error: RAY_ADDRESS\n")


def test_an_address_where_nobody_listens_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert run(["doctor", "--address", f"127.0.0.1:{port}"]) == 2
    assert f"value: 127.0.0.1:{port}: [Errno 111] Connection refused" in capsys.readouterr().err


def test_all_green_exits_0_and_what_was_asked_is_passed_on(
    examined: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    flags = "--storage s3://bucket/runs --workers 4:64 --cpus-per-worker 2 --min-disk 10 --limit 30"
    assert run(["doctor", *flags.split()]) == 0
    assert "all 13 green" in capsys.readouterr().out
    order = examined[1]
    assert (order.storage, order.workers, order.cpus_per_worker) == ("s3://bucket/runs", 4, 2.0)
    assert (order.min_disk_bytes, order.timeout_s) == (10 * 2**30, 30.0)
    assert order.variables["GLOO_SOCKET_IFNAME"] == "eth1"


def test_some_red_exits_1_also_with_json(examined: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    examined[0] = some_red()
    assert run(["doctor"]) == 1
    assert "✗  nodes" in capsys.readouterr().out
    assert run(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["green"], len(said["rows"]), said["rows"][0]["state"]) == (False, 13, "red")
