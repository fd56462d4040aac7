"""Which environment variables are forwarded to workers, and setting some for a block."""

from __future__ import annotations

import contextlib
import os

import pytest

from raytrain.elastic.environment import environment_set, forwarded


def test_variables_are_set_for_the_block_and_then_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_KNOWN", "before")
    monkeypatch.delenv("RAYTRAIN_NEW", raising=False)
    with contextlib.suppress(KeyError), environment_set({"RAYTRAIN_KNOWN": "0", "RAYTRAIN_NEW": "1"}):
        assert (os.environ["RAYTRAIN_KNOWN"], os.environ["RAYTRAIN_NEW"]) == ("0", "1")
        raise KeyError
    assert os.environ["RAYTRAIN_KNOWN"] == "before"
    assert "RAYTRAIN_NEW" not in os.environ


def test_r18_variables_of_the_communication_libraries_and_named_ones_are_forwarded() -> None:
    names = ["NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "OMP_NUM_THREADS", "HOME", "TOKEN", "MY_NCCL_X"]
    environment = dict.fromkeys(names, "1")
    assert [*forwarded(environment)] == names[:4]
    assert [*forwarded(environment, ("TOKEN", "ABSENT"))] == [*names[:4], "TOKEN"]
