"""Renders the rows of the report: as a table that is readable without colour in 80 columns, and as plain values.

Pure: the caller owns the console.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from raytrain.cluster.doctor.verdicts import Row
from raytrain.units import format_seconds

SIGNS = {"ok": ("✓", "green"), "red": ("✗", "bold red"), "-": ("-", "dim")}
PLAIN_SIGNS = {"ok": "ok", "red": "RED", "-": "-"}
GAP, FIX, LEAST_WIDTH = "  ", "fix: ", 20


def is_green(rows: Sequence[Row]) -> bool:
    """Whether nothing is red."""
    return not any(row.state == "red" for row in rows)


def render(rows: Sequence[Row], seconds: float, width: int, is_unicode: bool = True) -> Text:
    """The table and a summary line.

    Args:
        seconds: that the examination took.
        width: of the terminal.
        is_unicode: whether the terminal shows more than ASCII.
    """
    signs = {state: (sign if is_unicode else PLAIN_SIGNS[state], style) for state, (sign, style) in SIGNS.items()}
    sign_width, name_width = max(len(sign) for sign, _ in signs.values()), max(len(row.name) for row in rows)
    indent = sign_width + name_width + 2 * len(GAP)
    lines = []
    for row in rows:
        sign, style = signs[row.state]
        first, *rest = _wrapped(row.found, width - indent) or [""]
        head = Text.assemble((f"{sign:<{sign_width}}{GAP}{row.name:<{name_width}}", style if row.state == "red" else ""))
        head.stylize(style, 0, sign_width)
        lines.append(head.append(f"{GAP}{first}", style if row.state == "-" else ""))
        lines += [Text(" " * indent + line) for line in rest]
        lines += [_fix(line, indent) for line in _wrapped(row.fix and FIX + row.fix, width - indent)]
    return Text("\n").join([*lines, Text(), *_summary(rows, seconds, width)])


def _fix(line: str, indent: int) -> Text:
    text = Text(" " * indent + line)
    text.highlight_words([FIX], "bold yellow")
    return text


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, LEAST_WIDTH), break_on_hyphens=False)


def _summary(rows: Sequence[Row], seconds: float, width: int) -> list[Text]:
    red = [row.name for row in rows if row.state == "red"]
    took = f"in {format_seconds(seconds)}"
    if red:
        lines = _wrapped(f"{len(red)} of {len(rows)} red {took}: {', '.join(red)}", width)
        return [Text(line, style="bold red") for line in lines]
    return [Text(f"all {len(rows)} green {took}", style="bold green")]


def to_json(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """The report as plain values; a row's state is "ok", "red", or "-" where there is nothing to check."""
    return {"green": is_green(rows), "seconds": round(seconds, 3), "rows": [dataclasses.asdict(row) for row in rows]}
