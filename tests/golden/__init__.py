"""Texts that a user sees, as files beside this one. `RAYTRAIN_GOLDEN=write pytest ...` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent


def check(name: str, text: str) -> None:
    """Compares a text with the golden file `name`."""
    path = HERE / name
    if os.environ.get("RAYTRAIN_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"differs from {path.name}; if it should, run with RAYTRAIN_GOLDEN=write"
