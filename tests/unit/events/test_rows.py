"""Row numbers come back as they were, and take little room."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.events.rows import pack, unpack


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70))
def test_any_rows_come_back_in_order(numbers: list[int]) -> None:
    rows = np.array(numbers, dtype=np.int64)
    back = unpack(pack(rows))
    assert back.dtype == np.int64
    assert back.tolist() == numbers


def test_random_rows_of_a_million_take_less_than_3_4_characters_each() -> None:
    rows = np.random.default_rng(0).integers(0, 10**6, 64)
    assert len(pack(rows)) < 3.4 * 64


def test_packed_rows_need_no_escapes_in_json() -> None:
    text = pack(np.random.default_rng(1).integers(0, 2**62, 1000))
    assert json.dumps(text) == f'"{text}"'


@pytest.mark.parametrize("text", ["", "3.0.8.", "a.b.c.d", "64.0.20.00000"])
def test_a_text_that_is_cut_off_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cut off|not enough values|invalid literal"):
        unpack(text)
