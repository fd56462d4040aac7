"""P2, P3, P4: random models under random losses and joins give the result of a plain loop.

By hand, more of them: RAYTRAIN_DRAWS=0:5000 pytest tests/laws/test_random_models.py
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from raytrain.report.audit import audit
from tests.laws.compare import assert_close, final_weights, settings, train_by_hand
from tests.support.drawn import NUM_STEPS, Drawn
from tests.support.pool import PooledRun

FIRST, LAST = (int(number) for number in os.environ.get("RAYTRAIN_DRAWS", "0:200").split(":"))
TOLERANCE, LEAST = 2e-5, 0.1
ONE_AT_A_TIME = threading.Lock()
"""For the plain loop, which uses the random generators of this process."""


def check(number: int, path: Path) -> str:
    """What is wrong with a draw; "" for nothing."""
    task = Drawn(number=number)
    is_bitwise = number % 4 == 0
    config = settings(**task.settings(), exactness="bitwise" if is_bitwise else "default")
    with ONE_AT_A_TIME:
        expected = train_by_hand(task, config)
    run = PooledRun(task, config, path, task.plot(), limit_s=30)
    try:
        losses = [record.loss for record in run.run().values()]
        np.testing.assert_allclose(losses, expected.losses, rtol=TOLERANCE)
        assert len(losses) == NUM_STEPS
        assert_close(final_weights(run.run_dir), expected.model, TOLERANCE, LEAST)
        if config.ema_decay:
            assert_close(final_weights(run.run_dir, "ema.safetensors"), expected.average, TOLERANCE, LEAST)
        assert audit(run.run_dir).passed
    except Exception as error:  # noqa: BLE001 - the number is what makes it reproducible
        return f"draw {number}, {task.choice}, {task.settings()}, {run.plot}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(3600 if LAST > 200 else 180)
def test_random_models_with_random_losses_and_joins_equal_a_plain_loop(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        wrong = [text for text in pool.map(lambda number: check(number, tmp_path), range(FIRST, LAST)) if text]
    assert not wrong, "\n\n".join(wrong)
