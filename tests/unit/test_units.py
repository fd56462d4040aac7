"""Numbers with a unit as people read them, and ranges as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        (3600, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (360_000, "100 h 0 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, 1e7))
def test_seconds_are_never_written_with_more_than_59_of_a_smaller_unit(seconds: float) -> None:
    number, unit, *rest = format_seconds(seconds).split()
    assert unit in {"ms", "s", "min", "h"}
    if rest:
        assert int(rest[0]) < 60
    assert unit == "h" or float(number) <= {"ms": 1000, "s": 60, "min": 59}[unit]


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


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_range_is_read_as_it_is_written(low: int, high: int) -> None:
    assert parse_range(f"{low}:{high}") == (low, high)
    assert parse_range(str(low)) == (low, low)


@pytest.mark.parametrize("text", ["", ":", "1:", ":2", "1:2:3", "a", "1-2", "1.5"])
def test_a_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_range(text)
