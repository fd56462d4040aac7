"""How rows name nodes."""

from __future__ import annotations

from raytrain.cluster.doctor.wording import listed, on_all, told


def test_few_are_all_named_and_many_are_counted() -> None:
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed("abcdefg") == "a, b, c and 4 more"
    assert (on_all(1), on_all(4)) == ("on the only node", "on all 4 nodes")


def test_nodes_with_the_same_finding_are_told_together() -> None:
    assert told({"a": "x", "b": "y", "c": "x"}) == "a, c: x; b: y"
    assert told({name: name for name in "abcde"}) == "a: a; b: b; c: c; and 2 more"
