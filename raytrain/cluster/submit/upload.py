"""What goes to the cluster with a job's working directory, and what stays? Listed before anything is sent.

Ray packs the directory but for what .gitignore, .rayignore and the `excludes` of the job's runtime_env name. `survey` walks
it by the same rules, and chooses `excludes` for what no cluster needs: caches, virtual environments, results of runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE
from ray._private.thirdparty.pathspec import PathSpec

from raytrain.errors import ConfigError
from raytrain.events.words import count_of
from raytrain.units import format_bytes

ANYWHERE = (
    *(".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints"),
    *("node_modules", ".tox", ".nox"),
)
"""Names that are left out wherever they are."""
OURS = "raytrain"
"""The reason for these, and for virtual environments."""
RUNS = "runs"
AT_THE_TOP = (RUNS, "data")
"""Folders of the working directory itself that are left out, unless they hold Python code."""
LIMIT_BYTES = min(DASHBOARD_CLIENT_MAX_SIZE, GCS_STORAGE_MAX_SIZE)
"""What Ray's dashboard takes in one request (100 MiB), and what the cluster keeps (512 MiB); the smaller one counts."""
ENTRY_BYTES = 30 + 46
"""A file's two headers in a zip file, which has its name twice besides; PKWARE's APPNOTE 4.3.7 and 4.3.12."""
MOST_OF_IT = 0.8


class Rule:
    """Patterns as in a .gitignore, where a later one may take back what an earlier one leaves out.

    Args:
        base: directory where the paths begin that they are about.
        patterns: in their order, by who gives them.
    """

    def __init__(self, base: Path, patterns: Mapping[str, Sequence[str]]) -> None:
        self._base = base
        self._all = _spec([line for lines in patterns.values() for line in lines])
        self._parts = {who: _spec(lines) for who, lines in patterns.items()}

    def who_leaves_out(self, path: Path) -> str:
        """Empty if nobody does."""
        name = str(path.relative_to(self._base))
        if not self._all.match_file(name):
            return ""
        return next(who for who, spec in self._parts.items() if spec.match_file(name))


def _spec(lines: Sequence[str]) -> Any:
    return PathSpec.from_lines("gitwildmatch", lines)


@dataclass
class Upload:
    """A working directory, divided.

    Args:
        root: the directory.
        excludes: patterns for the job's runtime_env.
        files: bytes of what is uploaded, by path below the root.
        left_out: who leaves out what stays, by path below the root; what is below such a folder stays as well.
    """

    root: Path
    excludes: list[str]
    files: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def package_bytes(self) -> int:
        """Bytes of the zip file that Ray makes, which does not compress."""
        return sum(self.files.values()) + sum(ENTRY_BYTES + 2 * len(name.encode()) for name in self.files) + 22

    def why_not(self, name: str) -> str:
        """Who leaves a path out; empty if nobody does."""
        path = Path(name)
        return next((self.left_out[str(part)] for part in (path, *path.parents) if str(part) in self.left_out), "")

    def summary(self) -> list[str]:
        """What is uploaded and what is not, in two lines."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest(self.files))
        stay = {Path(name).parts[0] for name in self.left_out} - {Path(name).parts[0] for name in self.files}
        inside = sum(Path(name).parts[0] not in stay for name in self.left_out)
        left = [*sorted(stay), *([f"{count_of(inside, 'path')} inside of others"] if inside else [])]
        total = f"{count_of(len(self.files), 'file')}, {format_bytes(sum(self.files.values()))}"
        return [f"upload: {total} from {self.root} ({parts})", f"left out: {', '.join(left) or 'nothing'}"]


def survey(root: Path, exclude: Sequence[str] = (), include: Sequence[str] = (), honours_gitignore: bool = True) -> Upload:
    """Divides a working directory.

    Args:
        root: the directory, absolute.
        exclude: further patterns, as in a .gitignore.
        include: names of folders, below the root, that are uploaded although they would be left out here.
        honours_gitignore: as Ray does unless RAY_RUNTIME_ENV_IGNORE_GITIGNORE is 1.

    Raises:
        ConfigError: the root is no directory, or an `include` is not left out here.
    """
    if not root.is_dir():
        raise ConfigError("--working-dir", root, "is a directory", "give the one that holds the job's code")
    wanted = {name.strip("/") for name in include}
    ours = [name for name in ANYWHERE if name not in wanted]
    ours += [f"/{name}" for name in AT_THE_TOP if name not in wanted and not _is_code(root / name)]
    upload = Upload(root, [*ours, *exclude])
    walk = _Walk(upload, wanted, ".gitignore" if honours_gitignore else "")
    walk.down(root, [Rule(root, {"Ray": get_runtime_env_default_excludes(), OURS: ours, "--exclude": exclude})])
    for name in sorted(wanted - {*ANYWHERE, *AT_THE_TOP} - walk.reprieved):
        raise _not_ours(name, upload.why_not(name))
    return upload


def _not_ours(name: str, reason: str) -> ConfigError:
    rule = "is a folder that raytrain would leave out: " + ", ".join((*AT_THE_TOP, "a virtual environment"))
    fix = f"take it out of {reason}" if reason.startswith(".") else "leave the flag out, if it is uploaded anyway"
    return ConfigError("--include", name, rule, fix)


def script_below(upload: Upload, script: str) -> str:
    """The script's path below the working directory.

    Args:
        upload: of `survey`.
        script: as it was given: relative to where one is, or to the working directory.

    Raises:
        ConfigError: it does not exist, is outside, or is left out of the upload.
    """
    path = next((path for base in (Path.cwd(), upload.root) if (path := base / script).is_file()), None)
    if path is None:
        raise ConfigError("SCRIPT", script, "is a file", "give the path of the job's Python file")
    path = path.parent.resolve() / path.name
    if not path.is_relative_to(upload.root.resolve()):
        fix = "set --working-dir to a directory that holds both the script and what it imports"
        raise ConfigError("SCRIPT", script, f"lies in the working directory, {upload.root}", fix)
    name = str(path.relative_to(upload.root.resolve()))
    if reason := upload.why_not(name):
        raise ConfigError(
            "SCRIPT", script, "is uploaded with the working directory", f"it is left out by {reason}: change that"
        )
    return name


class _Walk:
    """Walks a directory as Ray does when it packs one.

    Args:
        upload: filled in.
        wanted: virtual environments that are uploaded nevertheless.
        gitignore: name of the files that git reads; empty if they do not count.
    """

    def __init__(self, upload: Upload, wanted: set[str], gitignore: str) -> None:
        self._upload, self._wanted, self._gitignore = upload, wanted, gitignore
        self.reprieved: set[str] = set()

    def down(self, path: Path, rules: list[Rule]) -> None:
        """Takes a file, or a folder and what is below it."""
        name = str(path.relative_to(self._upload.root))
        rules = [*rules, *self._own_rules(path)]
        reason = next(filter(None, (rule.who_leaves_out(path) for rule in rules)), "") or self._reason_of_ours(path, name)
        if reason:
            self._upload.left_out[name] = reason
        elif path.is_dir():
            for child in sorted(path.iterdir()):
                self.down(child, rules)
        elif path.is_file():
            self._upload.files[name] = path.stat().st_size

    def _own_rules(self, path: Path) -> Iterator[Rule]:
        for name in filter(None, (self._gitignore, ".rayignore")):
            if (path / name).is_file():
                yield Rule(path, {name: (path / name).read_text().splitlines()})

    def _reason_of_ours(self, path: Path, name: str) -> str:
        """Leaves out virtual environments, and links to a folder above, which have no end."""
        is_environment = (path / "pyvenv.cfg").is_file() and path != self._upload.root
        is_endless = path.is_symlink() and path.resolve() in path.parents
        if is_environment and name in self._wanted:
            self.reprieved.add(name)
            return ""
        if not is_environment and not is_endless:
            return ""
        self._upload.excludes.append("/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", name))
        return OURS


def _is_code(folder: Path) -> bool:
    return any(folder.glob("*.py"))


def largest(files: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The folders with the most bytes in them, and how many; '.' holds the files of the root itself.

    A folder that owes most of its bytes to one of its own folders gives way to that.
    """
    totals: dict[Path, int] = {}
    for name, size in files.items():
        for folder in Path(name).parents:
            totals[folder] = totals.get(folder, 0) + size
    tops = {folder: size for folder, size in totals.items() if len(folder.parts) == 1}
    loose = sum(size for name, size in files.items() if "/" not in name)
    found = [(str(inner), totals[inner]) for inner in (_innermost(folder, totals) for folder in tops)]
    return sorted([*found, *([(".", loose)] if loose else [])], key=lambda part: -part[1])[:count]


def _innermost(folder: Path, totals: Mapping[Path, int]) -> Path:
    below = [inner for inner in totals if inner.parent == folder and inner != folder]
    heaviest = max(below, key=lambda inner: totals[inner], default=folder)
    if heaviest == folder or totals[heaviest] < MOST_OF_IT * totals[folder]:
        return folder
    return _innermost(heaviest, totals)


def check_size(upload: Upload, limit_bytes: int = LIMIT_BYTES) -> None:
    """Refuses what Ray would refuse after the upload.

    Raises:
        ConfigError: the package is too large; the largest folders are named.
    """
    if upload.package_bytes < limit_bytes:
        return
    found = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest(upload.files))
    raise ConfigError(
        "--working-dir",
        f"{upload.root}: {format_bytes(upload.package_bytes)} in {len(upload.files):,} files ({found})",
        f"a cluster takes less than {format_bytes(limit_bytes)} with a job",
        "name what is not code with --exclude or in .rayignore, and keep data on storage that all nodes reach",
    )
