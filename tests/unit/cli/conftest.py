"""All commands run as in a plain shell of 80 columns, without a cluster."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in [*os.environ]:
        if name.startswith(("RAY_", "NCCL_", "GLOO_", "TORCH_", "CUBLAS_", "OMP_", "MKL_")):
            monkeypatch.delenv(name)
