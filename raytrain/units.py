"""How numbers with a unit are written for people, and how a person writes a range of workers."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """0.0123 -> '12 ms', 1.5 -> '1.5 s', 95 -> '1 min 35 s', 7260 -> '2 h 1 min'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_bytes(size_bytes: float) -> str:
    """1536 -> '1.5 KiB'; binary units, IEC 80000-13."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_count(count: float) -> str:
    """1234567 -> '1,234,567'."""
    return f"{count:,.0f}"


def parse_range(text: str) -> tuple[int, int]:
    """'4' -> (4, 4), '1:8' -> (1, 8).

    Raises:
        ValueError: the text is not one or two whole numbers.
    """
    low, colon, high = text.partition(":")
    return int(low), int(high if colon else low)
