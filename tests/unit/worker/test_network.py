"""The interface of a node's address, whichever it is; the store is looked at in test_group.py."""

from __future__ import annotations

import psutil

from raytrain.worker.network import network_variables


def test_the_interface_is_the_one_that_has_the_address() -> None:
    interfaces = {name: {one.address for one in found} for name, found in psutil.net_if_addrs().items()}
    for address in set[str]().union(*interfaces.values()):
        found = network_variables(address)
        assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"]
        assert address in interfaces[found["GLOO_SOCKET_IFNAME"]]
    assert network_variables("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_address_that_no_interface_has_leaves_the_choice_to_gloo_and_nccl() -> None:
    assert network_variables("203.0.113.7") == {}
