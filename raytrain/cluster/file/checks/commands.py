"""Which shell commands would run, and with which flags and variables? Where the file gives none, Ray has its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raytrain.cluster.file.document import Document, Place

START = {"head": "head_start_ray_commands", "worker": "worker_start_ray_commands"}
SETUP = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")


def start_commands(document: Document, kind: str) -> tuple[str, Place]:
    """All commands that start Ray on a head or a worker, as one, and the place of the one with `ray start`."""
    key = START[kind]
    given = document.get(key)
    commands = document.items(key) if given is not None else default_commands(document, key)
    index = next((i for i, command in enumerate(commands) if "ray start" in str(command)), None)
    return "; ".join(map(str, commands)), (key,) if index is None or given is None else (key, index)


def default_commands(document: Document, key: str) -> list[str]:
    """What Ray runs where the file does not say it."""
    return list(document.facts.defaults.get(document.provider, {}).get(key, []))


def setup_commands(document: Document) -> Iterator[tuple[Place, str]]:
    """All commands of the file that install something, with their places."""
    for key in SETUP:
        for index, command in enumerate(document.items(key)):
            yield (key, index), str(command)
        for name in document.mapping("available_node_types"):
            for index, command in enumerate(document.items("available_node_types", name, key)):
                yield ("available_node_types", name, key, index), str(command)


def flag_of(command: str, flag: str) -> str | None:
    """The value of a flag: '8' in both '--num-cpus=8' and '--num-cpus 8'; None if it is not there."""
    found = re.search(rf"(?<!\S){re.escape(flag)}(?:=|\s+)(\S+)", command)
    return found[1].rstrip(";").strip("'\"") if found else None


def variable_of(command: str, name: str) -> str | None:
    """The value that a variable has in the end: 'token' in 'export RAY_AUTH_MODE=token;'."""
    found = re.findall(rf"(?<![\w-]){re.escape(name)}=([^\s;&]*)", command)
    return found[-1].strip("'\"") if found else None
