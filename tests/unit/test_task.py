"""The code of a task travels to workers that do not have its file."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from ray import cloudpickle

from raytrain.task import Task, pickle_by_value

SOURCE = """
import raytrain
SIZE = 7
class Mine(raytrain.Task):
    hidden: int = SIZE
    def data(self):
        return {"train": SIZE}
def make(**fields):
    return Mine(**fields)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "my_task.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("my_task")


@pytest.mark.parametrize("name", ["Mine", "make"])
def test_a_task_is_unpickled_where_its_file_is_missing(name: str, module: object, tmp_path: Path) -> None:
    pickle_by_value(getattr(module, name))
    (tmp_path / "pickled").write_bytes(cloudpickle.dumps(getattr(module, name)(hidden=3)))
    code = f"import pickle; task = pickle.load(open({str(tmp_path / 'pickled')!r}, 'rb')); print(task.hidden, task.data())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "3 {'train': 7}\n", done.stderr


@pytest.mark.parametrize("installed", [Task, Task.model_dump, numpy.mean, subprocess.run, "__main__"])
def test_installed_code_is_not_sent(installed: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudpickle, "register_pickle_by_value", lambda module: pytest.fail(f"{module} is sent"))
    if installed == "__main__":
        installed = type("Mine", (), {"__module__": "__main__"})
    pickle_by_value(installed)
