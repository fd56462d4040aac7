"""Which mistakes are in a cluster file? All of them at once, in the order of its lines; offline and without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raytrain.cluster.file.checks import clouds, form, manifests, nodes, paths, ray_says, starting, versions
from raytrain.cluster.file.document import Document, Mistake, read
from raytrain.cluster.file.facts import Facts

Check = Callable[[Document], Iterator[Mistake]]

FORM: tuple[Check, ...] = (
    form.keys_once,
    form.keys_are_texts,
    form.schema,
    form.provider_known,
    form.local_hosts,
    form.head_type_known,
    form.limits,
)
"""What Ray would refuse."""

MEANING: tuple[Check, ...] = (
    nodes.head_stays,
    nodes.head_never_trains,
    nodes.workers_exist,
    nodes.resources_true,
    nodes.gpus_everywhere,
    nodes.default_limit,
    nodes.enough_for_the_run,
    nodes.enough_local_machines,
    starting.head_starts_workers,
    starting.workers_find_head,
    starting.can_start_again,
    starting.token_needed,
    starting.dashboard_private,
    starting.ports_private,
    starting.all_local_workers_start,
    versions.ray_version,
    versions.torch_version,
    versions.python_version,
    versions.image_versions,
    paths.ssh_keys,
    paths.mounts,
    clouds.aws_names,
    clouds.aws_image,
    clouds.aws_key,
    clouds.gcp_project,
    clouds.azure_keys,
)
"""What Ray would take, and what a person would find out later."""

MANIFEST: tuple[Check, ...] = (
    form.keys_once,
    form.keys_are_texts,
    manifests.kind_known,
    manifests.cluster_has_parts,
    manifests.job_has_cluster,
    manifests.replicas,
    manifests.resources,
    manifests.head_never_trains,
    manifests.parameters_are_texts,
    manifests.versions,
    manifests.token_needed,
    manifests.grows,
    manifests.shared_memory,
    manifests.enough_for_the_run,
)
"""For Kubernetes."""


def mistakes(text: str, facts: Facts) -> list[Mistake]:
    """All mistakes of a cluster file, or of Kubernetes manifests.

    Args:
        text: of the file.
        facts: about the machine, the run and the versions.
    """
    documents, found = read(text, facts)
    if len(documents) > 1 and not any(map(manifests.is_manifest, documents)):
        rule, fix = "a cluster file is one document", "remove what stands after the line ---"
        found = [documents[1].mistake((), f"{len(documents)} documents", rule, fix)]
        documents = documents[:1]
    for document in documents:
        found.extend(_all(MANIFEST, document) if manifests.is_manifest(document) else _of_cluster_file(document))
    return sorted(set(found))


def _of_cluster_file(document: Document) -> list[Mistake]:
    if not isinstance(document.data, dict):
        return [document.mistake((), document.data, "is a mapping", "write one with raytrain cluster render")]
    refused = _all(FORM, document) or list(ray_says.rays_own_word(document))
    return refused + _all(MEANING, document)


def _all(checks: tuple[Check, ...], document: Document) -> list[Mistake]:
    return [mistake for check in checks for mistake in check(document)]
