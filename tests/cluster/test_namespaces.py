"""What needs a machine of one's own: the real autoscaler, and a network that is cut."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tests.cluster.namespaces import can_be_made

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_be_made(), reason="namespaces need Linux, root, and iproute2"),
]
Played = dict[str, Future[dict[str, Any]]]


def test_the_cluster_grows_for_a_run_and_shrinks_after_it(played_in_namespaces: Played) -> None:
    answer = played_in_namespaces["autoscaled"].result()
    assert (answer["before"], answer["during"], answer["after"]) == (1, 4, 1)
    assert answer["generations"][-1] == 3


def test_r6_a_worker_whose_network_is_cut_is_left_behind_within_30_s_with_the_defaults(played_in_namespaces: Played) -> None:
    answer = played_in_namespaces["cut_off"].result()
    assert answer["nodes"] == ["10.77.1.1", "10.77.1.2"]
    assert answer["seconds"] < 30
    assert answer["restored"] == [0], "nothing went back to a checkpoint"
