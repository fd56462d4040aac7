"""A job script as a process of its own, in a session of its own as under a terminal.

Ray's processes have further sessions, so a variable that they all inherit tells which of them are the job's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from raytrain.events.kinds import Event
from raytrain.events.log import read
from raytrain.rundir import RunDir

ROOT = Path(__file__).parents[2]
MARK = "RAYTRAIN_TEST_JOB"
RAY_AGENTS = ("DashboardAgent", "RuntimeEnvAgent")  # Ray's own; they notice the end of their raylet after a while


class JobProcess:
    """Starts a script.

    Args:
        script: its path.
        flags: of the command line.
        environment: variables besides those of this process, of which it gets no RAY_ADDRESS.
    """

    def __init__(self, script: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._err = script.with_suffix(f".{time.monotonic_ns()}.err").open("w+", newline="")
        self.process = subprocess.Popen(
            [sys.executable, str(script), *flags],
            cwd=script.parent,
            env={**variables, "PYTHONPATH": str(ROOT), MARK: self._mark, **(environment or {})},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=self._err,
        )
        self.out = ""

    def read_until(self, text: str) -> None:
        """Reads lines of stdout up to one with `text`."""
        stream = self.process.stdout
        assert stream is not None
        for line in iter(stream.readline, b""):
            self.out += line.decode()
            if text in line.decode():
                return
        raise AssertionError(f"{text!r} never came: {self.out}\n{self.err}")

    def signal(self, number: signal.Signals, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.process.pid, number)

    def finish(self, timeout_s: float = 90.0) -> int:
        """The exit code, once the process has ended."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.out += rest.decode()
        return self.process.returncode

    @property
    def err(self) -> str:
        self._err.seek(0)
        return self._err.read()

    def left_behind(self) -> list[str]:
        """Processes of the job that still run, by their command lines."""
        return [f"{one.pid} {one.info['cmdline']}" for one in psutil.process_iter(["cmdline"]) if self._is_ours(one)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False


def events_of(storage: Path, name: str) -> list[Event]:
    return list(read(RunDir.at(str(storage), name)))


def wait_until_gone(job: JobProcess, timeout_s: float, besides: tuple[str, ...] = ()) -> list[str]:
    """What is left of the job's processes after at most some seconds, but for those that have one of the names `besides`."""
    until = time.monotonic() + timeout_s
    while True:
        left = [command for command in job.left_behind() if not any(name in command for name in besides)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.05)
