"""What is wrong with a cluster file? All mistakes at once, in the order of its lines; offline and without side effects.

Each check is a pure function from a document to the mistakes that it finds. The rules for files of `ray up` are in
`ray_up_checks` and, where they are Ray's own, in `ray_validation`. Here are those for the manifests of the KubeRay operator,
and those that both kinds share: do all nodes get fitting versions of Python, Ray and torch?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from raytrain.cluster.file import ray_up_checks
from raytrain.cluster.file.commands import PYTHONS, TORCHES, setup_commands
from raytrain.cluster.file.document import Document, Facts, KeyPath, Mistake, read
from raytrain.cluster.file.ray_validation import ray_accepts, schema, string_keys, unique_keys

Check = Callable[[Document], Iterator[Mistake]]

KINDS = ("RayCluster", "RayJob", "RayService", "RayCronJob")
SPECS: dict[str, KeyPath] = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec")}
"""Where each kind describes its cluster."""

_CONTAINER = ("template", "spec", "containers", 0)
_PIN = r"(?<![\w.-]){name}(?:\[[\w,-]*\])?\s*==\s*['\"]?(?P<version>\d[\w.+]*)"
_UNPINNED_RAY = re.compile(r"pip3?\s+install\b[^;&|]*(?<![\w./-])ray(?:\[[\w,-]*\])?(?![\w\[=.<>~!/-]|\s*@)")
_PYTHON = re.compile(r"(?:--python[ =]|python==?|python(?=3\.\d+\s+-m\s+venv))(?P<version>3\.\d+)")
_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(?P<ray>\d+\.\d+\.\d+)(?:[\w.]*-py(?P<major>\d)(?P<minor>\d+))?")


def mistakes(text: str, facts: Facts) -> list[Mistake]:
    """All mistakes in the text of a cluster file, or of Kubernetes manifests."""
    documents, found = read(text, facts)
    if len(documents) > 1 and not any(map(_is_manifest, documents)):
        rule, fix = "a cluster file is one document", "remove all after the line ---"
        found = [documents[1].mistake((), f"{len(documents)} documents", rule, fix)]
        documents = documents[:1]
    for document in documents:
        if _is_manifest(document):
            found += _all(MANIFEST, document)
        elif isinstance(document.data, dict):
            found += (_all(FORM, document) or list(ray_accepts(document))) + _all(MEANING, document)
        else:
            found.append(document.mistake((), document.data, "is a mapping", "write one with raytrain cluster render"))
    return sorted(set(found))


def _all(checks: tuple[Check, ...], document: Document) -> list[Mistake]:
    return [mistake for check in checks for mistake in check(document)]


def _is_manifest(document: Document) -> bool:
    """Whether a document is for `kubectl`, not for `ray up`."""
    return isinstance(document.data, dict) and ("apiVersion" in document.data or "kind" in document.data)


def _installed_versions(document: Document) -> Iterator[Mistake]:
    for path, command in setup_commands(document):
        ray, torch, python = _pinned(command, "ray"), _pinned(command, "torch"), _PYTHON.search(command)
        if ray is not None:
            yield from _ray_version(document, path, ray)
        elif _UNPINNED_RAY.search(command):
            ours = document.facts.ray
            rule = f"all nodes have the same Ray as here, {ours}; without a version they get the newest"
            yield document.mistake(path, command, rule, f"write ray[default,data,train,tune]=={ours}")
        if torch is not None and torch not in SpecifierSet(TORCHES):
            yield document.mistake(path, f"torch=={torch}", f"raytrain needs torch {TORCHES}", "choose one in this range")
        if python:
            yield from _python_version(document, path, python["version"])


def _pinned(command: str, name: str) -> Version | None:
    found = re.search(_PIN.format(name=name), command)
    try:
        return Version(found["version"]) if found else None
    except InvalidVersion:
        return None


def _docker_images(document: Document) -> Iterator[Mistake]:
    for name in ("image", "head_image", "worker_image"):
        yield from _image_versions(document, ("docker", name))


def _image_versions(document: Document, path: KeyPath) -> Iterator[Mistake]:
    found = _IMAGE.search(document.text(*path))
    if found:
        yield from _ray_version(document, path, Version(found["ray"]))
        if found["major"]:
            yield from _python_version(document, path, f"{found['major']}.{found['minor']}")


def _ray_version(document: Document, path: KeyPath, version: Version) -> Iterator[Mistake]:
    ours = Version(document.facts.ray)
    if version.release[:2] != ours.release[:2]:
        rule = f"is the Ray that is installed here, {ours}: this file and raytrain were tested with it"
        yield document.mistake(path, f"Ray {version}", rule, f"write {ours}")


def _python_version(document: Document, path: KeyPath, version: str) -> Iterator[Mistake]:
    if Version(version) not in SpecifierSet(PYTHONS):
        yield document.mistake(path, f"Python {version}", f"raytrain needs Python {PYTHONS}", "choose one in this range")


def _kind_known(document: Document) -> Iterator[Mistake]:
    version, kind = document.text("apiVersion"), document.text("kind")
    if kind in KINDS and version != "ray.io/v1":
        found = document.get("apiVersion")
        yield document.mistake(("apiVersion",), found, f"a {kind} is of ray.io/v1", "write apiVersion: ray.io/v1")
    if not kind or (version.startswith("ray.io/") and kind not in KINDS):
        found, rule = document.get("kind"), f"is one of {', '.join(KINDS)}"
        yield document.mistake(("kind",), found, rule, "write RayCluster, or RayJob")


def _cluster_has_parts(document: Document) -> Iterator[Mistake]:
    path = SPECS.get(document.text("kind"))
    if path and (len(path) == 1 or document.get(*path) is not None):
        for name, kind in (("headGroupSpec", dict), ("workerGroupSpecs", list)):
            found = document.get(*path, name)
            if not isinstance(found, kind) or not found:
                rule, fix = (
                    "a cluster has a head and groups of workers",
                    "see what raytrain cluster render --provider kubernetes writes",
                )
                yield document.mistake((*path, name), found, rule, fix)


def _job_has_cluster(document: Document) -> Iterator[Mistake]:
    if document.get("kind") != "RayJob":
        return
    if not document.get("spec", "entrypoint"):
        yield document.mistake(("spec", "entrypoint"), None, "a job says what it runs", "add entrypoint: python job.py")
    if not document.get("spec", "rayClusterSpec") and not document.get("spec", "clusterSelector"):
        rule, fix = "a job runs on a cluster", "add clusterSelector: {ray.io/cluster: NAME}, or a rayClusterSpec"
        yield document.mistake(("spec",), "no cluster", rule, fix)


def _replicas(document: Document) -> Iterator[Mistake]:
    for path in _groups(document):
        low, now, high = (document.number(*path, key) for key in ("minReplicas", "replicas", "maxReplicas"))
        if low > high:
            fix = f"lower it, or raise maxReplicas to {low}"
            yield document.mistake((*path, "minReplicas"), low, f"is at most maxReplicas, {high}", fix)
        elif document.get(*path, "replicas") is not None and not low <= now <= high:
            rule = f"is between minReplicas and maxReplicas, {low} and {high}"
            yield document.mistake((*path, "replicas"), now, rule, f"write {low}")


def _container_resources(document: Document) -> Iterator[Mistake]:
    for path in _pods(document):
        containers: KeyPath = (*path, *_CONTAINER[:-1])
        limits = document.mapping(*path, *_CONTAINER, "resources", "limits")
        if not document.items(*containers):
            yield document.mistake(containers, None, "has one container, for Ray", "add it: name, image, resources")
        elif "cpu" not in limits or "memory" not in limits:
            rule = "sets cpu and memory as limits: Ray and its autoscaler take the size of the pod from there"
            fix = "add resources: {limits: {cpu: ..., memory: ...}}, and the same as requests"
            yield document.mistake((*path, *_CONTAINER, "resources"), limits or None, rule, fix)


def _start_params(document: Document) -> Iterator[Mistake]:
    for path in _heads(document):
        number = document.get(*path, "rayStartParams", "num-cpus")
        if str(number) != "0":
            rule = "the head must not train: nothing may harm it"
            yield document.mistake((*path, "rayStartParams", "num-cpus"), number, rule, "write num-cpus: '0'")
    for path in _pods(document):
        for name, value in document.mapping(*path, "rayStartParams").items():
            if not isinstance(value, str):
                rule, fix = "is a string: Kubernetes refuses anything else", f"write '{value}'"
                yield document.mistake((*path, "rayStartParams", name), repr(value), rule, fix)


def _ray_versions(document: Document) -> Iterator[Mistake]:
    for spec in _specs(document):
        stated = document.get(*spec, "rayVersion")
        try:
            if stated is not None:
                yield from _ray_version(document, (*spec, "rayVersion"), Version(str(stated)))
        except InvalidVersion:
            yield document.mistake((*spec, "rayVersion"), stated, "is a version", f"write {document.facts.ray}")
    for path in _pods(document):
        yield from _image_versions(document, (*path, *_CONTAINER, "image"))


def _token_required(document: Document) -> Iterator[Mistake]:
    variable = {"name": "RAY_AUTH_MODE", "value": "token"}
    is_set = all(variable in document.items(*path, *_CONTAINER, "env") for path in _pods(document))
    rule = "needs a token: without one, each pod of the Kubernetes cluster can run any code here"
    for spec in _specs(document):
        if document.get(*spec, "authOptions", "mode") == "disabled":
            yield document.mistake((*spec, "authOptions", "mode"), "disabled", rule, "write mode: token")
        elif not document.mapping(*spec, "authOptions") and not is_set:
            fix = "add authOptions: {mode: token} (KubeRay 1.5.1 or newer)"
            yield document.mistake((*spec, "authOptions"), None, rule, fix)


def _autoscaling(document: Document) -> Iterator[Mistake]:
    moving = [p for p in _groups(document) if document.number(*p, "minReplicas") < document.number(*p, "maxReplicas")]
    for spec in _specs(document):
        if moving and document.get(*spec, "enableInTreeAutoscaling") is not True:
            rule = "minReplicas and maxReplicas differ, and nothing else changes the number of workers"
            yield document.mistake((*spec, "enableInTreeAutoscaling"), None, rule, "add enableInTreeAutoscaling: true")


def _shared_memory(document: Document) -> Iterator[Mistake]:
    for path in _groups(document):
        mounts = document.items(*path, *_CONTAINER, "volumeMounts")
        is_mounted = any(isinstance(each, dict) and each.get("mountPath") == "/dev/shm" for each in mounts)
        if document.items(*path, *_CONTAINER[:-1]) and not is_mounted:
            rule, fix = "Ray's object store is in /dev/shm, of which a pod has 64 MiB", "emptyDir: {medium: Memory}"
            where = (*path, *_CONTAINER, "volumeMounts")
            yield document.mistake(where, "no /dev/shm", rule, f"mount a volume there: {fix}")


def _enough_for_the_run(document: Document) -> Iterator[Mistake]:
    groups = _groups(document)
    if document.facts.workers is None or not groups:
        return
    (low, high), room = document.facts.workers, 0
    for path in groups:
        limits = document.mapping(*path, *_CONTAINER, "resources", "limits")
        size = str(limits.get("nvidia.com/gpu", limits.get("cpu", "")))
        if not size.isdigit():
            return
        room += int(size) * document.number(*path, "maxReplicas")
    if room < high:
        rule, fix = (
            ray_up_checks.growth_rule(low, high),
            f"raise maxReplicas, or run with --run.workers {min(low, room)}:{room}",
        )
        yield document.mistake((*groups[0], "maxReplicas"), f"room for {room} workers", rule, fix)


def _specs(document: Document) -> list[KeyPath]:
    """Where the cluster is described, if it is."""
    path = SPECS.get(document.text("kind"))
    return [path] if path and document.mapping(*path) else []


def _heads(document: Document) -> list[KeyPath]:
    return [(*spec, "headGroupSpec") for spec in _specs(document)]


def _groups(document: Document) -> list[KeyPath]:
    specs = [(*spec, "workerGroupSpecs") for spec in _specs(document)]
    return [(*path, index) for path in specs for index in range(len(document.items(*path)))]


def _pods(document: Document) -> list[KeyPath]:
    return [*_heads(document), *_groups(document)]


FORM: tuple[Check, ...] = (unique_keys, string_keys, schema, *ray_up_checks.FORM)
MEANING: tuple[Check, ...] = (*ray_up_checks.MEANING, _installed_versions, _docker_images)
MANIFEST: tuple[Check, ...] = (
    *(unique_keys, string_keys, _kind_known, _cluster_has_parts, _job_has_cluster, _replicas, _container_resources),
    *(_start_params, _ray_versions, _token_required, _autoscaling, _shared_memory, _enough_for_the_run),
)
