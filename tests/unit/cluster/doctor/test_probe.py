"""What may hang has a limit; the modules that travel to nodes without raytrain need nothing of it but each other."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

from raytrain.cluster.doctor.examine import SENT, by_value
from raytrain.cluster.doctor.probe import Probe, within


def test_a_value_an_error_and_a_hang() -> None:
    def fail() -> None:
        raise OSError("disk is gone")

    assert within(5, lambda a: a + 1, 2) == (3, "")
    assert within(5, fail) == (None, "OSError: disk is gone")
    release = threading.Event()
    assert within(0.05, release.wait) == (None, "timed out after 0.05 s")
    release.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_expects_is_no_hang() -> None:
    def fail() -> None:
        raise KeyError("x")

    assert within(5, fail) == (None, "ended without an answer")


@pytest.mark.parametrize("module", SENT, ids=lambda module: module.__name__)
def test_what_is_sent_imports_only_what_is_sent(module: object) -> None:
    sent = {other.__name__ for other in SENT}
    body = ast.parse(Path(str(module.__dict__["__file__"])).read_text()).body
    imported = {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("raytrain")} <= sent
    heavy = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names} | imported
    assert heavy.isdisjoint({"torch", "ray", "pyarrow", "numpy"})


def test_the_probe_travels_without_a_word_of_raytrain_to_import() -> None:
    import subprocess
    import sys

    import ray

    with by_value():
        carried = ray.cloudpickle.dumps(Probe)
    code = (
        "import sys; sys.modules['raytrain'] = None; from ray import cloudpickle;"
        f"probe = cloudpickle.loads({carried!r}); print(probe.storage.__name__, probe.facts.__globals__['gather']('/', 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("storage "), done.stderr
    with pytest.raises(ValueError, match="not registered"):
        ray.cloudpickle.unregister_pickle_by_value(SENT[0])
