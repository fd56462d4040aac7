"""What a probe finds on this machine and on made-up ones, and that it needs no raytrain where it is sent."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from raytrain.cluster.doctor import probe
from raytrain.cluster.doctor.examine import BY_VALUE, by_value
from raytrain.cluster.doctor.verdicts import Disk, Facts
from raytrain.version import VERSION
from raytrain.worker import network


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("module", BY_VALUE, ids=lambda module: module.__name__)
def test_modules_sent_by_value_import_only_each_other(module: object) -> None:
    body = ast.parse(Path(str(module.__dict__["__file__"])).read_text()).body
    imported = {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("raytrain")} <= {other.__name__ for other in BY_VALUE}
    heavy = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names} | imported
    assert heavy.isdisjoint({"torch", "ray", "pyarrow", "numpy"})


def test_a_pickled_probe_needs_no_raytrain() -> None:
    with by_value():
        carried = ray.cloudpickle.dumps(probe.Probe)
    code = (
        "import sys; sys.modules['raytrain'] = None; from ray import cloudpickle;"
        f"Probe = cloudpickle.loads({carried!r}); facts = Probe.facts.__globals__['host_facts']('/', 1);"
        "print(Probe.storage.__name__, repr(facts['versions']['raytrain'] + facts['raytrain_digest']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "storage ''\n", done.stderr
    with pytest.raises(ValueError, match="not registered"):
        ray.cloudpickle.unregister_pickle_by_value(BY_VALUE[0])


def test_the_packages_are_the_dependencies_of_raytrain() -> None:
    block = (
        (Path(__file__).parents[4] / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    )
    assert sorted(re.findall(r'^ *"([\w.-]+)', block, re.MULTILINE)) == sorted(probe.PACKAGES)


def test_the_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PACKAGES", (*probe.PACKAGES, "no-such-package"))
    values = probe.host_facts(str(tmp_path / "not" / "there"), os.getpid())
    facts = Facts(**{**values, "session_disk": Disk(*values["session_disk"])})
    assert (facts.hostname, facts.versions["raytrain"]) == (socket.gethostname(), VERSION)
    assert [name for name, version in facts.versions.items() if not version] == ["no-such-package"]
    assert facts.session_disk.path == str(tmp_path / "not" / "there")
    assert 0 < facts.session_disk.free_bytes < facts.session_disk.total_bytes
    assert facts.shm_bytes == shutil.disk_usage("/dev/shm").total
    assert facts.object_store == "", "this process is no raylet"


def test_the_digest_follows_the_source_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digests = {probe.raytrain_digest()}
    monkeypatch.setattr("raytrain.version.__file__", str(tmp_path / "version.py"))
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "")):
        (tmp_path / name).write_text(text)
        digests.add(probe.raytrain_digest())
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("echo 550.54; echo 550.54", ("550.54", "550.54")), ("echo no devices; exit 6", ()), ("exec /bin/sleep 60", ())),
        (None, ()),
    ],
)
def test_gpu_drivers_are_those_of_nvidia_smi(
    text: str | None, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        script(tmp_path / "nvidia-smi", text)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(probe, "NVIDIA_SMI_TIMEOUT_S", 0.2 if text and "sleep" in text else 10.0)
    assert probe.gpu_drivers() == found


def test_the_address_that_gloo_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.gloo_address({probe.GLOO: "lo,eth7"}) == ("lo", "127.0.0.1")
    assert probe.gloo_address({probe.GLOO: "nope0"}) == ("nope0", "")
    monkeypatch.setattr(socket, "gethostbyname", {socket.gethostname(): "10.0.0.9"}.__getitem__)
    assert probe.gloo_address({}) == ("", "10.0.0.9")

    def unknown(name: str) -> str:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert probe.gloo_address({}) == ("", "127.0.0.1")


@pytest.mark.parametrize("original", ["0,1", None])
def test_the_raylet_knows_its_object_store_and_gpus(original: str | None) -> None:
    words = ["raylet", "-c", "read x", "--plasma_directory=/tmp/ray"]
    raylet = subprocess.Popen(
        words, executable="/bin/sh", stdin=subprocess.PIPE, env={probe.GPUS: original} if original else {}
    )
    while psutil.Process(raylet.pid).cmdline() != words:
        pass
    environment = {probe.GPUS: ""}
    probe.show_all_gpus(environment, raylet.pid)
    assert environment.get(probe.GPUS) == original
    assert probe.object_store_dir(raylet.pid) == "/tmp/ray"
    raylet.communicate()
    before = dict(environment)
    probe.show_all_gpus(environment, raylet.pid)
    assert (environment, probe.object_store_dir(raylet.pid)) == (before, ""), "it is gone"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_are_written_read_and_removed(scheme: str, tmp_path: Path) -> None:
    directory = f"{scheme}{tmp_path}/runs/.probe"
    assert probe.make_directory(directory), "runs is new"
    probe.write_file(directory, "driver")
    probe.read_file(directory, "driver")
    with pytest.raises(FileNotFoundError):
        probe.read_file(directory, "node-0")
    (tmp_path / "runs/.probe/node-0").write_text("other")
    with pytest.raises(OSError, match="does not contain"):
        probe.read_file(directory, "node-0")
    probe.remove_directory(directory, with_parent=True)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_existed_or_is_in_use_is_kept(tmp_path: Path) -> None:
    directory = f"{tmp_path}/runs/.probe"
    (tmp_path / "runs").mkdir()
    assert not probe.make_directory(directory)
    probe.remove_directory(directory, with_parent=False)
    assert (tmp_path / "runs").exists()
    probe.make_directory(directory)
    (tmp_path / "runs" / "digits").mkdir()
    probe.remove_directory(directory, with_parent=True)
    assert (tmp_path / "runs" / "digits").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_returns_a_value_an_error_or_times_out() -> None:
    def fail(error: Exception) -> None:
        raise error

    assert probe.with_timeout(5, lambda a: a + 1, 2) == (3, "")
    assert probe.with_timeout(5, fail, OSError("disk is gone")) == (None, "OSError: disk is gone")
    assert probe.with_timeout(5, fail, KeyError("x")) == (None, "ended without an answer")
    release = threading.Event()
    assert probe.with_timeout(0.05, release.wait) == (None, "timed out after 0.05 s")
    release.set()


def test_an_all_reduce_is_measured() -> None:
    progress: dict[str, Any] = {}
    latency_s, rate = probe.measure_all_reduce(progress, "gloo", 0, 1, network.serve_store("127.0.0.1", 50), 50)
    assert (progress["phase"], latency_s > 0, rate) == ("summing", True, 0.0)
    assert not torch.distributed.is_initialized()


def test_a_wrong_sum_is_an_error() -> None:
    probe.check_sum(torch.full((4,), 6.0), 3)
    with pytest.raises(RuntimeError, match="wrong sum: 3 to 6 instead of 6"):
        probe.check_sum(torch.tensor([6.0, 3.0]), 3)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.0), (2, 100.0), (4, 150.0)])
def test_the_bus_bandwidth_is_that_of_nccl_tests(ranks: int, expected: float) -> None:
    assert probe.bus_bandwidth(200, 2.0, ranks) == pytest.approx(expected)
