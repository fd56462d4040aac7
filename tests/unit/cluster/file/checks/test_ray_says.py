"""Ray's own word: asked twice, quietly, and whatever it raises is a text."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import yaml

from raytrain.cluster.file.checks.ray_says import objection
from tests.unit.cluster.file.support import rendered


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure", "local"])
def test_it_has_nothing_against_rendered_files(provider: str) -> None:
    assert objection(yaml.safe_load(rendered(provider))) == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"provider": {"type": "nope"}}, "Unsupported node provider"),
        ({"cluster_name": "a"}, "KeyError"),
        ({"cluster_name": "a", "provider": {"type": "local"}}, "head_ip"),
        ({"cluster_name": 3, "provider": {"type": "aws"}}, "3 is not of type 'string'"),
        ({"cluster_name": "a", "provider": {"type": "aws"}, "max_workers": "x"}, "is not of type"),
        ([1], "AttributeError"),
    ],
)
def test_what_it_raises_is_told(config: Any, words: str) -> None:
    assert words in objection(config)


def test_it_prints_nothing_and_leaves_logging_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.root.manager.disable
    objection({"cluster_name": "a", "provider": {"type": "local"}})
    objection(yaml.safe_load(rendered("aws")))
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == before


def test_the_content_is_not_changed() -> None:
    config = yaml.safe_load(rendered("aws"))
    objection(config)
    assert config == yaml.safe_load(rendered("aws"))
