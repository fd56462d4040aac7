"""Clones: by reference, verified, marked, once, and only where a step trains on the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain.checkpoint.manifest import CLONED_FROM
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import CheckpointError, ConfigError
from raytrain.rundir import EVENTS, RUN, RunDir
from raytrain.tune.clone import FILE, MARK, Reference, clone, delete_run, read_reference
from tests.golden import check


class Scene:
    """Another trial with a checkpoint of step 20, and this one, which has one of step 30."""

    def __init__(self, tmp_path: Path) -> None:
        self.storage = str(tmp_path)
        self.other, self.own = RunDir.at(self.storage, "other"), RunDir.at(self.storage, "mine")
        self.config = RunConfig(name="mine", storage=self.storage, global_batch=8)
        self.other.write_json({"run": RunConfig(global_batch=8).model_dump(mode="json")}, RUN)
        self.save(self.other, 20)
        self.save(self.own, 30)
        self.own.write_json({}, RUN)
        Path(self.own.child(EVENTS)).write_text("{}\n")

    def save(self, run_dir: RunDir, step: int) -> None:
        files = {"state.pt": f"{run_dir.path} {step}".encode()}
        CheckpointStore(run_dir).write(step, files, {"valid/loss": 0.5}, {"name": "other"})

    def clone(self, checkpoint: str = "step-000000020", **changed: Any) -> int:
        config = RunConfig(**self.config.model_dump() | changed)
        return clone(Reference(self.storage, "other", 20, checkpoint), self.own, config, {"lr": 0.1})

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in CheckpointStore(self.own).list()]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_checkpoint_of_ray_tune_is_a_reference_without_weights() -> None:
    reference = Reference("s3://bucket/sweep", "trial-0001", 20, "step-000000020")
    with reference.as_checkpoint() as checkpoint:
        directory = Path(checkpoint.path)
        assert read_reference(checkpoint) == reference
        assert [path.name for path in directory.iterdir()] == [FILE]
        names = {"storage": "s3://bucket/sweep", "name": "trial-0001", "step": 20, "checkpoint": "step-000000020"}
        assert json.loads((directory / FILE).read_text()) == names
    assert not directory.exists(), "Ray Tune has copied it"
    assert read_reference(None) is None


def test_the_other_trials_checkpoint_becomes_the_only_one(scene: Scene) -> None:
    assert scene.clone(workers=3, clip_norm=1.0, micro_batch=2) == 20, "settings that choose no rows may differ"
    store = CheckpointStore(scene.own)
    (checkpoint,) = store.list()
    assert (checkpoint.step, checkpoint.manifest.metrics) == (20, {"valid/loss": 0.5})
    assert checkpoint.manifest.run[CLONED_FROM] == "other/step-000000020"
    assert store.read(checkpoint, "state.pt") == f"{scene.other.path} 20".encode()
    assert (scene.own.exists(RUN), scene.own.exists(EVENTS)) == (False, True)


def test_a_clone_is_made_once_for_the_same_values(scene: Scene) -> None:
    scene.clone()
    scene.save(scene.own, 25)
    assert (scene.clone(), scene.steps) == (20, [20, 25])
    clone(Reference(scene.storage, "other", 20, "step-000000020"), scene.own, scene.config, {"lr": 0.2})
    assert scene.steps == [20]


def test_r15_without_a_checkpoint_to_clone_nothing_is_lost(scene: Scene) -> None:
    delete_run(scene.other)
    with pytest.raises(CheckpointError, match="no checkpoint to clone"):
        scene.clone()
    assert scene.steps == [30]


@pytest.mark.parametrize(("name", "here"), [("global_batch", 16), ("seed", 1), ("shuffle_window", 64), ("drop_last", True)])
def test_settings_that_choose_rows_must_be_equal(scene: Scene, name: str, here: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        scene.clone(**{name: here})
    assert refused.value.where == f"run.{name}"
    if name == "global_batch":
        check("errors/tune_clone_of_other_rows.txt", f"{refused.value}\n")


def test_r7_a_damaged_checkpoint_is_not_cloned(scene: Scene) -> None:
    path = Path(scene.other.child("checkpoints", "step-000000020", "state.pt"))
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="SHA-256"):
        scene.clone()
    assert scene.steps == [30]


def test_a_clone_that_was_interrupted_is_made_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: RunDir, value: Any, *names: str) -> None:
        if names == (MARK,):
            raise KeyboardInterrupt
        write_json(self, value, *names)

    write_json = RunDir.write_json
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            scene.clone()
    assert (scene.clone(), scene.steps) == (20, [20])


def test_deleting_a_run_keeps_the_files_of_ray_tune(scene: Scene) -> None:
    CheckpointStore(scene.own).pin(["step-000000030"])
    Path(scene.own.child("result.json")).write_text("of Ray Tune")
    for _ in range(2):
        delete_run(scene.own)
        assert [path.name for path in Path(scene.own.path).iterdir()] == ["result.json"]
