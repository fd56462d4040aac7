"""What needs a machine of one's own: the real autoscaler, a network that is cut, and a disk that is full or read-only."""

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


def test_r7_a_store_that_is_full_or_read_only_is_told_of_and_training_goes_on(played_in_namespaces: Played) -> None:
    answer = played_in_namespaces["broken"].result()
    for fault, cause in [("full", "No space left on device"), ("read-only", "Read-only file system")]:
        assert answer[fault]["failures"]
        assert all(cause in reason for reason in answer[fault]["failures"])
        assert answer[fault]["steps_meanwhile"] > 0
    assert answer["restored"] == [0], "also when the leader died, with nothing saved for a while, training went on"


def test_r7_two_writes_that_fail_are_tried_again_and_no_half_checkpoint_stays(played_in_namespaces: Played) -> None:
    answer = played_in_namespaces["broken"].result()
    assert answer["full for a moment"]["longest_save_s"] > 1.4, "with the pauses before the second and the third attempt"
    assert answer["left_behind"].startswith("step-"), "the leader died in the middle of a save"
    assert answer["there"] == answer["whole"], "nothing but complete checkpoints, the last one among them"


def test_r6_a_worker_that_is_cut_off_is_left_behind_within_30_s_by_default(played_in_namespaces: Played) -> None:
    answer = played_in_namespaces["broken"].result()
    assert answer["nodes"] == ["10.77.1.1", "10.77.1.2"]
    cause, seconds = answer["cut off"]
    assert (cause, seconds < 30) == ("loss", True)
    assert answer["restored"] == [0], "nothing went back to a checkpoint"
