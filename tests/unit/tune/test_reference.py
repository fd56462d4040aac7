"""A checkpoint by reference: a small file of plain values that says where a run's checkpoint lies."""

from __future__ import annotations

import json
from pathlib import Path

from raytrain.tune.reference import FILE, Reference, read_reference

REFERENCE = Reference("s3://bucket/sweep", "trial-0001", 20, "step-000000020")


def test_a_reference_is_what_ray_tune_keeps_and_gives_back() -> None:
    with REFERENCE.as_checkpoint() as checkpoint:
        assert read_reference(checkpoint) == REFERENCE
    assert read_reference(None) is None


def test_no_weights_are_in_it_and_the_file_is_gone_once_it_was_copied() -> None:
    with REFERENCE.as_checkpoint() as checkpoint:
        directory = Path(checkpoint.path)
        assert [path.name for path in directory.iterdir()] == [FILE]
        assert json.loads((directory / FILE).read_text()) == {
            "storage": "s3://bucket/sweep",
            "name": "trial-0001",
            "step": 20,
            "checkpoint": "step-000000020",
        }
    assert not directory.exists()


def test_it_leads_to_the_runs_directory(tmp_path: Path) -> None:
    run_dir = Reference(str(tmp_path), "trial-0001", 20, "").run_dir
    assert (run_dir.path, run_dir.is_local) == (f"{tmp_path}/trial-0001", True)
