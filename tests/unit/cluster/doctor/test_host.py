"""What a machine says of itself, on this one and on made-up ones."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from raytrain.cluster.doctor import host
from raytrain.cluster.doctor.facts import Disk, Facts
from raytrain.version import VERSION


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    said = host.gather(str(tmp_path / "not" / "there"), os.getpid())
    facts = Facts(**{**said, "temp": Disk(*said["temp"])})
    assert facts.hostname == socket.gethostname()
    assert facts.versions["raytrain"] == VERSION
    assert all(facts.versions.values())
    assert facts.temp.path == str(tmp_path / "not" / "there")
    assert 0 < facts.temp.free_bytes < facts.temp.total_bytes
    assert facts.shm_bytes > 0
    assert facts.object_store == "", "this process is no raylet"


def test_the_packages_are_those_that_raytrain_depends_on() -> None:
    project = Path(__file__).parents[4] / "pyproject.toml"
    block = project.read_text().partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    named = re.findall(r'^ *"([\w-]+)', block, re.MULTILINE)
    assert sorted(named) == sorted(host.PACKAGES)


def test_a_missing_package_and_a_missing_raytrain_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PACKAGES", ("numpy", "no-such-package"))
    for name in ("raytrain", "raytrain.version"):
        monkeypatch.setitem(sys.modules, name, None)
    found = host.versions()
    assert (found["no-such-package"], found["raytrain"], host.raytrain_files()) == ("", "", "")
    assert found["numpy"]


def test_the_digest_of_the_files_changes_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from raytrain import version

    real = host.raytrain_files()
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(version, "__file__", str(tmp_path / "version.py"))
    one = host.raytrain_files()
    (tmp_path / "a.py").write_text("2")
    assert len({real, one, host.raytrain_files()}) == 3


@pytest.mark.parametrize(
    ("text", "found"), [("echo 550.54; echo 550.54", ("550.54", "550.54")), ("echo no devices; exit 6", ()), ("", ())]
)
def test_drivers_are_those_of_nvidia_smi(
    text: str, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert host.gpu_drivers() == found


def test_an_nvidia_smi_that_is_missing_or_hangs_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.gpu_drivers() == ()
    script(tmp_path / "nvidia-smi", "exec /bin/sleep 60")
    monkeypatch.setattr(host, "NVIDIA_SMI_LIMIT_S", 0.1)
    assert host.gpu_drivers() == ()


def test_what_gloo_will_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.gloo_address({host.GLOO: "lo"}) == ("lo", "127.0.0.1")
    assert host.gloo_address({host.GLOO: "lo,eth7"}) == ("lo", "127.0.0.1")
    assert host.gloo_address({host.GLOO: "nope0"}) == ("nope0", "")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.9")
    assert host.gloo_address({}) == ("", "10.0.0.9")

    def unknown(name: str) -> str:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert host.gloo_address({}) == ("", "127.0.0.1")


def test_the_object_store_is_where_the_raylet_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"raylet\0--plasma_directory=/tmp/ray\0--head\0")
    assert host.object_store(7) == "/tmp/ray"


def test_a_raylet_of_another_machine_has_no_object_store() -> None:
    assert host.object_store(2**22 + 1) == ""


@pytest.mark.parametrize(("words", "left"), [(b"A=1\0CUDA_VISIBLE_DEVICES=0,1\0", "0,1"), (b"A=1\0", None)])
def test_gpus_that_ray_hides_are_shown_again(words: bytes, left: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: words)
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    host.show_all_gpus(environment, 7)
    assert environment.get("CUDA_VISIBLE_DEVICES") == left


def test_without_a_raylet_gpus_stay_as_they_are() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3"}
    host.show_all_gpus(environment, 2**22 + 1)
    assert environment == {"CUDA_VISIBLE_DEVICES": "3"}
