"""A job script as a process of its own, in a session of its own as under a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from raytrain.events.kinds import Event
from raytrain.events.log import read
from raytrain.rundir import RunDir

JOB = '''
import os, sys, time, warnings
import raytrain, torch

CALLS = [0]  # of loss in this process; the first one is the warm-up pass

class Line(raytrain.Task):
    """Fits a line through a few points."""
    fails: int = -1

    def data(self):
        x = torch.arange(32.0).reshape(16, 2) / 32
        return {"train": raytrain.arrays(x=x), "valid": raytrain.arrays(x=x[:4])}

    def model(self):
        print("threads", torch.get_num_threads(), os.environ.get("NCCL_DEBUG"), os.environ.get("TOKEN"))
        return torch.nn.Linear(2, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        if CALLS[0] and torch.is_grad_enabled():
            time.sleep(float(os.environ.get("STEP_S", "0")))
        if CALLS[0] == self.fails:
            print("about to fail", flush=True)
            warnings.warn("this is a warning")
            print(f"raised at {time.time()}")
            raise KeyError("boom")
        CALLS[0] += 1
        return model(batch["x"]).square().mean(1)

if __name__ == "__main__":
    raytrain.main(Line, global_batch=4, cpus_per_worker=0.5, checkpoint_every=10)
'''


class JobProcess:
    """Starts a script.

    Args:
        script: its path.
        flags: of the command line.
        environment: variables besides those of this process.
    """

    def __init__(self, script: Path, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
        self._err = script.with_suffix(f".{time.monotonic_ns()}.err").open("w+", newline="")
        self.process = subprocess.Popen(
            [sys.executable, str(script), *flags],
            cwd=script.parent,
            env={**variables, **(environment or {})},
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
        """Processes of the job's session that still run, by their command lines."""
        return [_command(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            return False
        return int(session) == self.process.pid and state != "Z"


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


def _command(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:100]}"
    except OSError:
        return str(pid)
