"""A cluster of one node with a dashboard, as a process that can be killed: its processes see no other Ray, and none of them
outlives it.
"""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.cluster.namespaces import OWN, PREPARE, can_be_made

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TOKEN = "a-token-for-this-test-only-0123456789"
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
START_LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


class Head:
    """Starts when it is entered; started again, it has the same address and knows nothing of what was before.

    Args:
        home: home directory of its jobs.
        num_cpus: for workers.
    """

    def __init__(self, home: Path, num_cpus: int = 2) -> None:
        self.home, self._num_cpus = home, num_cpus
        self._ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._ports['dashboard-port']}"

    @property
    def environment(self) -> dict[str, str]:
        """Of who submits jobs."""
        return {
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.home),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self) -> None:
        """Returns when it takes jobs."""
        self.home.mkdir(exist_ok=True)
        words = [f"--{name}={port}" for name, port in self._ports.items()]
        words += [f"--num-cpus={self._num_cpus}", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        command = [str(BIN / "ray"), "start", "--head", "--block", *words]
        own = [*OWN, "sh", "-c", f'{PREPARE} "$@"', "sh"] if can_be_made() else []
        log = (self.home / "head.log").open("ab")
        self._process = subprocess.Popen([*own, *command], env=self.environment | HEALTH, stdout=log, stderr=log)
        until = time.monotonic() + START_LIMIT_S
        while not self._takes_jobs():
            assert self._process.poll() is None, (self.home / "head.log").read_text()
            assert time.monotonic() < until, (self.home / "head.log").read_text()
            time.sleep(0.1)

    def ask(self, path: str) -> Any:
        """What the dashboard answers. Raises OSError if it does not."""
        asked = urllib.request.Request(f"{self.address}/api/{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return json.load(answer)

    def _takes_jobs(self) -> bool:
        with contextlib.suppress(OSError):
            self.ask("jobs/")
            return True
        return False

    def kill(self) -> None:
        """SIGKILL for all of its processes, its jobs' among them."""
        assert self._process is not None
        top = psutil.Process(self._process.pid)
        for process in [*top.children(recursive=True), top]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Head:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


def project(directory: Path, files: Mapping[str, str]) -> Path:
    """A working directory with raytrain in it, and the jobs of this repository, and further files."""
    shutil.copytree(ROOT / "raytrain", directory / "raytrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "jobs", directory / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


class Command:
    """A command in the shell of who submits jobs.

    Args:
        head: whose environment it has.
        words: the command; programs are those beside this Python.
        cwd: where it runs.
        more: further variables.
    """

    def __init__(self, head: Head, words: list[str], cwd: Path, more: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [str(BIN / words[0]), *words[1:]],
            cwd=cwd,
            env={**head.environment, **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.out = ""

    def lines(self) -> Iterator[str]:
        """What it writes, line by line, as it comes."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            self.out += line.decode()
            yield line.decode()

    def read_until(self, text: str) -> None:
        """Reads up to a line with `text`."""
        assert any(text in line for line in self.lines()), f"{text!r} never came: {self.out}"

    def finish(self, timeout_s: float = 90.0) -> int:
        """The exit code, once it has ended."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.out += rest.decode()
        return self.process.returncode

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)
