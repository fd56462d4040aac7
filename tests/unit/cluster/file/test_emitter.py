"""What is emitted reads as the same values, with comments where they were put."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raytrain.cluster.file.emitter import LONGEST_FLOW, Folded, to_yaml

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=30).filter(
    lambda text: not text.startswith("# ")
)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=5))
def test_any_tree_comes_back(tree: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(tree)) == tree


def test_a_page_as_people_write_it() -> None:
    tree = {
        "# What this is.\n# Two lines.": None,
        "name": "a",
        "flat": {"CPU": 0, "GPU": 0},
        "list": ["# An item's comment.", "ray stop", Folded("export A=1;\nray start\n--head")],
        "deep": {"# Inside.": None, "types": [{"name": "x", "inner": {"a": [1], "b": {"c": 2}}}]},
        "texts": ["0", "2.60.0", "yes", "a: b"],
    }
    assert to_yaml(tree) == (
        "# What this is.\n# Two lines.\nname: a\nflat: {CPU: 0, GPU: 0}\nlist:\n  # An item's comment.\n  - ray stop\n"
        "  - >-\n    export A=1;\n    ray start\n    --head\ndeep:\n  # Inside.\n  types:\n    - name: x\n      inner:\n"
        "        a: [1]\n        b: {c: 2}\ntexts:\n  - '0'\n  - 2.60.0\n  - 'yes'\n  - 'a: b'\n"
    )


def test_a_folded_command_is_one_line_to_the_shell() -> None:
    assert yaml.safe_load(to_yaml({"run": Folded("export A=1\nB=2;\nray start")})) == {"run": "export A=1 B=2; ray start"}


@pytest.mark.parametrize("length", [5, 60])
def test_long_mappings_stand_on_lines_of_their_own(length: int) -> None:
    text = to_yaml({"m": {"a" * length: 1, "b" * length: 2}})
    assert (text.count("\n") == 1) == (2 * length + 12 <= LONGEST_FLOW)
