"""The floors of the house, as tests: what may import what, and what importing costs.

A module imports from lower floors or from its own package; the façade `raytrain/__init__.py` stands above all.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytrain

PACKAGE = Path(raytrain.__file__).parent
FLOORS = {
    **dict.fromkeys(["errors", "units", "version"], 0),
    **dict.fromkeys(["config", "sweep_config", "task", "rundir"], 1),
    **dict.fromkeys(["plan", "events"], 2),
    **dict.fromkeys(["rendezvous"], 3),
    **dict.fromkeys(["data", "checkpoint"], 4),
    **dict.fromkeys(["worker", "elastic"], 5),
    **dict.fromkeys(["launch", "cluster", "console", "report"], 6),
    **dict.fromkeys(["tune"], 7),
    **dict.fromkeys(["cli"], 8),
    **dict.fromkeys(["__main__"], 9),
}
NEIGHBOURS = {("task", "config"), ("sweep_config", "config")}
"""Files on one floor where one may import the other."""

BROAD_EXCEPTS = {"worker/hooks.py": 1, "worker/telemetry.py": 1}
"""How many handlers of `Exception` or wider there are, and where: around the user's code, and around telemetry."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(module: str) -> str:
    """'raytrain.data.batch' -> 'data'."""
    return module.split(".")[1]


def imports(path: Path) -> Iterator[str]:
    """All that a file imports, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_house_has_modules_and_each_has_a_floor() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert {"worker", "cli", "errors"} <= parts
    assert parts <= FLOORS.keys()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_and_siblings_do_not_import_each_other(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wrong = []
    for name in imports(path):
        if name == "raytrain" or not name.startswith("raytrain."):
            assert name != "raytrain", "the façade is for users"
            continue
        there = part_of(name)
        if here != there and FLOORS[there] >= FLOORS[here] and (here, there) not in NEIGHBOURS:
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_one_module_knows_the_inside_of_ray_train(path: Path) -> None:
    inside = [name for name in imports(path) if name.startswith("ray.train.v2._internal")]
    assert not inside or name_of(path) == "elastic/internals.py"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_viewers_import_neither_torch_nor_ray(path: Path) -> None:
    if part_of(f"raytrain.{name_of(path).replace('/', '.')}") in ("console", "report", "events", "plan"):
        assert [name for name in imports(path) if name.split(".")[0] in ("torch", "ray")] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_broken_invariant_raises_instead_of_asserting(path: Path) -> None:
    assert [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)] == []


def test_broad_excepts_are_few_and_known() -> None:
    found: dict[str, int] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                found[name_of(path)] = found.get(name_of(path), 0) + 1
    assert found == BROAD_EXCEPTS


def _is_broad(kind: ast.expr | None) -> bool:
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(name is None or (isinstance(name, ast.Name) and name.id in ("Exception", "BaseException")) for name in names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def loaded_by(statement: str) -> list[str]:
    """Which of the heavy packages a fresh interpreter has after a statement."""
    code = f"import sys; {statement}; print(*[name for name in ('torch', 'ray') if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import raytrain",
        "import raytrain; raytrain.Task, raytrain.RunConfig, raytrain.main",
        "import raytrain.cli.app, raytrain.cli.job",
        "import raytrain.console.viewer, raytrain.console.demo",
        "import raytrain.report.audit",
        "import raytrain.launch.stopping",
        "import raytrain.tune.space",
    ],
)
def test_what_must_be_quick_loads_neither_torch_nor_ray(statement: str) -> None:
    assert loaded_by(statement) == []


def test_the_check_for_heavy_packages_can_fail() -> None:
    assert "torch" in loaded_by("import torch")


def test_every_public_name_is_there() -> None:
    assert set(raytrain.__all__) >= {"Task", "RunConfig", "Trainer", "Result", "Loss", "main", "arrays", "parquet"}
    for name in raytrain.__all__:
        assert getattr(raytrain, name).__module__.startswith("raytrain.")
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        raytrain.trainer  # noqa: B018


def test_the_version_is_the_one_that_is_installed() -> None:
    assert raytrain.__version__ == importlib.metadata.version("raytrain")
