"""The files by which nodes find out whether they share the storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cluster.doctor import files


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_written_is_read_and_nothing_is_left(scheme: str, tmp_path: Path) -> None:
    directory = f"{scheme}{tmp_path}/runs/.probe"
    assert files.make(directory), "runs is new"
    files.write(directory, "driver")
    files.read(directory, "driver")
    files.remove(directory, with_parent=True)
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_was_there_or_is_used_meanwhile_stays(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    directory = f"{tmp_path}/runs/.probe"
    is_new = files.make(directory)
    assert not is_new
    files.remove(directory, is_new)
    assert (tmp_path / "runs").exists()
    files.make(directory)
    (tmp_path / "runs" / "digits").mkdir()
    files.remove(directory, with_parent=True)
    assert (tmp_path / "runs" / "digits").exists()


def test_a_file_that_is_missing_or_another_one_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(str(tmp_path), "driver")
    (tmp_path / "driver").write_text("something")
    with pytest.raises(OSError, match="something else"):
        files.read(str(tmp_path), "driver")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(OSError, match="runs"):
        files.make(f"{tmp_path}/runs/.probe")
