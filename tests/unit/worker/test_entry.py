"""What a worker's process is before it trains: its environment."""

from __future__ import annotations

from raytrain.worker.entry import new_variables


def test_a_worker_takes_the_drivers_variables_where_it_has_none() -> None:
    own = {"NCCL_SOCKET_IFNAME": "eth7", "MINE": "1"}
    found = new_variables("127.0.0.1", {"MINE": "2", "THEIRS": "3"}, own)
    assert (found["THEIRS"], found["GLOO_SOCKET_IFNAME"]) == ("3", "lo")
    assert not found.keys() & own.keys()


def test_nccls_watchdog_is_off_whatever_the_environment_says_since_it_would_end_survivors() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    assert new_variables("127.0.0.1", {name: "3"}, {name: "1"})[name] == "0"
