"""Claims never take more time than there is, and none is lost."""

from __future__ import annotations

from dataclasses import fields

import pytest

from raytrain.events.ledger import TITLES, Ledger, settle


def test_each_class_has_a_title() -> None:
    assert list(TITLES) == [field.name for field in fields(Ledger)]


def test_what_nobody_claims_is_the_rest() -> None:
    before, claims = Ledger(training_s=1.0), Ledger(evaluation_s=2.0)
    assert settle(before, claims, 5.0, "training_s") == Ledger(training_s=4.0, evaluation_s=2.0)


def test_claims_are_cut_to_the_time_that_there_is() -> None:
    claims = Ledger(data_wait_s=2.0, evaluation_s=2.0, waiting_s=2.0)
    assert settle(Ledger(), claims, 3.0, "training_s") == Ledger(data_wait_s=2.0, evaluation_s=1.0)
    assert settle(Ledger(), claims, -1.0, "training_s") == Ledger()


def test_goodput_is_the_share_of_training() -> None:
    ledger = Ledger(training_s=3.0, redoing_s=1.0)
    assert (ledger.wall_s, ledger.goodput) == (4.0, pytest.approx(0.75))
    assert (Ledger().wall_s, Ledger().goodput) == (0.0, 0.0)
