"""Would these Kubernetes manifests give a cluster for elastic training? For the kinds of the KubeRay operator."""

from __future__ import annotations

from collections.abc import Iterator

from raytrain.cluster.file.checks.versions import image_mistakes, ray_mistake
from raytrain.cluster.file.document import Document, Mistake, Place

KINDS = ("RayCluster", "RayJob", "RayService", "RayCronJob")
GPU = "nvidia.com/gpu"
SPECS: dict[str, Place] = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec")}
"""Where each kind describes its cluster."""


def is_manifest(document: Document) -> bool:
    """Whether a document is for `kubectl`, not for `ray up`."""
    return isinstance(document.data, dict) and ("apiVersion" in document.data or "kind" in document.data)


def kind_known(document: Document) -> Iterator[Mistake]:
    """What is of ray.io is of a kind that the operator knows."""
    version, kind = document.text("apiVersion"), document.text("kind")
    if kind in KINDS and version != "ray.io/v1":
        found = document.get("apiVersion")
        yield document.mistake(("apiVersion",), found, f"a {kind} is of ray.io/v1", "write apiVersion: ray.io/v1")
    if not kind or (version.startswith("ray.io/") and kind not in KINDS):
        kind = document.get("kind")
        yield document.mistake(("kind",), kind, f"is one of {', '.join(KINDS)}", "write RayCluster, or RayJob")


def spec_of(document: Document) -> Place | None:
    """Where the cluster is described: in a RayCluster, or inside a RayJob; None if nowhere."""
    place = SPECS.get(document.text("kind"))
    return place if place and document.mapping(*place) else None


def cluster_has_parts(document: Document) -> Iterator[Mistake]:
    """A cluster has a head, and groups of workers."""
    place = SPECS.get(document.text("kind"))
    if place and (len(place) == 1 or document.get(*place) is not None):
        for name, empty in (("headGroupSpec", {}), ("workerGroupSpecs", [])):
            found = document.get(*place, name)
            if not isinstance(found, type(empty)) or not found:
                fix = "see what raytrain cluster render --provider kubernetes writes"
                yield document.mistake((*place, name), found, "a cluster has a head and groups of workers", fix)


def job_has_cluster(document: Document) -> Iterator[Mistake]:
    """A job says what to run, and where."""
    if document.get("kind") != "RayJob":
        return
    if not document.get("spec", "entrypoint"):
        yield document.mistake(("spec", "entrypoint"), None, "a job says what it runs", "add entrypoint: python job.py")
    if not document.get("spec", "rayClusterSpec") and not document.get("spec", "clusterSelector"):
        rule, fix = "a job runs on a cluster", "add clusterSelector: {ray.io/cluster: NAME}, or a rayClusterSpec"
        yield document.mistake(("spec",), "no cluster", rule, fix)


def replicas(document: Document) -> Iterator[Mistake]:
    """The numbers of workers are in order: smallest, now, largest."""
    for place in _groups(document):
        low, now, high = (document.number(*place, key) for key in ("minReplicas", "replicas", "maxReplicas"))
        if low > high:
            fix = f"lower it, or raise maxReplicas to {low}"
            yield document.mistake((*place, "minReplicas"), low, f"is at most maxReplicas, {high}", fix)
        elif document.get(*place, "replicas") is not None and not low <= now <= high:
            rule, fix = f"is between minReplicas and maxReplicas, {low} and {high}", f"write {low}"
            yield document.mistake((*place, "replicas"), now, rule, fix)


def resources(document: Document) -> Iterator[Mistake]:
    """Each Ray container says what it may use: the autoscaler and Ray take its size from there."""
    for place in [*_head(document), *_groups(document)]:
        container: Place = (*place, "template", "spec", "containers", 0)
        limits = document.mapping(*container, "resources", "limits")
        if not document.items(*container[:-1]):
            rule, fix = "has one container, for Ray", "add it: name, image, resources"
            yield document.mistake(container[:-1], None, rule, fix)
        elif "cpu" not in limits or "memory" not in limits:
            rule = "says cpu and memory as limits: Ray and its autoscaler take the size of the pod from there"
            fix = "add resources: {limits: {cpu: ..., memory: ...}}, and the same as requests"
            yield document.mistake((*container, "resources"), limits or None, rule, fix)


def head_never_trains(document: Document) -> Iterator[Mistake]:
    """Ray places nothing on the head."""
    for place in _head(document):
        number = document.get(*place, "rayStartParams", "num-cpus")
        if str(number) != "0":
            rule = "the head never trains, so that nothing can harm it"
            yield document.mistake((*place, "rayStartParams", "num-cpus"), number, rule, "write num-cpus: '0'")


def parameters_are_texts(document: Document) -> Iterator[Mistake]:
    """Kubernetes refuses numbers among rayStartParams."""
    for place in [*_head(document), *_groups(document)]:
        for name, value in document.mapping(*place, "rayStartParams").items():
            if not isinstance(value, str):
                here = (*place, "rayStartParams", str(name))
                yield document.mistake(here, repr(value), "is a text: Kubernetes refuses the rest", f"write '{value}'")


def versions(document: Document) -> Iterator[Mistake]:
    """rayVersion and the images have the Ray that is installed here."""
    from packaging.version import InvalidVersion, Version

    spec = spec_of(document)
    if spec is None:
        return
    stated = document.get(*spec, "rayVersion")
    try:
        if stated is not None:
            yield from ray_mistake(document, (*spec, "rayVersion"), Version(str(stated)))
    except InvalidVersion:
        yield document.mistake((*spec, "rayVersion"), stated, "is a version", f"write {document.facts.ray}")
    for place in [*_head(document), *_groups(document)]:
        yield from image_mistakes(document, (*place, "template", "spec", "containers", 0, "image"))


def token_needed(document: Document) -> Iterator[Mistake]:
    """Whoever reaches the dashboard's service runs any code in the cluster, unless a token is needed."""
    spec = spec_of(document)
    if spec is not None and not document.mapping(*spec, "authOptions") and not _has_mode(document):
        rule = "needs a token: without one, each pod of the Kubernetes cluster can run any code here"
        yield document.mistake((*spec, "authOptions"), None, rule, "add authOptions: {mode: token} (KubeRay 1.5.1 or newer)")
    elif spec is not None and document.get(*spec, "authOptions", "mode") == "disabled":
        rule = "needs a token: without one, each pod of the Kubernetes cluster can run any code here"
        yield document.mistake((*spec, "authOptions", "mode"), "disabled", rule, "write mode: token")


def _has_mode(document: Document) -> bool:
    return all(
        {"name": "RAY_AUTH_MODE", "value": "token"} in document.items(*place, "template", "spec", "containers", 0, "env")
        for place in [*_head(document), *_groups(document)]
    )


def grows(document: Document) -> Iterator[Mistake]:
    """Where the number of workers may change, an autoscaler changes it."""
    spec = spec_of(document)
    moving = [p for p in _groups(document) if document.number(*p, "minReplicas") < document.number(*p, "maxReplicas")]
    if spec is not None and moving and document.get(*spec, "enableInTreeAutoscaling") is not True:
        rule = "minReplicas and maxReplicas differ, and nothing else changes the number of workers"
        yield document.mistake((*spec, "enableInTreeAutoscaling"), None, rule, "add enableInTreeAutoscaling: true")


def shared_memory(document: Document) -> Iterator[Mistake]:
    """Workers have a large /dev/shm: a pod's own is 64 MiB, and Ray's object store would go to the disk."""
    for place in _groups(document):
        pod: Place = (*place, "template", "spec")
        mounted = document.items(*pod, "containers", 0, "volumeMounts")
        if document.items(*pod, "containers") and not any(_get(each, "mountPath") == "/dev/shm" for each in mounted):
            rule = "Ray's object store is in /dev/shm, of which a pod has 64 MiB"
            fix = "mount a volume there: emptyDir: {medium: Memory}"
            yield document.mistake((*pod, "containers", 0, "volumeMounts"), "no /dev/shm", rule, fix)


def enough_for_the_run(document: Document) -> Iterator[Mistake]:
    """The run's largest number of workers fits, one per GPU where there are any."""
    groups = list(_groups(document))
    if document.facts.workers is None or not groups:
        return
    low, high = document.facts.workers
    sizes = [_amount(document, place) for place in groups]
    if any(size is None for size in sizes):
        return
    room = sum((size or 0) * document.number(*place, "maxReplicas") for size, place in zip(sizes, groups, strict=True))
    if room < high:
        rule = f"a run with --run.workers {low}:{high} can grow to {high} workers"
        fix = f"raise maxReplicas, or run with --run.workers {min(low, room)}:{room}"
        yield document.mistake((*groups[0], "maxReplicas"), f"room for {room} workers", rule, fix)


def _amount(document: Document, place: Place) -> int | None:
    limits = document.mapping(*place, "template", "spec", "containers", 0, "resources", "limits")
    amount = str(limits.get(GPU, limits.get("cpu", "")))
    return int(amount) if amount.isdigit() else None


def _head(document: Document) -> list[Place]:
    spec = spec_of(document)
    return [] if spec is None else [(*spec, "headGroupSpec")]


def _groups(document: Document) -> Iterator[Place]:
    spec = spec_of(document)
    if spec is not None:
        yield from ((*spec, "workerGroupSpecs", index) for index in range(len(document.items(*spec, "workerGroupSpecs"))))


def _get(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None
