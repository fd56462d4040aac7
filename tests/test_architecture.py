"""The floors of the house, as tests: what may import what, what importing costs, and how large a file may be.

A module imports from lower floors or from its own package; the façade `raytrain/__init__.py` stands above all.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import raytrain

PACKAGE = Path(raytrain.__file__).parent
FLOORS = {
    **dict.fromkeys(["errors", "timeout", "units", "version"], 0),
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
VIEWERS = ("console", "report", "events", "plan")
"""Parts that import neither torch nor Ray."""
BROAD_EXCEPTS = {"worker/hooks.py": 1}
"""How many handlers of `Exception` or wider there are, and where: around the user's code."""
MAX_LINES = 400
DOORS = {"__init__.py"}, {"data/__init__.py"}
"""What users import from."""

IMPORTED_ONCE: dict[str, str] = {
    **dict.fromkeys(["cli/app.py", "cli/chaos.py", "cli/cluster.py", "cli/doctor.py", "cli/submit.py"], "a command each"),
    "cluster/doctor/examine.py": "the driver's side of the doctor; the command is its only user",
    "cluster/doctor/probe.py": "travels by value to nodes where raytrain is missing, so it imports nothing of it",
    "cluster/doctor/table.py": "how the report looks, without Ray",
    "cluster/fault_injection.py": "acts on processes and nodes; `chaos` decides and is pure",
    "cluster/file/checks.py": "our own rules for a cluster file",
    "cluster/file/ray_up_checks.py": "rules of `ray up` on nodes and commands, beside those for KubeRay in `checks`",
    "cluster/file/render.py": "writes cluster files; the rest of the package reads them",
    "cluster/submit/follow.py": "what happens after a job was submitted",
    "cluster/submit/upload.py": "what Ray will upload, without a cluster",
    "console/live.py": "a view each: on a terminal,",
    "console/plain.py": "in lines of text,",
    "console/table.py": "and the sweep's table, of pure values",
    "console/viewer.py": "chooses among the views; the commands know no other",
    "data/image_files.py": "which files and labels there are, without Pillow",
    "data/ray_reader.py": "imports Ray Data; direct reading works without",
    "elastic/restart.py": "restart mode: decides; `attempt` acts",
    "elastic/trainer.py": "in-place elasticity: imports the internals of Ray Train, so only once it is chosen",
    "elastic/worker.py": "one worker,",
    "elastic/worker_group.py": "and the group of them, as Ray Train's controller sees them",
    "launch/asked_columns.py": "reads the hooks' text",
    "worker/optimizers.py": "several optimizers as one, which the state need not know",
    "launch/elasticity.py": "chooses between the two kinds of elasticity",
    "launch/resume.py": "a part of the driver's story: does the run begin or go on?",
    "report/audit.py": "a proof each, without torch and Ray: rows,",
    "report/comparison.py": "and two runs",
    "worker/connections.py": "sockets of the operating system; `group` knows what they are for",
    "worker/entry.py": "connects the loop to Ray; tests run the loop without it",
    "worker/loop.py": "the story; everything below it is a chapter:",
    "worker/boundary.py": "what is due between steps,",
    "worker/handover.py": "how newcomers come to have the state,",
    "worker/evaluation.py": "evaluation,",
    "worker/step.py": "one step,",
    "worker/reducers.py": "and how gradients and buffers are reduced in it",
}
"""Files that only one other product file imports, besides the façade, each with the reason why it is a file of its own."""


@dataclass(frozen=True)
class Module:
    """A file of the product, parsed once."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def part(self) -> str:
        return self.name.split("/")[0].removesuffix(".py")

    @cached_property
    def imports(self) -> list[str]:
        """All that it imports, also inside functions and for type checking."""
        found = [alias.name for node in self.nodes if isinstance(node, ast.Import) for alias in node.names]
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                found += [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
        return found


MODULES = [Module(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
INSIDE = [module for module in MODULES if module.name != "__init__.py"]
"""All but the façade."""


def test_imports_point_down_and_siblings_do_not_import_each_other() -> None:
    assert {"worker", "cli", "errors"} <= {module.part for module in INSIDE} <= FLOORS.keys()
    wrong = [
        f"{module.name} imports {name}"
        for module in INSIDE
        for name in module.imports
        if name == "raytrain" or name.startswith(".") or (name.startswith("raytrain.") and not may_import(module, name))
    ]
    assert wrong == []


def may_import(module: Module, name: str) -> bool:
    here, there = module.part, name.split(".")[1]
    return here == there or FLOORS[there] < FLOORS[here] or (here, there) in NEIGHBOURS


def test_one_module_knows_ray_trains_inside_and_viewers_neither_torch_nor_ray() -> None:
    inside = {m.name for m in INSIDE if any(name.startswith("ray.train.v2._internal") for name in m.imports)}
    assert inside == {"elastic/internals.py"}
    heavy = [m.name for m in INSIDE if m.part in VIEWERS and {name.split(".")[0] for name in m.imports} & {"torch", "ray"}]
    assert heavy == []


def test_invariants_raise_and_broad_excepts_are_few_and_known() -> None:
    asserts = [f"{m.name}:{node.lineno}" for m in INSIDE for node in m.nodes if isinstance(node, ast.Assert)]
    assert asserts == []
    broad = {m.name: sum(isinstance(n, ast.ExceptHandler) and is_broad(n.type) for n in m.nodes) for m in INSIDE}
    assert {name: count for name, count in broad.items() if count} == BROAD_EXCEPTS


def is_broad(kind: ast.expr | None) -> bool:
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(name is None or (isinstance(name, ast.Name) and name.id in ("Exception", "BaseException")) for name in names)


def test_every_module_says_what_it_is_for_and_has_a_size_that_one_reads() -> None:
    assert [m.name for m in INSIDE if not ast.get_docstring(m.tree)] == []
    too_long = {m.name: lines for m in MODULES if (lines := len(m.text.splitlines())) > MAX_LINES}
    assert too_long == {}


def test_a_file_that_one_other_file_imports_has_a_reason() -> None:
    files = {f"raytrain.{m.name.removesuffix('.py').replace('/', '.')}": m.name for m in INSIDE if "__init__" not in m.name}
    importers = defaultdict(set)
    for module in MODULES:
        for name in module.imports:
            for imported in (name, name.rpartition(".")[0]):
                if imported in files and files[imported] != module.name:
                    importers[files[imported]].add(module.name)
    found = {name: next(iter(by)) for name, by in importers.items() if len(by) == 1 and by not in DOORS}
    missing = [f"{name}: by {by}" for name, by in sorted(found.items()) if name not in IMPORTED_ONCE]
    assert not missing, "imported once; merge, or give a reason in IMPORTED_ONCE:\n" + "\n".join(missing)
    assert sorted(IMPORTED_ONCE.keys() - found.keys()) == [], "these have more importers by now, or are gone"


def loaded_by(statement: str) -> list[str]:
    """Which of the heavy packages a fresh interpreter has after a statement."""
    code = f"import sys; {statement}; print(*[name for name in ('torch', 'ray') if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_what_must_be_quick_loads_neither_torch_nor_ray() -> None:
    modules = ["cli.app", "cli.job", "console.viewer", "console.live", "report.audit", "tune.space"]
    public = "import raytrain; raytrain.Task, raytrain.RunConfig, raytrain.main"
    assert loaded_by("; ".join([public, *(f"import raytrain.{name}" for name in modules)])) == []
    assert loaded_by("import torch") == ["torch"], "the check can fail"


def test_every_public_name_is_there() -> None:
    assert set(raytrain.__all__) >= {"Task", "RunConfig", "Trainer", "Result", "Loss", "main", "arrays", "parquet"}
    for name in raytrain.__all__:
        assert getattr(raytrain, name).__module__.startswith("raytrain.")
    with pytest.raises(AttributeError, match="no attribute 'trainer'"):
        raytrain.trainer  # noqa: B018


def test_each_row_of_what_people_bring_names_tests_that_exist() -> None:
    text = (PACKAGE.parent / "jobs" / "README.md").read_text().partition("## What people bring")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "shown by" not in line]
    assert len(rows) > 40
    shown = {name for row in rows for name in row[-1].split(", ")}
    assert [name for name in sorted(shown) if not (PACKAGE.parent / "tests" / name).is_file()] == []


def test_the_version_is_the_one_that_is_installed() -> None:
    assert raytrain.__version__ == importlib.metadata.version("raytrain")
