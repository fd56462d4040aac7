"""Versions: what setup commands install, and what the names of images say."""

from __future__ import annotations

import pytest

from tests.unit.cluster.file.support import edited, found, rendered

AWS = rendered("aws")
OLD = next(line for line in AWS.splitlines() if "uv pip install" in line)


def values(command: str) -> list[str]:
    return [each.value for each in found(edited(AWS, OLD, f"  - {command}"))]


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("pip install ray==2.60.3", None),
        ("pip install 'ray[default] == 2.9.0'", "Ray 2.9.0"),
        ("pip install -U ray[default]==2.61.0 boto3", "Ray 2.61.0"),
        ("pip install -U 'ray[default]'", "pip install -U 'ray[default]'"),
        ("pip3 install ray", "pip3 install ray"),
        ("which ray || pip install -U ray", "which ray || pip install -U ray"),
        ("pip install -r ray-requirements.txt", None),
        ("pip install ./ray", None),
        ("pip install 'ray @ https://example.org/ray.whl'", None),
        ("pip install torch==2.7.1+cu128", "torch==2.7.1+cu128"),
        ("pip install torch==2.13.0+cu130 torchvision==0.1", None),
        ("pip install torch", None),
        ("conda create -n env python=3.9 -y", "Python 3.9"),
        ("conda create -n env python=3.12 -y", None),
        ("python3.9 -m venv ~/v", "Python 3.9"),
        ("uv venv --python=3.14 ~/v", "Python 3.14"),
        ("uv venv --python 3.10 ~/v", None),
    ],
)
def test_setup_commands(command: str, value: str | None) -> None:
    assert values(command) == ([value] if value else [])


def test_all_in_one_command_are_all_told() -> None:
    assert values("conda create python=3.8 && pip install ray==2.1.0 torch==1.13.1") == [
        "Python 3.8",
        "Ray 2.1.0",
        "torch==1.13.1",
    ]


@pytest.mark.parametrize("key", ["head_setup_commands", "initialization_commands"])
def test_other_commands_are_read_too(key: str) -> None:
    text = edited(AWS, "setup_commands:\n", f"{key}: [pip install torch==1.0]\nsetup_commands:\n")
    assert [each.where for each in found(text)] == [f"{key}[0]"]


def test_commands_of_a_type_are_read_too() -> None:
    text = edited(AWS, "    priority: 10\n", "    priority: 10\n    worker_setup_commands: [pip install ray==1.0]\n")
    assert [each.where for each in found(text)] == ["available_node_types.spot.worker_setup_commands[0]"]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("rayproject/ray:2.60.0-py311-gpu", []),
        ("rayproject/ray-ml:2.9.0-py39-gpu", ["Python 3.9", "Ray 2.9.0"]),
        ("rayproject/ray:2.60.0.abc123-py39", ["Python 3.9"]),
        ("rayproject/ray:latest", []),
        ("my/image:1.2.3", []),
    ],
)
def test_images_of_ray(image: str, expected: list[str]) -> None:
    docker = f"setup_commands:\ndocker: {{image: '{image}', container_name: ray}}\n"
    text = edited(AWS, "setup_commands:\n", "docker: " + docker.partition("docker: ")[2] + "setup_commands:\n")
    assert [each.value for each in found(text)] == expected


def test_the_ray_that_is_here_decides() -> None:
    assert [each.fix for each in found(AWS, ray="2.61.1")] == ["write 2.61.1"]
