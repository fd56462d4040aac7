"""Rendered files: Ray takes them, our own check finds nothing in them, and they say what they are meant to say."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from typing import Any

import pytest
import yaml

from raytrain.cluster.file.commands import PYTHONS, RAY, SOURCES, TORCH, TORCHES
from raytrain.cluster.file.render import render
from raytrain.cluster.file.spec import PROVIDERS, ClusterSpec
from raytrain.errors import ConfigError
from tests.unit.cluster.file.support import NEEDED, REPOSITORY, found, rendered

KEY = "~/.ssh/id_ed25519"
P4D = {"worker_machine": "p4d.24xlarge", "worker_cpus": 96, "worker_gpus": 8}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((provider, {}) for provider in PROVIDERS),
    ("aws", {**P4D, "workers": "4:64", "on_demand": 0, "ssh_key": KEY}),
    ("aws", {"workers": (0, 0), "on_demand": 4, "image": "ami-1", "zone": "us-west-2a,us-west-2b", "name": "yes"}),
    ("gcp", {"workers": "1:2", "worker_machine": "g2-standard-8", "region": "europe-west4", "ssh_user": "me"}),
    ("azure", {"ssh_key": KEY, "region": "westeurope", "image": "a:b:c:1.0", "object_store_memory": 10**9}),
    ("local", {"worker_cpus": 1, "object_store_memory": 100_000_000, "setup": "none", "ssh_key": KEY}),
    ("local", {"activate": "source ~/env/bin/activate", "worker_gpus": 2, "setup": "none"}),
    ("kubernetes", {"workers": "4:64", "worker_gpus": 8, "image": "rayproject/ray:2.60.0-py311-gpu", "namespace": "ml"}),
    ("kubernetes", {"worker_gpus": 0, "worker_cpus": 2, "worker_memory_gib": 2, "object_store_memory": 10**8}),
]


@pytest.mark.parametrize(("provider", "settings"), OPTIONS, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_what_is_rendered_passes_the_check_and_has_short_lines(provider: str, settings: dict[str, Any]) -> None:
    text = rendered(provider, **settings)
    assert found(text) == []
    assert max(map(len, text.splitlines())) <= 130


def test_the_cluster_yaml_of_the_repository_is_the_one_for_aws() -> None:
    assert (REPOSITORY / "cluster.yaml").read_text(encoding="utf-8") == rendered("aws")


def test_versions_are_those_of_this_project() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = "{PYTHONS}"' in project
    assert f'"torch{TORCHES}",' in project
    for name, version in (("ray", RAY), ("torch", TORCH)):
        assert importlib.metadata.version(name).partition("+")[0].rpartition(".")[0] == version.rpartition(".")[0]
    assert all((REPOSITORY / name).exists() for name in SOURCES)


def test_aws_has_a_head_on_demand_spot_workers_and_pinned_versions() -> None:
    file = yaml.safe_load(rendered("aws", workers="2:8", on_demand=3, project="~/src/raytrain/", python="3.12"))
    assert "--python 3.12 ~/venv" in file["setup_commands"][1]
    assert f"'ray[default,data,train,tune]=={RAY}' torch=={TORCH} -e ~/raytrain-src" in file["setup_commands"][2]
    assert file["file_mounts"]["~/raytrain-src/pyproject.toml"] == "~/src/raytrain/pyproject.toml"
    head, spot, demand = (file["available_node_types"][name] for name in ("head", "spot", "on-demand"))
    assert file["head_node_type"] == "head"
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert "InstanceMarketOptions" not in {**head["node_config"], **demand["node_config"]}
    assert spot["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert (spot["min_workers"], spot["max_workers"], demand["max_workers"], file["max_workers"]) == (2, 8, 3, 11)
    assert spot["priority"] > demand["priority"]
    assert spot["resources"] == demand["resources"] == {"CPU": 4, "GPU": 1}


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure", "local"])
def test_every_node_requires_the_token_and_all_commands_are_shell(provider: str) -> None:
    file = yaml.safe_load(rendered(provider))
    assert file["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for kind in ("head", "worker"):
        stop, start = file[f"{kind}_start_ray_commands"]
        assert stop == "ray stop"
        assert re.search(r"export RAY_AUTH_MODE=token .*; ulimit -n 65536; ray start ", start)
    commands = [*file["setup_commands"], *file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    assert len(commands) == 8
    assert subprocess.run(["bash", "-n"], input="\n".join(commands), text=True, check=False).returncode == 0


def test_local_asks_for_autoscaler_v1_and_activates_before_every_ray() -> None:
    settings = {"worker_cpus": 1, "object_store_memory": 100_000_000, "setup": "none", "ssh_key": KEY}
    file = yaml.safe_load(rendered("local", **settings, activate="source ~/env/bin/activate"))
    assert file["provider"] == {"type": "local", "head_ip": "10.77.0.1", "worker_ips": ["10.77.0.2", "10.77.0.3"]}
    assert file["auth"] == {"ssh_user": "root", "ssh_private_key": KEY}
    assert file["setup_commands"] == []
    commands = [*file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    assert all(command.startswith("source ~/env/bin/activate; ") for command in commands)
    assert " RAY_enable_autoscaler_v2=0 " in commands[1].partition("ray start")[0]
    assert commands[1].endswith(
        "ray start --head --port=6379 --node-ip-address=10.77.0.1 --dashboard-host=127.0.0.1 --num-cpus=0 --num-gpus=0"
        " --object-store-memory=100000000 --autoscaling-config=~/ray_bootstrap_config.yaml"
    )
    assert commands[3].endswith("ray start --address=$RAY_HEAD_IP:6379 --num-cpus=1 --object-store-memory=100000000")


def test_kubernetes_has_a_cluster_and_a_job_on_it() -> None:
    cluster, job = yaml.safe_load_all(rendered("kubernetes", name="big", namespace="ml", workers="4:64", worker_gpus=8))
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (4, 4, 64)
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert group["template"]["spec"]["volumes"][0]["emptyDir"]["medium"] == "Memory"
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": "big"}
    assert (cluster["metadata"], job["metadata"]["namespace"]) == ({"name": "big", "namespace": "ml"}, "ml")


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"provider": "local"}, "--head-ip"),
        ({**NEEDED["local"], "provider": "local", "worker_ips": ()}, "--worker-ips"),
        ({**NEEDED["local"], "provider": "local", "ssh_user": ""}, "--ssh-user"),
        ({**NEEDED["local"], "provider": "local", "head_ip": "10.77.0.2"}, "--worker-ips"),
        *(({"provider": "gcp"}, "--project-id"), ({"provider": "aws", "workers": "0:0", "on_demand": 0}, "--workers")),
        ({"provider": "aws", "workers": "3:2"}, "--workers"),
        ({"provider": "aws", "worker_machine": "x9.large"}, "--worker-cpus"),
        ({"provider": "aws", "worker_machine": "x9.large", "worker_cpus": 2}, "--worker-gpus"),
        ({"provider": "azure", "image": "ubuntu"}, "--image"),
    ],
)
def test_a_setting_that_is_missing_or_wrong_is_an_error(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        render(ClusterSpec.model_validate(settings))
    assert error.value.where == where
