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

from raytrain.cluster.submit.upload import Upload, check_size, largest_folders, list_upload, script_below
from raytrain.errors import ConfigError
from tests.golden import check

UPLOADED = {
    *("jobs/digits.py", "mine/data/table.py", "secrets/open.txt", "ä ö.txt", "notes/todo.txt"),
    *("notes/.gitignore", ".gitignore", ".rayignore"),
}
EXCLUDED = {
    "secret.txt": ".gitignore",
    "secrets/key": ".gitignore",
    "jobs/out.log": ".gitignore",
    "notes/draft/a.txt": ".gitignore",
    "big.bin": ".rayignore",
    "notes/mine.md": "--exclude",
    "data/train.csv": "raytrain",
    "runs/digits/run.json": "raytrain",
    "env [1]/lib/torch.py": "raytrain",
    "env [1]/pyvenv.cfg": "raytrain",
    ".git/HEAD": "Ray",
    "mine/node_modules/x.js": "raytrain",
    "mine/.mypy_cache/.gitignore": "raytrain",
    "jobs/__pycache__/digits.pyc": "Ray",
}
PATTERNS = {
    ".gitignore": "secret.txt\nsecrets/*\n!secrets/open.txt\n*.log\n",
    ".rayignore": "big.bin\n",
    "notes/.gitignore": "/draft/\n",
    "jobs/digits.py": "print()",
}


def plant(root: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def packed(upload: Upload, folder: Path, use_gitignore: bool = True) -> tuple[dict[str, int], int]:
    """The files in Ray's package of a job with these `excludes`, with their sizes; and the size of the package."""
    package = folder / "package.zip"

    def pack(working_dir: str, excludes: Any, is_file: bool = False) -> None:
        create_package(working_dir, package, include_gitignore=use_gitignore, excludes=excludes)

    runtime_env = {"working_dir": str(upload.root), "excludes": upload.excludes}
    upload_working_dir_if_needed(runtime_env, include_gitignore=use_gitignore, upload_fn=pack)
    with zipfile.ZipFile(package) as zipped:
        files = {info.filename: info.file_size for info in zipped.infolist() if not info.is_dir()}
    return files, package.stat().st_size


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = plant(tmp_path / "here", dict.fromkeys([*UPLOADED, *EXCLUDED], "x") | PATTERNS)
    (root / "mine/up").symlink_to(root, target_is_directory=True)
    os.symlink(root / "jobs/digits.py", root / "linked.py")
    return root


@pytest.mark.parametrize("use_gitignore", [True, False])
def test_the_list_is_what_ray_packs(root: Path, tmp_path: Path, use_gitignore: bool) -> None:
    upload = list_upload(root, exclude=["notes/*.md"], use_gitignore=use_gitignore)
    assert (upload.files, upload.package_bytes) == packed(upload, tmp_path, use_gitignore)
    by_git = {name for name, who in EXCLUDED.items() if who == ".gitignore"}
    assert upload.files.keys() == {*UPLOADED, "linked.py", *(() if use_gitignore else by_git)}
    if use_gitignore:
        assert {name: upload.excluded_by(name) for name in EXCLUDED} == EXCLUDED
    assert upload.excluded_by("jobs/digits.py") == ""


@pytest.mark.parametrize(
    "flags", [{"include": ["data", "env [1]/"]}, {"include": ["env [1]"], "exclude": ["!data", "!data/*"]}]
)
def test_folders_that_raytrain_excludes_can_be_included(root: Path, tmp_path: Path, flags: dict[str, list[str]]) -> None:
    (root / "pyvenv.cfg").touch()  # the working directory itself is never excluded
    upload = list_upload(root, **flags)
    assert upload.files == packed(upload, tmp_path)[0]
    assert {"data/train.csv", "env [1]/lib/torch.py"} <= upload.files.keys()


@pytest.mark.parametrize(("name", "fix"), [("secrets/key", "remove it from .gitignore"), ("jobs", "omit the flag")])
def test_what_raytrain_does_not_exclude_cannot_be_included(root: Path, name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        list_upload(root, include=[name])
    assert caught.value.fix.startswith(fix)


def test_a_folder_named_data_that_holds_code_is_uploaded(root: Path) -> None:
    (root / "data/__init__.py").touch()
    assert "data/__init__.py" in list_upload(root).files


NAMES = st.sampled_from(["a", "b", "data", "runs", "x.py", "x.log", "__pycache__", "a b"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
LINES = st.lists(
    st.sampled_from(
        [
            *("a", "/a", "a/", "*.log", "!x.log", "a/*", "**/b", "b/**", "*", "!a/b", "# a", "a/b", "[ab]", "", "!data"),
            "!runs/*",
        ]
    ),
    max_size=3,
)
IGNORES = st.dictionaries(
    st.sampled_from([f"{folder}{name}" for folder in ("", "a/", "b/", "a/b/") for name in (".gitignore", ".rayignore")]),
    LINES.map("\n".join),
    max_size=4,
)


@given(st.lists(PATHS, min_size=1, max_size=6), IGNORES, LINES, st.booleans(), st.booleans())
def test_any_tree_is_listed_as_ray_packs_it(
    paths: list[str], ignores: dict[str, str], exclude: list[str], has_environment: bool, use_gitignore: bool
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        for path, text in {
            **dict.fromkeys(paths, "x"),
            **ignores,
            **({"a/pyvenv.cfg": ""} if has_environment else {}),
        }.items():
            try:
                plant(root, {path: text})
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a file is where a folder would be
        upload = list_upload(root, exclude, use_gitignore=use_gitignore)
        assert upload.files == packed(upload, Path(folder), use_gitignore)[0]


def test_patterns_mean_what_they_mean_to_ray(tmp_path: Path) -> None:
    """A folder is allowed, but none of its files; later versions of pathspec than Ray's copy read it otherwise."""
    root = plant(tmp_path / "root", {".gitignore": "[a-z]*\n!src\n", "src/a.py": "", "c.py": ""})
    upload = list_upload(root)
    assert upload.files.keys() == packed(upload, tmp_path)[0].keys() == {".gitignore"}


def test_the_largest_folders_are_named_where_the_bytes_are() -> None:
    files = {"a/b/c/big": 900, "a/small": 10, "d/x": 30, "d/e/y": 40, "readme": 50, "f/z": 1}
    assert largest_folders(files) == [("a/b/c", 900), ("d", 70), (".", 50)]


def test_a_package_that_ray_would_refuse_is_refused() -> None:
    files = {"jobs/old/weights.bin": 150 * 2**20, "jobs/digits.py": 2000, "web/photo.png": 3 * 2**20}
    with pytest.raises(ConfigError) as caught:
        check_size(Upload(Path("/home/me/project"), [], files))
    check("errors/submit_too_large.txt", f"{caught.value}\n")
    upload = Upload(Path("/x"), [], {"a": 100})
    check_size(upload, upload.package_bytes + 1)
    with pytest.raises(ConfigError, match="1 files"):
        check_size(upload, upload.package_bytes)


def test_the_summary_names_what_is_uploaded_and_what_is_not(root: Path) -> None:
    first, second = list_upload(root).summary()
    assert first.startswith(f"upload: 10 files, 80 B from {root} (")
    assert second == "excluded: .git, big.bin, data, env [1], runs, secret.txt, 7 paths in other folders"


@pytest.mark.parametrize(("here", "script"), [("", "jobs/digits.py"), ("jobs", "digits.py"), ("..", "jobs/digits.py")])
def test_the_script_is_found_from_here_or_the_working_directory(
    root: Path, here: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root / here)
    assert script_below(list_upload(root), script) == "jobs/digits.py"
    assert script_below(list_upload(root), str(root / "jobs/digits.py")) == "jobs/digits.py"


@pytest.mark.parametrize(
    ("script", "rule"),
    [("nope.py", "is a file"), ("../outside.py", "lies in the working directory"), ("secrets/job.py", "is uploaded")],
)
def test_a_script_that_is_not_uploaded_is_refused(
    root: Path, script: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    plant(root, {"../outside.py": "", "secrets/job.py": ""})
    with pytest.raises(ConfigError, match=rule) as caught:
        script_below(list_upload(root), script)
    assert caught.value.where == "SCRIPT"
    with pytest.raises(ConfigError, match="is a directory"):
        list_upload(root / "nope")
