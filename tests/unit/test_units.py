"""Numbers with a unit as people read them, and ranges as people write them."""

from __future__ import annotations

import pytest

from raytrain.units import format_bytes, format_count, format_seconds, parse_range


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (1, "1.0 s"),
        (1.5, "1.5 s"),
        (60, "1 min 0 s"),
        (95, "1 min 35 s"),
        (3599.4, "59 min 59 s"),
        (3599.9, "1 h 0 min"),
        (3600, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (360_000, "100 h 0 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_counts_have_thousands_separators() -> None:
    assert [format_count(n) for n in (0, 999, 1000, 1234567, 2.0)] == ["0", "999", "1,000", "1,234,567", "2"]


def test_a_range_is_one_or_two_whole_numbers() -> None:
    assert [parse_range(text) for text in ("4", "1:8", "0:0")] == [(4, 4), (1, 8), (0, 0)]


@pytest.mark.parametrize("text", ["", ":", "1:", ":2", "1:2:3", "a", "1-2", "1.5"])
def test_a_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_range(text)
