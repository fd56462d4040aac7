"""What is installed on a bare machine, and in which versions? In those that this project is tested with.

Ray wants the same version of Ray and of Python on all nodes, so nothing is left to what an image happens to have.
"""

from __future__ import annotations

from raytrain.cluster.file.spec import ClusterSpec

RAY, TORCH = "2.60.0", "2.13.0"
"""Versions that the nodes get; a test compares them with pyproject.toml and with what the tests run on."""

SOURCES = ("raytrain", "pyproject.toml", "README.md", "LICENSE")
"""What an installation from the sources needs. Not the whole directory: `ray up` reads all that it copies, to hash it."""

REMOTE = "~/raytrain-src"
VENV = "~/venv"
UV, UV_VERSION = "~/.local/bin/uv", "0.8.0"
"""Installs Python itself as well, so that it is the same on each image."""


def mounts(spec: ClusterSpec) -> dict[str, str]:
    """file_mounts: on the node, and here."""
    if spec.setup == "none":
        return {}
    here = "" if spec.project == "." else spec.project.rstrip("/") + "/"
    return {f"{REMOTE}/{name}": here + name for name in SOURCES}


def setup_commands(spec: ClusterSpec) -> list[str]:
    """Shell commands that install all in one virtual environment, and put it on the PATH of each shell."""
    if spec.setup == "none":
        return []
    return [
        f"test -x {UV} || curl -LsSf https://astral.sh/uv/{UV_VERSION}/install.sh | sh",
        f"test -d {VENV} || {UV} venv --seed --python {spec.python} {VENV}",
        f"{UV} pip install --python {VENV} 'ray[default,data,train,tune]=={RAY}' torch=={TORCH} -e {REMOTE}",
        "grep -qs venv/bin ~/.bashrc || echo 'export PATH=$HOME/venv/bin:$PATH' >> ~/.bashrc",
    ]
