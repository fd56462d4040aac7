"""Do all nodes get versions that fit: of Python, Ray and torch? Reads what is installed, and the names of images."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from raytrain.cluster.file.checks.commands import setup_commands
from raytrain.cluster.file.document import Document, Mistake, Place
from raytrain.cluster.file.facts import PYTHONS, TORCHES

_PIN = r"(?<![\w.-]){name}(?:\[[\w,-]*\])?\s*==\s*['\"]?(?P<version>\d[\w.+]*)"
_UNPINNED_RAY = re.compile(r"pip3?\s+install\b[^;&|]*(?<![\w./-])ray(?:\[[\w,-]*\])?(?![\w\[=.<>~!/-]|\s*@)")
_PYTHON = re.compile(r"(?:--python[ =]|python==?|python(?=3\.\d+\s+-m\s+venv))(?P<version>3\.\d+)")
_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(?P<ray>\d+\.\d+\.\d+)(?:[\w.]*-py(?P<major>\d)(?P<minor>\d+))?")


def ray_version(document: Document) -> Iterator[Mistake]:
    """The nodes' Ray is the one that is installed here."""
    for place, command in setup_commands(document):
        version = _pinned(command, "ray")
        if version is not None:
            yield from ray_mistake(document, place, version)
        elif _UNPINNED_RAY.search(command):
            rule = f"all nodes have the same Ray as here, {document.facts.ray}; without a version they get the newest"
            yield document.mistake(place, command, rule, f"write ray[default,data,train,tune]=={document.facts.ray}")


def torch_version(document: Document) -> Iterator[Mistake]:
    """The nodes' torch is one that raytrain works with."""
    for place, command in setup_commands(document):
        version = _pinned(command, "torch")
        if version is not None and version not in SpecifierSet(TORCHES):
            yield document.mistake(place, f"torch=={version}", f"raytrain needs torch {TORCHES}", "choose one in this range")


def python_version(document: Document) -> Iterator[Mistake]:
    """The nodes' Python is one that raytrain works with."""
    for place, command in setup_commands(document):
        found = _PYTHON.search(command)
        if found:
            yield from python_mistake(document, place, found["version"])


def image_versions(document: Document) -> Iterator[Mistake]:
    """The same for the names of Ray's container images."""
    for name in ("image", "head_image", "worker_image"):
        yield from image_mistakes(document, ("docker", name))


def image_mistakes(document: Document, place: Place) -> Iterator[Mistake]:
    """What is wrong with the versions in the name of a Ray image, if it is one."""
    found = _IMAGE.search(document.text(*place))
    if found:
        yield from ray_mistake(document, place, Version(found["ray"]))
        if found["major"]:
            yield from python_mistake(document, place, f"{found['major']}.{found['minor']}")


def ray_mistake(document: Document, place: Place, version: Version) -> Iterator[Mistake]:
    """What is wrong with a version of Ray: it is of another minor version than the one here."""
    ours = Version(document.facts.ray)
    if version.release[:2] != ours.release[:2]:
        rule = f"is the Ray that is installed here, {ours}: this file and raytrain were tested with it"
        yield document.mistake(place, f"Ray {version}", rule, f"write {ours}")


def python_mistake(document: Document, place: Place, version: str) -> Iterator[Mistake]:
    """What is wrong with a version of Python."""
    if Version(version) not in SpecifierSet(PYTHONS):
        yield document.mistake(place, f"Python {version}", f"raytrain needs Python {PYTHONS}", "choose one in this range")


def _pinned(command: str, name: str) -> Version | None:
    found = re.search(_PIN.format(name=name), command)
    try:
        return Version(found["version"]) if found else None
    except InvalidVersion:
        return None
