"""The outcome of a run is read without what was undone, and an unreadable run is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import StorageError
from raytrain.events import kinds
from raytrain.report.outcome import digests, environment, outcome_of
from raytrain.rundir import RunDir
from tests.unit.report.test_comparison import digest, done, restored, write

WRONG = {"0.weight": "a9"}


def test_only_the_newest_digests_that_were_not_undone_are_valid() -> None:
    events = [digest(2), digest(4, WRONG), digest(6, WRONG), restored(2), digest(2), digest(4)]
    assert digests(events) == {2: digest(2), 4: digest(4)}
    assert digests([digest(2, WRONG), digest(2)]) == {2: digest(2)}
    assert digests([digest(4), digest(2), restored(4)]) == {2: digest(2), 4: digest(4)}


def test_environments_that_differ_between_workers_are_all_listed() -> None:
    reported = [kinds.WorkerEnvironment(time=1.0, worker=f"w{i}", device="CPU AVX2", torch="2.9", threads=i) for i in (1, 2)]
    assert environment(reported) == {"device": "CPU AVX2", "torch": "2.9", "threads": "1 / 2"}
    assert environment([]) == {}


def test_an_outcome_is_read_without_what_was_undone(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    undone = [done(2, 9.0, 9.0), digest(4, WRONG)]
    write(run_dir, [done(0, 0.5, math.nan), digest(2), *undone, restored(2), done(2, 0.3), digest(3)])
    CheckpointStore(run_dir).write(2, {"model.safetensors": b"abc"}, {}, {})
    found = outcome_of(run_dir)
    assert [repr(loss) for loss in found.losses.values()] == ["0.5", "nan", "0.3"]
    assert found.digests == {2: digest(2), 3: digest(3)}
    assert found.files[2]["model.safetensors"].startswith("ba7816bf")


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "no run.json"), ("{", "not JSON"), ("[]", "no plan"), ("{}", "no plan"), ("7", "no plan")],
)
def test_a_directory_without_a_plan_is_refused(tmp_path: Path, content: str | None, found: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(StorageError, match=found) as caught:
        outcome_of(RunDir.at(str(tmp_path.parent), tmp_path.name))
    assert caught.value.where == str(tmp_path / "run.json" if content else tmp_path)


def test_an_unreadable_event_log_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    write(run_dir, [])
    Path(run_dir.child("events.jsonl")).unlink()
    Path(run_dir.child("events.jsonl")).mkdir()
    with pytest.raises(StorageError, match=r"events\.jsonl"):
        outcome_of(run_dir)
