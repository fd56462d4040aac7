"""A run is named by a path or a URI."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cli.audit import run_dir_at


@pytest.mark.parametrize(
    ("text", "path"),
    [("digits", "{here}/digits"), ("runs/digits/", "{here}/runs/digits"), (".", "{here}"), ("/digits", "/digits")],
)
def test_a_path_is_relative_to_here(text: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_dir_at(text).path == path.format(here=tmp_path)


def test_the_options_of_a_uri_stay_with_its_storage() -> None:
    run_dir = run_dir_at("s3://bucket/runs/digits?region=eu-west-1&endpoint_override=localhost:1")
    assert (run_dir.path, run_dir.is_local, run_dir.filesystem.region) == ("bucket/runs/digits", False, "eu-west-1")
