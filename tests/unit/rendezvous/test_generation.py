"""Generations travel whole, and are packed once for all their members."""

from __future__ import annotations

import pickle

from raytrain.rendezvous.generation import Entrant, Generation

MEMBERS = (Entrant("w0", 3, ("h", 1), node_id="a"), Entrant("w1", 2, ("h", 2), is_saved=True, after=4))


def test_a_generation_survives_pickling() -> None:
    generation = Generation(4, MEMBERS, "drain", waited_s=1.5, patience=8, reached=9)
    back = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(generation))))
    assert back == generation
    assert vars(back).keys() <= vars(generation).keys()


def test_it_knows_its_members_and_their_ranks() -> None:
    generation = Generation(4, MEMBERS, "join")
    assert generation.has("w1")
    assert not generation.has("w2")
    assert generation.rank_of("w1") == 1
