"""Environment variables are what they were after the block, also after an error."""

from __future__ import annotations

import contextlib
import os

import pytest

from raytrain.elastic.variables import variables


def test_variables_are_set_for_the_block_and_then_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_KNOWN", "before")
    monkeypatch.delenv("RAYTRAIN_NEW", raising=False)
    with contextlib.suppress(KeyError), variables({"RAYTRAIN_KNOWN": "0", "RAYTRAIN_NEW": "1"}):
        assert (os.environ["RAYTRAIN_KNOWN"], os.environ["RAYTRAIN_NEW"]) == ("0", "1")
        raise KeyError
    assert os.environ["RAYTRAIN_KNOWN"] == "before"
    assert "RAYTRAIN_NEW" not in os.environ
