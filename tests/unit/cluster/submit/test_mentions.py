"""A job that names files which stay behind is warned of them: which file, which line, and who leaves it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cluster.submit.mentions import left_behind
from raytrain.cluster.submit.upload import survey
from tests.unit.cluster.submit.test_upload import plant

SCRIPT = '''"""Reads data/table.csv."""
from pathlib import Path

import torch
import readers.tables
from readers import made

HERE = Path(__file__).parent
TABLE = "data/table.csv"
OTHER = Path("data") / "more" / "x.csv"
BESIDE = HERE / "beside.bin"
LATER = "data/not-there.csv"
KEPT = "kept/small.csv"
RESULTS = "./runs"
WORD = "data"
URI = "s3://bucket/data/table.csv"
LONG = "data/" + "x" * 5
'''
TREE = {
    ".gitignore": "*.bin\n/readers/made.py\n",
    "jobs/job.py": SCRIPT,
    "jobs/beside.bin": "x",
    "readers/__init__.py": "",
    "readers/tables.py": "from . import deeper\n",
    "readers/deeper.py": 'NAME = "data/deep.bin"\n',
    "readers/made.py": "",
    "data/table.csv": "x",
    "data/more/x.csv": "x",
    "data/deep.bin": "x",
    "kept/small.csv": "x",
    "runs/digits/run.json": "{}",
    "raytrain/config.py": 'STORAGE = "data/table.csv"',
}

INCLUDE = "which is not uploaded: use --include data, or keep it where all nodes reach it"
GIT = "which .gitignore leaves out: take it out of that, or keep it where all nodes reach it"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return plant(tmp_path, TREE)


def test_what_the_script_and_its_imports_name_is_told_with_the_line(root: Path) -> None:
    assert left_behind(survey(root), "jobs/job.py", []) == [
        f"jobs/job.py line 6 imports readers/made.py, {GIT}",
        f"jobs/job.py line 9 names data/table.csv, {INCLUDE}",
        f"jobs/job.py line 10 names data/more/x.csv, {INCLUDE}",
        f"jobs/job.py line 11 names jobs/beside.bin, {GIT}",
        f"jobs/job.py line 17 names data, {INCLUDE}",
        f"readers/deeper.py line 1 names data/deep.bin, {INCLUDE}",
    ]


def test_arguments_are_looked_at_as_well(root: Path) -> None:
    arguments = ["--path", "data/table.csv", "--more=jobs/beside.bin", "--lr", "0.1", "--out", "runs/x", "kept/small.csv"]
    (root / "plain.py").touch()
    assert left_behind(survey(root), "plain.py", arguments) == [
        f"the argument data/table.csv names data/table.csv, {INCLUDE}",
        f"the argument --more=jobs/beside.bin names jobs/beside.bin, {GIT}",
    ]


def test_what_is_included_is_not_warned_of(root: Path) -> None:
    found = left_behind(survey(root, include=["data"]), "jobs/job.py", ["data/table.csv"])
    assert [line.split(",")[0] for line in found] == [
        "jobs/job.py line 6 imports readers/made.py",
        "jobs/job.py line 11 names jobs/beside.bin",
        "readers/deeper.py line 1 names data/deep.bin",
    ]


@pytest.mark.parametrize("text", ["x = (", "\0", 'a = "\udcff"'.encode("utf-8", "surrogateescape").decode("latin1")])
def test_code_that_cannot_be_read_is_left_to_the_job(root: Path, text: str) -> None:
    (root / "broken.py").write_text(text)
    assert left_behind(survey(root), "broken.py", []) == []
