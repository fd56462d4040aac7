"""Lists which files of the working directory go to the cluster with a job, before anything is sent.

Ray packs the directory without what .gitignore, .rayignore and the `excludes` of the job's runtime_env name. `list_upload`
walks it with Ray's own matchers, so that the list is what Ray packs, and adds `excludes` for what no cluster needs: caches,
virtual environments, results of runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE, get_runtime_env_default_excludes
from ray._private.runtime_env import packaging

from raytrain.errors import ConfigError
from raytrain.events.messages import count_of
from raytrain.units import format_bytes

ANYWHERE = (
    *(".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints"),
    *("node_modules", ".tox", ".nox"),
)
"""Names that are excluded at any depth."""
AT_THE_TOP = ("runs", "data")
"""Folders of the working directory itself that are excluded, unless they hold Python code."""
RAYTRAIN = "raytrain"
"""The reason for these, and for virtual environments."""
LIMIT_BYTES = min(DASHBOARD_CLIENT_MAX_SIZE, packaging.GCS_STORAGE_MAX_SIZE)
"""What Ray's dashboard accepts in one request (100 MiB), or what the cluster stores (512 MiB)."""
ENTRY_BYTES = 30 + 46
"""A file's two headers in a zip file, which has its name twice besides; PKWARE's APPNOTE 4.3.7 and 4.3.12."""
DOMINANT_SHARE = 0.8

Rule = Callable[[Path], str]
"""Says who excludes a path; "" if nobody does."""


@dataclass
class Upload:
    """A working directory, divided into what is uploaded and what is not.

    Args:
        root: the directory.
        excludes: patterns for the job's runtime_env.
        files: size in bytes of what is uploaded, by path below the root.
        excluded: who excludes a path, by path below the root; it applies to everything below the path.
    """

    root: Path
    excludes: list[str]
    files: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def package_bytes(self) -> int:
        """Bytes of the zip file that Ray makes, which does not compress."""
        return sum(self.files.values()) + sum(ENTRY_BYTES + 2 * len(name.encode()) for name in self.files) + 22

    def excluded_by(self, name: str) -> str:
        """Who excludes a path; "" if nobody does."""
        path = Path(name)
        return next((self.excluded[str(part)] for part in (path, *path.parents) if str(part) in self.excluded), "")

    def summary(self) -> list[str]:
        """What is uploaded and what is not, in two lines."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_folders(self.files))
        whole = {Path(name).parts[0] for name in self.excluded} - {Path(name).parts[0] for name in self.files}
        num_inside = sum(Path(name).parts[0] not in whole for name in self.excluded)
        excluded = [*sorted(whole), *([f"{count_of(num_inside, 'path')} in other folders"] if num_inside else [])]
        total = f"{count_of(len(self.files), 'file')}, {format_bytes(sum(self.files.values()))}"
        return [f"upload: {total} from {self.root} ({parts})", f"excluded: {', '.join(excluded) or 'nothing'}"]


def list_upload(root: Path, exclude: Sequence[str] = (), include: Sequence[str] = (), use_gitignore: bool = True) -> Upload:
    """Divides a working directory.

    Args:
        root: the directory, absolute.
        exclude: further patterns, as in a .gitignore.
        include: names of folders below the root that are uploaded although raytrain would exclude them.
        use_gitignore: as Ray does unless RAY_RUNTIME_ENV_IGNORE_GITIGNORE is 1.

    Raises:
        ConfigError: the root is not a directory, or an `include` is not excluded by raytrain.
    """
    if not root.is_dir():
        raise ConfigError("--working-dir", root, "is a directory", "give the directory that holds the job's code")
    included = {name.strip("/") for name in include}
    ours = [name for name in ANYWHERE if name not in included]
    ours += [f"/{name}" for name in AT_THE_TOP if name not in included and not any((root / name).glob("*.py"))]
    upload = Upload(root, [*ours, *exclude])
    walk = _Walk(upload, included, [*([".gitignore"] if use_gitignore else []), ".rayignore"])
    patterns = {"Ray": get_runtime_env_default_excludes(), RAYTRAIN: ours, "--exclude": list(exclude)}
    walk.visit(root, [_rule_of_excludes(root, patterns)])
    for name in sorted(included - {*ANYWHERE, *AT_THE_TOP} - walk.environments):
        rule = "is a folder that raytrain excludes: " + ", ".join((*AT_THE_TOP, "a virtual environment"))
        reason = upload.excluded_by(name)
        fix = f"remove it from {reason}" if reason.startswith(".") else "omit the flag if it is uploaded anyway"
        raise ConfigError("--include", name, rule, fix)
    return upload


def _rule_of_excludes(root: Path, patterns: Mapping[str, list[str]]) -> Rule:
    """One rule for all patterns, since a later one may revoke an earlier one; the first that matches alone is named."""
    matches = packaging._get_excludes(root, [line for lines in patterns.values() for line in lines])
    matches_alone = {who: packaging._get_excludes(root, lines) for who, lines in patterns.items()}
    return lambda path: next(who for who, alone in matches_alone.items() if alone(path)) if matches(path) else ""


def _rule_of_file(folder: Path, name: str) -> Rule | None:
    matches = packaging._get_ignore_file(folder, name)
    return (lambda path: name if matches(path) else "") if matches else None


class _Walk:
    """Walks a directory as Ray does when it packs one.

    Args:
        upload: filled in.
        included: virtual environments to upload.
        ignore_files: names of the files with patterns.
    """

    def __init__(self, upload: Upload, included: set[str], ignore_files: Sequence[str]) -> None:
        self._upload, self._included, self._ignore_files = upload, included, ignore_files
        self.environments: set[str] = set()
        """The virtual environments that are uploaded."""

    def visit(self, path: Path, rules: list[Rule]) -> None:
        """Takes a file, or a folder and what is below it."""
        name = str(path.relative_to(self._upload.root))
        rules = [*rules, *self._own_rules(path)]
        reason = next(filter(None, (rule(path) for rule in rules)), "") or self._excluded_by_raytrain(path, name)
        if reason:
            self._upload.excluded[name] = reason
        elif path.is_dir():
            for child in sorted(path.iterdir()):
                self.visit(child, rules)
        elif path.is_file():
            self._upload.files[name] = path.stat().st_size

    def _own_rules(self, folder: Path) -> Iterator[Rule]:
        for name in self._ignore_files:
            if rule := _rule_of_file(folder, name):
                yield rule

    def _excluded_by_raytrain(self, path: Path, name: str) -> str:
        """Excludes virtual environments, and links to a parent folder, which have no end."""
        is_environment = (path / "pyvenv.cfg").is_file() and path != self._upload.root
        if is_environment and name in self._included:
            self.environments.add(name)
            return ""
        if not is_environment and not (path.is_symlink() and path.resolve() in path.parents):
            return ""
        self._upload.excludes.append("/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", name))
        return RAYTRAIN


def script_below(upload: Upload, script: str) -> str:
    """The script's path below the working directory.

    Args:
        upload: of `list_upload`.
        script: relative to the current directory, or to the working directory.

    Raises:
        ConfigError: it does not exist, is outside, or is not uploaded.
    """
    path = next((path for base in (Path.cwd(), upload.root) if (path := base / script).is_file()), None)
    if path is None:
        raise ConfigError("SCRIPT", script, "is a file", "give the path of the job's Python file")
    path = path.parent.resolve() / path.name
    if not path.is_relative_to(upload.root.resolve()):
        fix = "set --working-dir to a directory that holds both the script and what it imports"
        raise ConfigError("SCRIPT", script, f"lies in the working directory, {upload.root}", fix)
    name = str(path.relative_to(upload.root.resolve()))
    if reason := upload.excluded_by(name):
        raise ConfigError("SCRIPT", script, "is uploaded with the working directory", f"{reason} excludes it: change that")
    return name


def largest_folders(files: Mapping[str, int], count: int = 3) -> list[tuple[str, int]]:
    """The top folders with the most bytes, and their sizes; '.' stands for the files of the root itself.

    A folder that owes most of its bytes to one of its own folders is replaced by that.
    """
    totals: dict[Path, int] = {}
    for name, size in files.items():
        for folder in Path(name).parents:
            totals[folder] = totals.get(folder, 0) + size
    found = [(str(inner), totals[inner]) for inner in (_innermost(top, totals) for top in totals if len(top.parts) == 1)]
    loose = sum(size for name, size in files.items() if "/" not in name)
    return sorted([*found, *([(".", loose)] if loose else [])], key=lambda part: -part[1])[:count]


def _innermost(folder: Path, totals: Mapping[Path, int]) -> Path:
    inner = max((path for path in totals if path.parent == folder), key=lambda path: totals[path], default=folder)
    return folder if inner == folder or totals[inner] < DOMINANT_SHARE * totals[folder] else _innermost(inner, totals)


def check_size(upload: Upload, limit_bytes: int = LIMIT_BYTES) -> None:
    """Refuses what Ray would refuse after the upload.

    Raises:
        ConfigError: the package is too large; names the largest folders.
    """
    if upload.package_bytes < limit_bytes:
        return
    found = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_folders(upload.files))
    raise ConfigError(
        "--working-dir",
        f"{upload.root}: {format_bytes(upload.package_bytes)} in {len(upload.files):,} files ({found})",
        f"a cluster accepts less than {format_bytes(limit_bytes)} with a job",
        "exclude what is not code with --exclude or .rayignore, and keep data on storage that all nodes reach",
    )
