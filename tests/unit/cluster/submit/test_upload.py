"""What is listed as the upload is what Ray packs: file by file, byte by byte."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.runtime_env.packaging import create_package
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

from raytrain.cluster.submit.upload import Upload, check_size, largest, script_below, survey
from raytrain.errors import ConfigError
from tests.golden import check

TREE = {
    "jobs/digits.py": "print()",
    "jobs/__pycache__/digits.pyc": "x",
    "mine/data/table.py": "a package of the user, not data",
    "mine/node_modules/x.js": "x",
    "mine/.mypy_cache/.gitignore": "*",
    "data/train.csv": "1,2",
    "runs/digits/run.json": "{}",
    "env [1]/pyvenv.cfg": "home = /usr",
    "env [1]/lib/torch.py": "x" * 1000,
    ".git/HEAD": "x",
    "notes/todo.txt": "x",
    "notes/.gitignore": "/draft/\n",
    "notes/draft/a.txt": "x",
    "secret.txt": "x",
    "secrets/key": "x",
    "secrets/open.txt": "x",
    ".gitignore": "secret.txt\nsecrets/*\n!secrets/open.txt\n*.log\n",
    ".rayignore": "big.bin\n",
    "big.bin": "x",
    "jobs/out.log": "x",
    "ä ö.txt": "x",
}


def plant(root: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def packed(upload: Upload, folder: Path, honours_gitignore: bool = True) -> tuple[dict[str, int], int]:
    """What Ray puts into the package of a job that has the `excludes`: files with their bytes, and the package's bytes."""
    package = folder / "package.zip"

    def pack(working_dir: str, excludes: Any, is_file: bool = False) -> None:
        create_package(working_dir, package, include_gitignore=honours_gitignore, excludes=excludes)

    runtime_env = {"working_dir": str(upload.root), "excludes": upload.excludes}
    upload_working_dir_if_needed(runtime_env, include_gitignore=honours_gitignore, upload_fn=pack)
    with zipfile.ZipFile(package) as zipped:
        files = {info.filename: info.file_size for info in zipped.infolist() if not info.is_dir()}
    return files, package.stat().st_size


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    root = plant(tmp_path / "here", TREE)
    (root / "mine/up").symlink_to(root, target_is_directory=True)
    return root


@pytest.mark.parametrize("honours_gitignore", [True, False])
def test_what_is_listed_is_what_ray_packs(root: Path, tmp_path: Path, honours_gitignore: bool) -> None:
    upload = survey(root, exclude=["notes/*.txt"], honours_gitignore=honours_gitignore)
    files, package_bytes = packed(upload, tmp_path, honours_gitignore)
    assert upload.files == files
    assert upload.package_bytes == package_bytes
    always = {"jobs/digits.py", "mine/data/table.py", "secrets/open.txt", "ä ö.txt"}
    assert always <= files.keys()
    left = ("data", "runs", "env [1]", ".git", "node_modules", "up", "big.bin", "todo.txt")
    assert not [name for name in files if {*Path(name).parts} & {*left} and name not in always]
    assert ("secret.txt" in files, "notes/draft/a.txt" in files) == (not honours_gitignore, not honours_gitignore)


def test_who_leaves_out_what(root: Path) -> None:
    upload = survey(root, exclude=["todo.txt"])
    by = {
        "secret.txt": ".gitignore",
        "notes/draft/a.txt": ".gitignore",
        "big.bin": ".rayignore",
        "notes/todo.txt": "--exclude",
        "data/train.csv": "raytrain",
        "env [1]/lib/torch.py": "raytrain",
        "jobs/__pycache__/digits.pyc": "Ray",
        "jobs/digits.py": "",
    }
    assert {name: upload.why_not(name) for name in by} == by


def test_what_would_be_left_out_here_can_be_included(root: Path, tmp_path: Path) -> None:
    upload = survey(root, include=["data", "env [1]/"])
    files, _ = packed(upload, tmp_path)
    assert upload.files == files
    assert {"data/train.csv", "env [1]/lib/torch.py"} <= files.keys()


@pytest.mark.parametrize(("name", "fix"), [("secrets/key", "take it out of .gitignore"), ("jobs", "leave the flag out")])
def test_what_others_leave_out_cannot_be_included(root: Path, name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        survey(root, include=[name])
    assert caught.value.fix.startswith(fix)


def test_a_folder_named_data_that_holds_code_is_uploaded(root: Path) -> None:
    (root / "data/__init__.py").touch()
    assert "data/__init__.py" in survey(root).files


NAMES = st.sampled_from(["a", "b", "data", "runs", "x.py", "x.log", "__pycache__", "a b"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PATTERNS = st.sampled_from(
    ["a", "/a", "a/", "*.log", "!x.log", "a/*", "**/b", "b/**", "*", "!a/b", "# a", "a/b", "[ab]", "", "!data", "!runs/*"]
)
IGNORES = st.dictionaries(st.sampled_from(["", "a/", "b/", "a/b/"]), st.lists(PATTERNS, max_size=3), max_size=2)


@given(
    st.lists(PATHS, min_size=1, max_size=6), IGNORES, IGNORES, st.lists(PATTERNS, max_size=2), st.booleans(), st.booleans()
)
def test_any_tree_is_listed_as_ray_packs_it(
    paths: list[str], git: Any, ray: Any, exclude: list[str], has_environment: bool, honours: bool
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        ignores = {
            f"{at}{name}": "\n".join(lines)
            for name, all_ in ((".gitignore", git), (".rayignore", ray))
            for at, lines in all_.items()
        }
        for path, text in [
            *((path, path) for path in paths),
            *ignores.items(),
            *([("a/pyvenv.cfg", "")] if has_environment else []),
        ]:
            try:
                plant(root, {path: text})
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a file is where a folder would be
        upload = survey(root, exclude, honours_gitignore=honours)
        assert upload.files == packed(upload, Path(folder), honours)[0]


def test_the_largest_folders_are_named_where_the_bytes_are() -> None:
    files = {"a/b/c/big": 900, "a/small": 10, "d/x": 30, "d/e/y": 40, "readme": 50, "f/z": 1}
    assert largest(files) == [("a/b/c", 900), ("d", 70), (".", 50)]


def test_a_package_that_ray_would_refuse_is_refused_and_names_the_largest_folders() -> None:
    files = {"jobs/old/weights.bin": 150 * 2**20, "jobs/digits.py": 2000, "web/photo.png": 3 * 2**20}
    with pytest.raises(ConfigError) as caught:
        check_size(Upload(Path("/home/me/project"), [], files))
    check("errors/submit_too_large.txt", f"{caught.value}\n")


def test_the_limit_is_that_of_the_dashboard_and_counts_the_whole_package() -> None:
    upload = Upload(Path("/x"), [], {"a": 100})
    check_size(upload, upload.package_bytes + 1)
    with pytest.raises(ConfigError, match="1 files"):
        check_size(upload, upload.package_bytes)


def test_the_summary_names_what_is_large_and_what_stays(root: Path) -> None:
    first, second = survey(root).summary()
    assert first.startswith("upload: 8 files, ")
    assert f" from {root} (" in first
    assert second == "left out: .git, big.bin, data, env [1], runs, secret.txt, 7 paths inside of others"


def test_a_working_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        survey(tmp_path / "nope")


def test_the_script_is_found_from_where_one_is_and_from_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = survey(root)
    for here, script in ((root, "jobs/digits.py"), (root / "jobs", "digits.py"), (root.parent, "jobs/digits.py")):
        monkeypatch.chdir(here)
        assert script_below(upload, script) == "jobs/digits.py"
    assert script_below(upload, str(root / "jobs/digits.py")) == "jobs/digits.py"


@pytest.mark.parametrize(
    ("script", "rule"),
    [("nope.py", "is a file"), ("../outside.py", "lies in the working directory"), ("data/prepare.py", "is uploaded")],
)
def test_a_script_that_will_not_be_there_is_refused(
    root: Path, script: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    plant(
        root,
        {"../outside.py": "", "data/prepare.py": ""}
        if script != "data/prepare.py"
        else {".gitignore": "data/\n", script: ""},
    )
    upload = survey(root)
    with pytest.raises(ConfigError, match=rule) as caught:
        script_below(upload, script)
    assert caught.value.where == "SCRIPT"


def test_symbolic_links_to_files_are_packed_as_ray_does(root: Path, tmp_path: Path) -> None:
    os.symlink(root / "jobs/digits.py", root / "linked.py")
    upload = survey(root)
    assert upload.files == packed(upload, tmp_path)[0]
    assert upload.files["linked.py"] == 7
