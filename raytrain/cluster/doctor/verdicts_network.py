"""Do the machines work together? One pure function for each row of the answer.

Mappings are by the node's name. `verdicts_machine` judges each machine by itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from raytrain.cluster.doctor.facts import Clock, Facts, Node, Ring, Row
from raytrain.cluster.doctor.wording import listed, told
from raytrain.events.words import count_of
from raytrain.units import format_bytes, format_seconds

MOST_SKEW_S = 1.0
"""Between two clocks: events of a run are told and added up in the order of their times."""

# What a node says when another one is the cause.
_ECHO = re.compile(r"timed? ?out|closed by peer|connection reset|broken pipe|connection refused", re.IGNORECASE)
# '[enforce fail at /where/device.cc:84] ifa != nullptr. ' before gloo's own words, and '[/where/pair.cc:144] '.
_PLACE = re.compile(r"^\w+Error: |\[[^\]]*\.(?:cc|cpp|h):\d+\] (?:\S+ [!=]= \S+\. )?")


def nodes(here: Mapping[str, Node], silent: Mapping[str, str]) -> Row:
    """Do all nodes answer, and will they stay?

    Args:
        silent: nodes that gave no answer, or died meanwhile, and why.
    """
    leaving = {name: _leaving(node.leaves_in_s) for name, node in here.items() if node.leaves_in_s is not None}
    if silent:
        fix = "see `ray list nodes` and the logs of its raylet; restart Ray on it, or remove it"
        return Row("nodes", "red", told({**silent, **leaving}), fix)
    if leaving:
        return Row("nodes", "red", told(leaving), "let another node take its place; it was not examined")
    return Row("nodes", "ok", f"{count_of(len(here), 'node')}, all answer and stay")


def _leaving(leaves_in_s: float) -> str:
    return f"leaves in {format_seconds(leaves_in_s)}" if leaves_in_s > 0 else "is announced to leave"


def storage(where: str, faults: Mapping[str, str], num_nodes: int) -> Row:
    """Can the driver and each node read what the other writes?

    Args:
        faults: what went wrong, by the node's name or "driver".
    """
    if not faults:
        found = f"{where}: written and read by the driver and {count_of(num_nodes, 'node')}"
        return Row("storage", "ok", found)
    fix = "set --storage to a directory that all nodes share and may write, or to a URI such as s3://bucket/runs"
    return Row("storage", "red", f"{where}: {told({name: _short(fault) for name, fault in faults.items()})}", fix)


def all_reduce(rings: Mapping[str, Mapping[str, Ring]], limit_s: float) -> Row:
    """Do all nodes sum a tensor together, and how fast?

    Args:
        rings: each node's part, by backend and node.
        limit_s: of each backend.
    """
    broken = {backend: parts for backend, parts in rings.items() if not all(part.done for part in parts.values())}
    if broken:
        backend, parts = next(iter(broken.items()))
        fix = f"{_variable(backend)} names the interface of a node's address, on each node; open all TCP ports between them"
        return Row("all-reduce", "red", f"{backend}: {told(culprits(parts, limit_s))}", fix)
    if not any(rings.values()):
        return Row("all-reduce", "-", "no node answered")
    most = max(map(len, rings.values()))
    if most == 1:
        return Row("all-reduce", "ok", f"{' and '.join(rings)}: a group forms on the only node")
    return Row("all-reduce", "ok", f"{most} nodes: {'; '.join(_speed(backend, rings[backend]) for backend in rings)}")


def culprits(parts: Mapping[str, Ring], limit_s: float) -> dict[str, str]:
    """The nodes that an all-reduce failed for: those with an error of their own, else those that got least far."""
    failed = {name: part for name, part in parts.items() if not part.done}
    own = {name: part for name, part in failed.items() if is_own(part)}
    if own:
        return {name: _short(part.error) for name, part in own.items()}
    order = ("starting", "finding the first node", "connecting", "summing")
    least = min((_index(order, part.phase) for part in failed.values()), default=0)
    late = {name: part for name, part in failed.items() if _index(order, part.phase) == least}
    return {name: f"no answer after {limit_s:g} s while {part.phase}" for name, part in late.items()}


def is_own(part: Ring) -> bool:
    """Whether a node failed for a reason of its own, and not because another one did not come."""
    return bool(not part.done and part.error and not _ECHO.search(part.error))


def _index(order: tuple[str, ...], phase: str) -> int:
    return order.index(phase) if phase in order else 0


def _variable(backend: str) -> str:
    return f"{backend.upper()}_SOCKET_IFNAME"


def _speed(backend: str, parts: Mapping[str, Ring]) -> str:
    latency_s, rate = max(part.latency_s for part in parts.values()), min(part.bytes_per_s for part in parts.values())
    return f"{backend} {_precise(latency_s)}, {format_bytes(rate)}/s"


def _precise(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def interfaces(here: Mapping[str, Node], facts: Mapping[str, Facts]) -> Row:
    """Does each node give its peers an address that they reach?"""
    if len({node.address for node in here.values()}) < 2:
        return Row("interfaces", "ok", "all nodes are on one machine")
    inside = {
        name: f"offers {fact.interface_address} ({fact.interface or f'of its hostname {fact.hostname}'})"
        for name, fact in facts.items()
        if fact.interface_address and ipaddress.ip_address(fact.interface_address).is_loopback
    }
    if inside:
        fix = (
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there to the interface that the others reach, or mend /etc/hosts"
        )
        return Row("interfaces", "red", told(inside), fix)
    used = sorted({fact.interface or "by hostname" for fact in facts.values()})
    return Row("interfaces", "ok", f"{listed(used)}; none is loopback")


def clocks(found: Mapping[str, Clock]) -> Row:
    """Do the clocks agree, as far as a message's time on the way lets one tell?"""
    if not found:
        return Row("clocks", "-", "no node answered")
    late = {name: _offset(c) for name, c in found.items() if abs(c.offset_s) - c.uncertainty_s > MOST_SKEW_S}
    if late:
        return Row("clocks", "red", told(late), "run chrony or ntpd on all nodes: a run's events are ordered by time")
    worst = max(found.values(), key=lambda clock: abs(clock.offset_s) + clock.uncertainty_s)
    return Row("clocks", "ok", f"within {format_seconds(abs(worst.offset_s) + worst.uncertainty_s)} of the driver's")


def _offset(clock: Clock) -> str:
    ahead = "ahead of" if clock.offset_s > 0 else "behind"
    return f"{format_seconds(abs(clock.offset_s))} {ahead} the driver's"


def access(address: str, has_token: bool) -> Row:
    """Can strangers reach the head? Whoever does runs code on all nodes.

    Args:
        address: of the head, host and port.
        has_token: whether Ray asks for a token (RAY_AUTH_MODE=token).
    """
    if has_token:
        return Row("access", "ok", "Ray asks for a token")
    try:
        is_public = ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_global
    except ValueError:  # a name
        is_public = False
    if is_public:
        fix = "set RAY_AUTH_MODE=token on all nodes, or close the ports: who reaches them runs code on every node"
        return Row("access", "red", f"{address} is a public address, and Ray asks for no token", fix)
    return Row("access", "ok", f"no token, but {address} is no public address")


def _short(error: str) -> str:
    """The first line of an error without the place in gloo's source."""
    return _PLACE.sub("", error.strip().split("\n")[0]).strip()[:160]
