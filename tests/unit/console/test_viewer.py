"""The viewer suits the stream."""

from __future__ import annotations

import io

import pytest

from raytrain.console.live import LiveSweepViewer, LiveViewer
from raytrain.console.plain import PlainSweepViewer, PlainViewer
from raytrain.console.viewer import choose, choose_for_sweep


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AsciiTerminal(Terminal):
    encoding = "ascii"


@pytest.mark.parametrize(
    ("stream", "term", "is_live"),
    [
        (Terminal(), "xterm-256color", True),
        (Terminal(), "dumb", False),
        (AsciiTerminal(), "xterm-256color", False),
        (io.StringIO(), "xterm-256color", False),
    ],
)
def test_r16_a_terminal_that_can_draw_gets_the_live_frame(
    stream: io.StringIO, term: str, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    assert isinstance(choose(stream, io.StringIO()), LiveViewer if is_live else PlainViewer)
    assert isinstance(choose_for_sweep(stream), LiveSweepViewer if is_live else PlainSweepViewer)
