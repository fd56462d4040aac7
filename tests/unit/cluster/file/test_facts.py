"""What is looked up on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from raytrain.cluster.file.facts import facts_of_this_machine


def test_paths_are_looked_for_where_ray_up_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/key").touch()
    (tmp_path / "data").mkdir()
    exists = facts_of_this_machine(tmp_path).exists
    assert [exists(path) for path in ("data", "~/key", str(tmp_path), "nope", "~/nope", "/nope")] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "x" * 5000, "a\0b"])
def test_what_is_no_path_is_not_there(path: str) -> None:
    assert not facts_of_this_machine(Path()).exists(path)


def test_rays_schema_defaults_and_version(tmp_path: Path) -> None:
    facts = facts_of_this_machine(tmp_path, (1, 4))
    assert facts.ray == ray.__version__
    assert "available_node_types" in facts.schema["properties"]
    assert facts.defaults["aws"]["max_workers"] == 2
    assert {"aws", "gcp", "azure", "local"} <= facts.defaults.keys()
    assert facts.workers == (1, 4)
