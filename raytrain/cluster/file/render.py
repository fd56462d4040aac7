"""The text of a cluster file, from what a person said about the cluster. Pure: the same settings give the same bytes."""

from __future__ import annotations

from typing import Any

from raytrain.cluster.file.cloud import cloud
from raytrain.cluster.file.emitter import to_yaml
from raytrain.cluster.file.kubernetes import kubernetes
from raytrain.cluster.file.local import local
from raytrain.cluster.file.spec import ClusterSpec, check_spec


def render(spec: ClusterSpec) -> str:
    """The file for `ray up`, or the manifests for `kubectl apply`.

    Raises:
        ConfigError: the provider needs a setting that is not given.
    """
    check_spec(spec)
    return "---\n".join(map(to_yaml, _documents(spec)))


def _documents(spec: ClusterSpec) -> tuple[dict[str, Any], ...]:
    if spec.provider == "kubernetes":
        return kubernetes(spec)
    return (local(spec),) if spec.provider == "local" else (cloud(spec),)
