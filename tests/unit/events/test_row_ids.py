"""Packed row ids unpack to the same ids and are small."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.events.row_ids import pack, unpack


@settings(max_examples=50)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70))
def test_any_row_ids_come_back_in_order(numbers: list[int]) -> None:
    back = unpack(pack(np.array(numbers, dtype=np.int64)))
    assert (back.dtype, back.tolist()) == (np.int64, numbers)


def test_ids_below_a_million_take_less_than_3_4_characters_without_json_escapes() -> None:
    text = pack(np.random.default_rng(0).integers(0, 10**6, 1000))
    assert len(text) < 3.4 * 1000
    assert json.dumps(text) == f'"{text}"'


@pytest.mark.parametrize("text", ["", "3.0.8.", "a.b.c.d", "64.0.20.00000"])
def test_truncated_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"truncated|not enough values|invalid literal"):
        unpack(text)
