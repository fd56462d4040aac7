"""What a joiner makes of the death of its process."""

from __future__ import annotations

import pickle

from raytrain.elastic.joiner import JoinFailed


def test_a_failed_join_says_why_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(JoinFailed("the actor died", preempted=True)))
    assert (str(error), error.preempted) == ("the actor died", True)
