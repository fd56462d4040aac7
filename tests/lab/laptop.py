"""Whoever has the cluster file, and types commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.lab.hosts import ROOT

LIMIT_S = 120.0


class Laptop:
    """A machine on the same network, with a home and a checkout of raytrain.

    Args:
        lab: directory of all hosts; HOME is already set to its home/.
    """

    def __init__(self, lab: Path) -> None:
        self.home = lab / "home"
        (self.home / ".ssh").mkdir(parents=True)
        self.key = self.home / ".ssh/id_ed25519"
        (lab / "key").rename(self.key)
        self.file = self.home / "cluster.yaml"

    def run(self, *words: str) -> str:
        """Types a command and waits for its end; what it says. It must not fail."""
        done = self.try_to(*words)
        if done.returncode:
            raise AssertionError(f"{words}: {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def try_to(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Types a command and waits for its end."""
        process = self.start(*words)
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            raise AssertionError(f"{words} took more than {LIMIT_S:g} s:\n{out[-4000:]}") from None
        return subprocess.CompletedProcess(words, process.returncode, out)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Types a command."""
        program = str(Path(sys.executable).with_name(words[0]))
        return subprocess.Popen(
            [program, *words[1:]],
            cwd=ROOT,
            env=os.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
