"""Clones: from storage to storage, verified, marked, once, and only where a step stands for the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain.checkpoint.manifest import CLONED_FROM
from raytrain.checkpoint.store import CheckpointStore
from raytrain.config import RunConfig
from raytrain.errors import CheckpointError, ConfigError
from raytrain.rundir import EVENTS, RUN, RunDir
from raytrain.tune.clone import MARK, clone, forget
from raytrain.tune.reference import Reference
from tests.golden import check


class Scene:
    """Another trial with a checkpoint, and this one, which was further."""

    def __init__(self, tmp_path: Path) -> None:
        self.storage = str(tmp_path)
        self.theirs, self.own = RunDir.at(self.storage, "other"), RunDir.at(self.storage, "mine")
        self.config = RunConfig(name="mine", storage=self.storage, global_batch=8)
        self.theirs.write_json({"run": RunConfig(global_batch=8).model_dump(mode="json")}, RUN)
        self.save(self.theirs, 20)
        self.save(self.own, 30)
        self.own.write_json({}, RUN)
        Path(self.own.child(EVENTS)).write_text("{}\n")

    def save(self, run_dir: RunDir, step: int) -> str:
        files = {"state.pt": f"{run_dir.path} {step}".encode()}
        return CheckpointStore(run_dir).write(step, files, {"valid/loss": 0.5}, {"name": "other"}).name

    def clone(self, checkpoint: str = "step-000000020", values: Any = None) -> int:
        reference = Reference(self.storage, "other", 20, checkpoint)
        return clone(reference, self.own, self.config, values or {"lr": 0.1})


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_others_checkpoint_becomes_the_only_one_and_is_marked(scene: Scene) -> None:
    assert scene.clone() == 20
    store = CheckpointStore(scene.own)
    (checkpoint,) = store.list()
    assert checkpoint.step == 20
    assert checkpoint.manifest.run[CLONED_FROM] == "other/step-000000020"
    assert checkpoint.manifest.metrics == {"valid/loss": 0.5}
    assert store.read(checkpoint, "state.pt") == f"{scene.theirs.path} 20".encode()
    assert (scene.own.exists(RUN), scene.own.exists(EVENTS)) == (False, True)


def test_it_is_done_once_however_often_the_trial_is_started_but_anew_for_other_values(scene: Scene) -> None:
    scene.clone()
    scene.save(scene.own, 25)
    assert scene.clone() == 20
    assert [checkpoint.step for checkpoint in CheckpointStore(scene.own).list()] == [20, 25]
    scene.clone(values={"lr": 0.2})
    assert [checkpoint.step for checkpoint in CheckpointStore(scene.own).list()] == [20]


def test_one_that_was_deleted_since_gives_way_to_the_newest(scene: Scene) -> None:
    scene.save(scene.theirs, 40)
    assert scene.clone("step-000000010") == 40


def test_r15_without_a_checkpoint_nothing_is_cloned_and_nothing_is_lost(scene: Scene) -> None:
    forget(scene.theirs)
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        scene.clone()
    assert [checkpoint.step for checkpoint in CheckpointStore(scene.own).list()] == [30]


def test_a_step_must_stand_for_the_same_rows(scene: Scene) -> None:
    scene.config = RunConfig(name="mine", storage=scene.storage, global_batch=16)
    with pytest.raises(ConfigError) as refused:
        scene.clone()
    check("errors/tune_clone_of_other_rows.txt", f"{refused.value}\n")


@pytest.mark.parametrize(("name", "here"), [("seed", 1), ("shuffle_window", 64), ("drop_last", True)])
def test_every_setting_that_chooses_rows_counts(scene: Scene, name: str, here: Any) -> None:
    scene.config = RunConfig(**scene.config.model_dump() | {name: here})
    with pytest.raises(ConfigError) as refused:
        scene.clone()
    assert refused.value.where == f"run.{name}"


def test_settings_that_leave_rows_as_they_are_may_differ(scene: Scene) -> None:
    scene.config = RunConfig(**scene.config.model_dump() | {"workers": 3, "clip_norm": 1.0, "micro_batch": 2})
    assert scene.clone() == 20


def test_r7_a_damaged_file_is_not_taken_over_and_what_was_there_stays(scene: Scene) -> None:
    Path(scene.theirs.child("checkpoints", "step-000000020", "state.pt")).write_bytes(b"x" * len(f"{scene.theirs.path} 20"))
    with pytest.raises(CheckpointError, match="SHA-256"):
        scene.clone()
    assert [checkpoint.step for checkpoint in CheckpointStore(scene.own).list()] == [30]


def test_one_that_died_in_the_middle_of_cloning_does_it_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(self: RunDir, value: Any, *names: str) -> None:
        if names == (MARK,):
            raise KeyboardInterrupt
        write_json(self, value, *names)

    write_json = RunDir.write_json
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "write_json", dies)
        with pytest.raises(KeyboardInterrupt):
            scene.clone()
    assert scene.clone() == 20
    assert [checkpoint.step for checkpoint in CheckpointStore(scene.own).list()] == [20]


def test_forgetting_a_run_leaves_the_files_of_others_in_its_directory(scene: Scene) -> None:
    CheckpointStore(scene.own).pin(["step-000000030"])
    Path(scene.own.child("result.json")).write_text("of Ray Tune")
    forget(scene.own)
    assert [path.name for path in Path(scene.own.path).iterdir()] == ["result.json"]
    forget(scene.own)
