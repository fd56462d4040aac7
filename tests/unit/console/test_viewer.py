"""The viewer suits the stream, and showing a run needs neither torch nor ray."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from raytrain.console.live import LiveViewer
from raytrain.console.plain import PlainViewer
from raytrain.console.sweep_live import LiveSweepViewer
from raytrain.console.sweep_plain import PlainSweepViewer
from raytrain.console.viewer import choose, choose_for_sweep


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AsciiTerminal(Terminal):
    encoding = "ascii"


@pytest.fixture(autouse=True)
def no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_terminal_gets_the_live_frame() -> None:
    assert isinstance(choose(Terminal(), io.StringIO()), LiveViewer)
    assert isinstance(choose_for_sweep(Terminal()), LiveSweepViewer)


@pytest.mark.parametrize("stream", [io.StringIO(), AsciiTerminal()])
def test_r16_what_cannot_draw_gets_plain_lines(stream: io.StringIO) -> None:
    assert isinstance(choose(stream, io.StringIO()), PlainViewer)
    assert isinstance(choose_for_sweep(stream), PlainSweepViewer)


def test_r16_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose(Terminal(), io.StringIO()), PlainViewer)
    assert isinstance(choose_for_sweep(Terminal()), PlainSweepViewer)


@pytest.mark.parametrize("module", ["console.viewer", "report.audit", "cli.app"])
def test_viewers_import_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, raytrain.{module}; print([m for m in ('torch', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("module", "end"),
    [("plain", "checkpoints  /home/me"), ("viewer", "checkpoints  /home/me"), ("sweep_plain", "directory    /home/me")],
)
def test_the_demo_of_a_module_runs(module: str, end: str) -> None:
    code = [sys.executable, "-m", f"raytrain.console.{module}"]
    assert end in subprocess.run(code, capture_output=True, text=True, check=True).stdout
