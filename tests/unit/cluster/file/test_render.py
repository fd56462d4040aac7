"""Rendered files: Ray takes them, our own check finds nothing in them, and they say what they are meant to say."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from typing import Any

import pytest
import yaml

from raytrain.cluster.file.facts import PYTHONS, TORCHES
from raytrain.cluster.file.render import render
from raytrain.cluster.file.setup import RAY, SOURCES, TORCH
from raytrain.cluster.file.spec import PROVIDERS, ClusterSpec
from raytrain.errors import ConfigError
from tests.unit.cluster.file.support import NEEDED, REPOSITORY, facts, found, rendered

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("aws", {"workers": "4:64", "on_demand": 0, "worker_machine": "p4d.24xlarge", "ssh_key": "~/.ssh/id_ed25519"}),
    ("aws", {"workers": (0, 0), "on_demand": 4, "image": "ami-1", "zone": "us-west-2a,us-west-2b", "python": "3.12"}),
    ("aws", {"worker_machine": "trn1.2xlarge", "worker_cpus": 8, "worker_gpus": 1, "object_store_memory": 10**9}),
    ("gcp", {"workers": "1:2", "worker_machine": "a2-highgpu-1g", "region": "europe-west4", "ssh_user": "me"}),
    ("azure", {"ssh_key": "~/.ssh/id_ed25519", "region": "westeurope", "worker_machine": "Standard_NC24ads_A100_v4"}),
    ("local", {"worker_cpus": 1, "object_store_memory": 100_000_000, "setup": "none", "ssh_key": "~/.ssh/id_ed25519"}),
    ("local", {"activate": "source ~/env/bin/activate", "worker_gpus": 2, "setup": "none"}),
    ("kubernetes", {"workers": "4:64", "worker_gpus": 8, "image": "rayproject/ray:2.60.0-py311-gpu", "namespace": "ml"}),
    ("kubernetes", {"worker_gpus": 0, "worker_cpus": 2, "worker_memory_gib": 2, "object_store_memory": 10**8}),
]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_each_provider_passes_the_check(provider: str) -> None:
    assert found(rendered(provider)) == []


@pytest.mark.parametrize(("provider", "settings"), OPTIONS, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_so_do_other_settings(provider: str, settings: dict[str, Any]) -> None:
    assert found(rendered(provider, **settings)) == []


def test_the_file_at_the_top_is_what_is_rendered_for_aws() -> None:
    assert (REPOSITORY / "cluster.yaml").read_text(encoding="utf-8") == rendered("aws")


def test_versions_are_those_of_this_project() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = "{PYTHONS}"' in project
    assert f'"torch{TORCHES}",' in project
    assert importlib.metadata.version("ray").rpartition(".")[0] == RAY.rpartition(".")[0]
    assert importlib.metadata.version("torch").partition("+")[0].rpartition(".")[0] == TORCH.rpartition(".")[0]
    assert all((REPOSITORY / name).exists() for name in SOURCES)


def test_aws_has_a_head_that_stays_and_spot_workers_before_others() -> None:
    file = yaml.safe_load(rendered("aws", workers="2:8", on_demand=3))
    head, spot, demand = (file["available_node_types"][name] for name in ("head", "spot", "on-demand"))
    assert file["head_node_type"] == "head"
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert "InstanceMarketOptions" not in {**head["node_config"], **demand["node_config"]}
    assert spot["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert (spot["min_workers"], spot["max_workers"], demand["max_workers"], file["max_workers"]) == (2, 8, 3, 11)
    assert spot["priority"] > demand["priority"]
    assert spot["resources"] == demand["resources"] == {"CPU": 4, "GPU": 1}


def test_every_node_has_the_token_and_asks_for_it() -> None:
    for provider in ("aws", "gcp", "azure", "local"):
        file = yaml.safe_load(rendered(provider))
        assert file["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
        for kind in ("head", "worker"):
            stop, start = file[f"{kind}_start_ray_commands"]
            assert stop == "ray stop"
            assert re.search(r"export RAY_AUTH_MODE=token .*; ulimit -n 65536; ray start ", start)
    cluster, _ = yaml.safe_load_all(rendered("kubernetes"))
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


def test_local_starts_all_workers_without_any_variable_on_the_users_side() -> None:
    settings = {"worker_cpus": 1, "object_store_memory": 100_000_000, "setup": "none", "ssh_key": "~/.ssh/id_ed25519"}
    file = yaml.safe_load(rendered("local", **settings))
    assert file["provider"] == {"type": "local", "head_ip": "10.77.0.1", "worker_ips": ["10.77.0.2", "10.77.0.3"]}
    assert file["auth"] == {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    assert file["setup_commands"] == []
    head, worker = file["head_start_ray_commands"][1], file["worker_start_ray_commands"][1]
    assert " RAY_enable_autoscaler_v2=0 " in head.partition("ray start")[0]
    assert head.endswith(
        "ray start --head --port=6379 --node-ip-address=10.77.0.1 --dashboard-host=127.0.0.1 --num-cpus=0 --num-gpus=0"
        " --object-store-memory=100000000 --autoscaling-config=~/ray_bootstrap_config.yaml"
    )
    assert worker.endswith("ray start --address=$RAY_HEAD_IP:6379 --num-cpus=1 --object-store-memory=100000000")


def test_activate_comes_before_every_ray() -> None:
    file = yaml.safe_load(rendered("local", setup="none", activate="source ~/env/bin/activate"))
    for command in (*file["head_start_ray_commands"], *file["worker_start_ray_commands"]):
        assert command.startswith("source ~/env/bin/activate; ")


def test_setup_installs_the_pinned_versions_from_the_sources() -> None:
    file = yaml.safe_load(rendered("aws", project="~/src/raytrain/", python="3.12"))
    commands = "\n".join(file["setup_commands"])
    assert f"'ray[default,data,train,tune]=={RAY}' torch=={TORCH} -e ~/raytrain-src" in commands
    assert "--python 3.12 ~/venv" in commands
    assert file["file_mounts"]["~/raytrain-src/pyproject.toml"] == "~/src/raytrain/pyproject.toml"


@pytest.mark.parametrize("provider", ["aws", "local"])
def test_all_commands_are_shell(provider: str) -> None:
    file = yaml.safe_load(rendered(provider))
    commands = [*file["setup_commands"], *file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    assert len(commands) == 8
    for command in commands:
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0


def test_kubernetes_has_a_cluster_and_a_job_on_it() -> None:
    cluster, job = yaml.safe_load_all(rendered("kubernetes", name="big", namespace="ml", workers="4:64", worker_gpus=8))
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (4, 4, 64)
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert group["template"]["spec"]["volumes"][0]["emptyDir"]["medium"] == "Memory"
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": "big"}
    assert cluster["metadata"] == {"name": "big", "namespace": "ml"}
    assert job["metadata"]["namespace"] == "ml"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_lines_are_short_and_comments_fill_no_page(provider: str) -> None:
    lines = rendered(provider).splitlines()
    assert max(map(len, lines)) <= 130
    assert sum(line.lstrip().startswith("#") for line in lines) <= 45


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"provider": "local"}, "--head-ip"),
        ({**NEEDED["local"], "provider": "local", "worker_ips": ()}, "--worker-ips"),
        ({**NEEDED["local"], "provider": "local", "ssh_user": ""}, "--ssh-user"),
        ({**NEEDED["local"], "provider": "local", "head_ip": "10.77.0.2"}, "--worker-ips"),
        ({"provider": "gcp"}, "--project-id"),
        ({"provider": "aws", "workers": "0:0", "on_demand": 0}, "--workers"),
        ({"provider": "aws", "workers": "3:2"}, "--workers"),
        ({"provider": "aws", "worker_machine": "x9.large"}, "--worker-cpus"),
        ({"provider": "aws", "worker_machine": "x9.large", "worker_cpus": 2}, "--worker-gpus"),
        ({"provider": "azure", "image": "ubuntu"}, "--image"),
    ],
)
def test_what_cannot_be_rendered_is_told(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        render(ClusterSpec.model_validate(settings))
    assert error.value.where == where


def test_the_check_of_rendered_files_can_fail() -> None:
    assert [each.where for each in found(rendered("aws"), exists=lambda _: False)] == [
        "file_mounts.~/.ray/auth_token",
        *(f"file_mounts.~/raytrain-src/{name}" for name in SOURCES),
    ]
    assert facts().exists("raytrain")
