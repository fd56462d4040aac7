"""A one-node cluster with a dashboard in its own namespaces: it can be killed, sees no other Ray, and leaves no process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.namespaces import OWN, PREPARE, can_be_made

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TOKEN = "a-token-for-this-test-only-0123456789"
START_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


class Head:
    """Started again, it has the same address and knows nothing of the jobs before.

    Args:
        home: home directory of its jobs.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self._ports['dashboard-port']}"
        self.environment = {
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
        }
        """Of the head, and of the shell that submits jobs."""

    def start(self) -> None:
        """Returns when it accepts jobs."""
        self.home.mkdir(exist_ok=True)
        words = [f"--{name}={port}" for name, port in self._ports.items()]
        command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=3", "--node-ip-address=127.0.0.1", *words]
        own = [*OWN, "sh", "-c", f'{PREPARE} "$@"', "sh"] if can_be_made() else []
        log = (self.home / "head.log").open("ab")
        self._process = subprocess.Popen([*own, *command], env=self.environment, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._accepts_jobs():
            is_late = self._process.poll() is not None or time.monotonic() > deadline
            assert not is_late, (self.home / "head.log").read_text()
            time.sleep(0.1)

    def request(self, path: str, method: str = "GET") -> Any:
        """The dashboard's answer. Raises OSError if there is none."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"{self.address}/api/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def _accepts_jobs(self) -> bool:
        with contextlib.suppress(OSError):
            self.request("jobs/")
            return True
        return False

    def kill(self) -> None:
        """SIGKILL for all of its processes, including its jobs."""
        if self._process is None or self._process.poll() is not None:
            return
        top = psutil.Process(self._process.pid)
        for process in [*top.children(recursive=True), top]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def project(directory: Path, files: Mapping[str, str]) -> Path:
    """A working directory with raytrain in it, and further files."""
    shutil.copytree(ROOT / "raytrain", directory / "raytrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


class Command:
    """A command in the shell that submits jobs.

    Args:
        head: whose environment it has.
        words: the command; its program is installed beside this Python.
        cwd: where it runs.
        more: further variables.
    """

    def __init__(self, head: Head, words: list[str], cwd: Path, more: Mapping[str, str] | None = None) -> None:
        command, environment = [str(BIN / words[0]), *words[1:]], {**head.environment, **(more or {})}
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # else it hears none if these tests ignore it
        self._process = subprocess.Popen(command, cwd=cwd, env=environment, **streams)
        signal.signal(signal.SIGINT, ctrl_c)
        self.out, self.code = "", -1

    def read_until(self, text: str) -> None:
        """Reads up to a line with `text`."""
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, b""):
            self.out += line.decode()
            if text in line.decode():
                return
        raise AssertionError(f"{text!r} never came: {self.out}")

    def finish(self, timeout_s: float = 90.0) -> int:
        """Waits for the end; returns the exit code."""
        rest, _ = self._process.communicate(timeout=timeout_s)
        self.out, self.code = self.out + rest.decode(), self._process.returncode
        return self.code

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self._process.pid, signal.SIGINT)
