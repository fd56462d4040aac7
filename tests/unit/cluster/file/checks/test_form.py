"""The form of the file: what Ray would refuse, all of it and with lines."""

from __future__ import annotations

import pytest

from tests.unit.cluster.file.support import edited, found, line_of, rendered

AWS = rendered("aws")
LOCAL = rendered("local", setup="none")


@pytest.mark.parametrize(
    ("old", "new", "where", "fix"),
    [
        ("cluster_name: raytrain\n", "", "cluster_name", "add cluster_name: here"),
        ("max_workers: 10", "max_workers: ten", "max_workers", "write a value of type integer"),
        ("max_workers: 10", "max_workers: -1", "max_workers", "give another value"),
        ("type: aws", "type: awss", "provider.type", "write aws"),
        ("type: aws", "tpye: aws", "provider.type", "add type: here"),
        ("auth: {ssh_user: ubuntu}", "auth: {ssh_usr: ubuntu}", "auth.ssh_usr", "did you mean ssh_user?"),
        ("idle_timeout_minutes: 5", "idle_timeout_minutes: 5\nxyz: 1", "xyz", "remove it"),
        ("priority: 10", "prioritty: 10", "available_node_types.spot.prioritty", "did you mean priority?"),
        ("head_node_type: head", "head_node_type: h", "head_node_type", "did you mean head?"),
        ("head_node_type: head", "head_node_type: xyz", "head_node_type", "write one of head, spot, on-demand"),
        (
            "  cache_stopped_nodes: false",
            "  cache_stopped_nodes: 'no'",
            "provider.cache_stopped_nodes",
            "write a value of type boolean",
        ),
        ("idle_timeout_minutes: 5", "idle_timeout_minutes: 5\n1: x", "1", "put it in quotes, or choose another name"),
    ],
)
def test_what_ray_would_refuse(old: str, new: str, where: str, fix: str) -> None:
    assert (where, fix) in [(each.where, each.fix) for each in found(edited(AWS, old, new))]


def test_a_missing_node_config_and_resources() -> None:
    gcp = rendered("gcp", on_demand=0)
    mistakes = found(edited(gcp, "    resources: {CPU: 8, GPU: 1}\n", ""))
    assert [each.where for each in mistakes] == ["available_node_types.spot.resources"]
    assert mistakes[0].line == line_of(gcp, "  spot:")


def test_aws_fills_in_resources_itself() -> None:
    assert found(edited(AWS, "    resources: {CPU: 4, GPU: 1}\n", "", count=2)) == []


def test_a_key_that_stands_twice_is_told_with_the_second_line() -> None:
    text = edited(AWS, "auth: {ssh_user: ubuntu}\n", "auth: {ssh_user: ubuntu}\nauth: {ssh_user: me}\n")
    (mistake,) = found(text)
    assert (mistake.where, mistake.line) == ("auth", line_of(text, "ssh_user: me"))


def test_limits_of_each_type_and_of_all() -> None:
    text = edited(AWS, "    min_workers: 0\n    max_workers: 8\n", "    min_workers: 9\n    max_workers: 8\n")
    assert [each.where for each in found(text)] == ["available_node_types.spot.min_workers"]
    both = edited(text, "max_workers: 10\n", "max_workers: 8\n")
    assert [each.where for each in found(both)] == ["max_workers", "available_node_types.spot.min_workers"]


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("  head_ip: 10.77.0.1\n", "", "provider.head_ip"),
        ("  worker_ips: [10.77.0.2, 10.77.0.3]\n", "", "provider.worker_ips"),
        ("worker_ips: [10.77.0.2", "worker_ips: [10.77.0.1", "provider.worker_ips"),
        ("setup_commands: []", "available_node_types: {a: {resources: {}, node_config: {}}}", "available_node_types"),
    ],
)
def test_machines_of_ones_own(old: str, new: str, where: str) -> None:
    assert [each.where for each in found(edited(LOCAL, old, new))] == [where]


def test_min_workers_of_machines_of_ones_own_is_read_by_ray() -> None:
    assert found(edited(LOCAL, "setup_commands: []", "min_workers: 1")) == []
    assert [each.where for each in found(edited(AWS, "max_workers: 10", "min_workers: 1\nmax_workers: 10"))] == [
        "min_workers"
    ]


def test_what_only_ray_finds_is_told_in_its_words() -> None:
    text = edited(
        AWS, "idle_timeout_minutes: 5\n", "idle_timeout_minutes: 5\ndocker: {image: rayproject/ray:2.60.0-py311}\n"
    )
    (mistake,) = found(text)
    assert mistake.where == "provider"
    assert "container" in mistake.value
