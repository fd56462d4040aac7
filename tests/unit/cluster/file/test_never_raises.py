"""Whatever stands in a file, the check lists mistakes; it never raises."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain.cluster.file.spec import PROVIDERS
from tests.unit.cluster.file.support import found, rendered

TREES = {provider: list(yaml.safe_load_all(rendered(provider))) for provider in PROVIDERS}
ODD: list[Any] = [None, True, -1, 2.5, "", "text", [], ["a"], [None], [[1]], {}, {"a": 1}, {1: {"b": None}}]


def places(tree: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place, *(deeper for key, value in inner for deeper in places(value, (*place, key)))]


def put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[place[0]] = put(tree[place[0]], place[1:], value)
    return copied


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_value_of_another_type_anywhere(data: st.DataObject) -> None:
    trees = TREES[data.draw(st.sampled_from(PROVIDERS))]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(trees)[1:]))
        trees = put(trees, place, data.draw(st.sampled_from(ODD)))
    text = yaml.safe_dump_all(trees)
    for mistake in found(text, workers=(1, 4)):
        assert 1 <= mistake.line <= text.count("\n") + 1


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PROVIDERS), st.data())
def test_lines_that_are_missing_or_moved(provider: str, data: st.DataObject) -> None:
    lines = [line for line in rendered(provider).splitlines() if not line.lstrip().startswith("#")]
    index = data.draw(st.integers(0, len(lines) - 1))
    change = data.draw(st.sampled_from(["drop", "indent", "outdent", "twice"]))
    line = lines[index]
    lines[index : index + 1] = {"drop": [], "indent": [f"  {line}"], "outdent": [line[2:]], "twice": [line, line]}[change]
    found("\n".join(lines) + "\n", workers=(1, 4))
