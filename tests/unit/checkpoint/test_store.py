"""R7: a checkpoint is complete or absent, whatever happens to the process, the disk, or the files."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import fs

from raytrain.checkpoint.manifest import Checkpoint
from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import CheckpointError, StorageError
from raytrain.rundir import RunDir
from tests.unit.checkpoint.faults import FILES, FirstFail, KillAt, Killed, store_at

METRICS = {"valid/loss": 0.5}
RUN = {"global_batch": 64}


def write(store: CheckpointStore, step: int) -> Checkpoint:
    return store.write(step, FILES, METRICS, RUN)


def names(store: CheckpointStore) -> list[str]:
    return [checkpoint.name for checkpoint in store.list()]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(RunDir.at(str(tmp_path), "run"))


@pytest.mark.parametrize("filesystem", ["local", "mock"])
def test_what_was_written_is_listed_verified_and_read(tmp_path: Path, filesystem: str) -> None:
    run_dir = RunDir.at(str(tmp_path), "run") if filesystem == "local" else RunDir(fs._MockFileSystem(), "b/r", False)
    store = CheckpointStore(run_dir)
    assert store.list() == []
    assert store.newest_verified() is None
    written = [write(store, step) for step in (3, 20)]
    assert store.list() == written
    assert store.newest_verified() == written[1]
    assert {name: store.read(written[0], name) for name in FILES} == FILES
    assert (written[0].name, written[0].step) == ("step-000000003", 3)
    assert (written[0].manifest.metrics, written[0].manifest.run) == (METRICS, RUN)
    assert store.skipped == ()


def test_a_memoryview_of_any_shape_and_an_empty_file_are_written(store: CheckpointStore) -> None:
    view = memoryview(bytes(range(16))).cast("I")
    checkpoint = store.write(1, {"a": view, "b": b""}, {}, {})
    assert store.read(checkpoint, "a") == bytes(range(16))
    assert store.read(checkpoint, "b") == b""


def test_a_file_larger_than_a_block_has_the_digest_of_the_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.checkpoint.store.BLOCK_BYTES", 7)
    checkpoint = write(store, 1)
    monkeypatch.setattr("raytrain.checkpoint.store.BLOCK_BYTES", 1000)
    assert store.newest_verified() == checkpoint


@pytest.mark.parametrize("is_local", [True, False])
def test_r7_no_two_attempts_share_a_directory(tmp_path: Path, is_local: bool) -> None:
    store = store_at(tmp_path / "run", is_local=is_local)
    (tmp_path / "run/checkpoints/step-000000005").mkdir(parents=True)  # an unfinished one
    assert [write(store, 5).name for _ in range(3)] == [f"step-000000005-{n}" for n in (2, 3, 4)]
    newest = store.newest_verified()
    assert newest is not None
    assert newest.name == "step-000000005-4"


def test_r7_two_local_writers_at_once_do_not_share_a_directory(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken: list[str] = []
    makedirs = os.makedirs

    def overtake(path: str, exist_ok: bool) -> None:
        """The other writer makes its directory after this one has looked which ones there are."""
        makedirs(path, exist_ok=exist_ok)
        if path.endswith("checkpoints") and not overtaken:
            overtaken.append(path)
            os.mkdir(f"{path}/step-000000001")

    monkeypatch.setattr("os.makedirs", overtake)
    monkeypatch.setattr(store._retries, "_sleep", lambda seconds: None)
    assert write(store, 1).name == "step-000000001-2"
    assert overtaken


@pytest.mark.parametrize("is_local", [True, False])
def test_r7_a_kill_at_any_operation_of_a_save_leaves_the_old_one_or_a_whole_new_one(tmp_path: Path, is_local: bool) -> None:
    """On an object store too, though this one shows half a manifest, which a real one does not."""
    outcomes = set()
    for n in range(100):
        root = tmp_path / str(n)
        before = write(store_at(root), 1)
        kill, after = KillAt(n), None
        with contextlib.suppress(Killed):
            after = write(store_at(root, kill, is_local), 2)
        healthy = store_at(root)
        newest = healthy.newest_verified()
        assert newest in ([after] if after else healthy.list())
        assert {name: healthy.read(newest, name) for name in FILES} == FILES
        outcomes.add((newest.step, kill.fired))
        healthy.delete_incomplete()
        assert healthy.list()[0] == before
        assert all("not JSON" in skipped.reason and not is_local for skipped in healthy.skipped)
        if not kill.fired:
            break
    assert {(1, True), (2, False)} <= outcomes


def test_r7_a_kill_at_any_operation_of_a_deletion_leaves_a_whole_one_or_a_leftover(tmp_path: Path) -> None:
    for n in range(20):
        root = tmp_path / str(n)
        old, new = (write(store_at(root), step) for step in (1, 2))
        kill = KillAt(n)
        with contextlib.suppress(Killed):
            store_at(root, kill).delete(old)
        healthy = store_at(root)
        assert healthy.list() in ([old, new], [new])
        assert all(skipped.is_leftover for skipped in healthy.skipped)
        if not kill.fired:
            break
    assert n == 2
    assert not (tmp_path / "2/checkpoints/step-000000001").exists()


SAVE_AND_HANG = """
import sys, threading
from pathlib import Path
from tests.unit.checkpoint.faults import FILES, store_at
def hang(operation, path):
    if operation == "write" and path.endswith("state.pt"):
        print("in the middle", flush=True)
        threading.Event().wait()
root = Path(sys.argv[1])
store_at(root).write(1, FILES, {}, {})
store_at(root, hang).write(2, FILES, {}, {})
"""


def test_r7_a_process_killed_in_the_middle_of_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    repository = Path(__file__).parents[3]
    command = [sys.executable, "-c", SAVE_AND_HANG, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    store = CheckpointStore(RunDir.at(str(tmp_path), "run"))
    newest = store.newest_verified()
    assert newest is not None
    assert newest.step == 1
    assert [(skipped.name, skipped.is_leftover) for skipped in store.skipped] == [("step-000000002", True)]
    assert write(store, 2).name == "step-000000002-2"
    assert [leftover.name for leftover in store.delete_incomplete()] == ["step-000000002"]
    assert names(store) == ["step-000000001", "step-000000002-2"]


def damage_delete(directory: Path) -> None:
    (directory / "state.pt").unlink()


def damage_truncate(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 10)


def damage_bit(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def damage_manifest(directory: Path) -> None:
    os.truncate(directory / "manifest.json", 40)


def damage_binary_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"\xff\xfe\x00")


def damage_no_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_delete, "state.pt is missing"),
        (damage_truncate, "model.safetensors is 10 bytes, the manifest says 7000 bytes"),
        (damage_bit, "SHA-256"),
        (damage_manifest, "not JSON"),
        (damage_binary_manifest, "not JSON"),
        (damage_no_manifest, "never finished"),
    ],
)
def test_r7_a_damaged_checkpoint_is_passed_over_with_its_reason(
    store: CheckpointStore, tmp_path: Path, damage: object, reason: str
) -> None:
    good, bad = write(store, 1), write(store, 2)
    assert callable(damage)
    damage(tmp_path / "run/checkpoints" / bad.name)
    assert store.newest_verified() == good
    assert [skipped.name for skipped in store.skipped] == [bad.name]
    assert reason in store.skipped[0].reason


def test_r7_a_whole_directory_deleted_by_hand_is_not_missed(store: CheckpointStore, tmp_path: Path) -> None:
    good, bad = write(store, 1), write(store, 2)
    store.delete(bad)
    assert store.newest_verified() == good
    store.delete(good)
    store.delete(good)
    assert store.newest_verified() is None


def test_r7_a_damaged_checkpoint_is_no_leftover_to_be_deleted(store: CheckpointStore, tmp_path: Path) -> None:
    bad = write(store, 1)
    damage_truncate(tmp_path / "run/checkpoints" / bad.name)
    assert store.delete_incomplete() == ()
    assert (tmp_path / "run/checkpoints" / bad.name / "manifest.json").exists()


def test_other_things_in_the_directory_are_left_alone(store: CheckpointStore, tmp_path: Path) -> None:
    write(store, 1)
    (tmp_path / "run/checkpoints/notes").mkdir()
    (tmp_path / "run/checkpoints/step-000000009").write_text("a file")
    assert names(store) == ["step-000000001"]
    assert store.delete_incomplete() == ()
    assert (tmp_path / "run/checkpoints/notes").exists()


@pytest.mark.parametrize("operation", ["create_dir", "open_output_stream", "write"])
def test_r7_two_passing_errors_are_retried_with_a_growing_pause(tmp_path: Path, operation: str) -> None:
    fault = FirstFail(operation, times=2)
    pauses: list[float] = []
    store = store_at(tmp_path / "run", fault)
    store._retries._sleep = pauses.append
    checkpoint = write(store, 1)
    assert fault.left == 0
    assert pauses == [0.5, 1.0]
    assert store.newest_verified() == checkpoint


@pytest.mark.parametrize("suffix", ["model.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EROFS, "Read-only file system")]
)
def test_r7_a_full_or_read_only_disk_is_reported_with_path_and_cause_and_the_old_one_stays(
    tmp_path: Path, suffix: str, error: OSError
) -> None:
    old = write(store_at(tmp_path / "run"), 1)
    fault = FirstFail("write", times=3, suffix=suffix, error=error)
    store = store_at(tmp_path / "run", fault)
    with pytest.raises(CheckpointError, match=r"checkpoints/step-000000002 could not be written in 3 attempts: .*") as e:
        write(store, 2)
    assert str(error) in str(e.value)
    assert fault.left == 0
    assert store.newest_verified() == old
    assert not (tmp_path / "run/checkpoints/step-000000002").exists()
    assert write(store, 2).step == 2


def test_r7_a_failed_save_that_cannot_be_tidied_up_is_still_no_checkpoint(tmp_path: Path) -> None:
    def broken(operation: str, path: str) -> None:
        if operation == "delete_dir" or (operation == "write" and path.endswith("state.pt")):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write(store_at(tmp_path / "run", broken), 1)
    healthy = store_at(tmp_path / "run")
    assert healthy.newest_verified() is None
    assert [skipped.is_leftover for skipped in healthy.skipped] == [True]


@pytest.mark.parametrize("operation", ["get_file_info", "open_input_stream"])
def test_r7_a_store_that_cannot_be_read_is_an_error_and_never_no_checkpoint(tmp_path: Path, operation: str) -> None:
    checkpoint = write(store_at(tmp_path / "run"), 1)
    with pytest.raises(StorageError, match="Input/output error"):
        store_at(tmp_path / "run", FirstFail(operation, times=9)).newest_verified()
    with pytest.raises(StorageError, match="Input/output error"):
        store_at(tmp_path / "run", FirstFail(operation, times=9)).delete_incomplete()
    flaky = store_at(tmp_path / "run", FirstFail(operation, times=2))
    assert flaky.newest_verified() == checkpoint


def test_a_deletion_that_fails_says_which(tmp_path: Path) -> None:
    checkpoint = write(store_at(tmp_path / "run"), 1)
    with pytest.raises(CheckpointError, match="step-000000001 could not be deleted"):
        store_at(tmp_path / "run", FirstFail("delete_dir", times=3)).delete(checkpoint)


def test_reading_checks_the_digest_and_the_name(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = write(store, 1)
    damage_bit(tmp_path / "run/checkpoints" / checkpoint.name)
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.read(checkpoint, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has only model\.safetensors, state\.pt"):
        store.read(checkpoint, "manifest.json")
    damage_delete(tmp_path / "run/checkpoints" / checkpoint.name)
    with pytest.raises(CheckpointError, match="missing"):
        store.read(checkpoint, "state.pt")


def test_a_checkpoint_travels_between_processes(store: CheckpointStore) -> None:
    checkpoint = write(store, 1)
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_pins_are_kept_for_others_and_damaged_ones_are_none(tmp_path: Path) -> None:
    run_dir = RunDir.at(str(tmp_path), "run")
    store = CheckpointStore(run_dir)
    assert store.pinned() == frozenset()
    store.pin(["step-000000001"])
    store.pin(["step-000000002", "step-000000003"])
    assert CheckpointStore(run_dir).pinned() == {"step-000000002", "step-000000003"}
    Path(run_dir.child("pins.json")).write_text("[")
    assert store.pinned() == frozenset()


@pytest.mark.parametrize("damage", [b"", b"[", b"\xff[", b'["step-0000'])
def test_r8_pins_that_cannot_be_read_any_more_are_none(store: CheckpointStore, tmp_path: Path, damage: bytes) -> None:
    store.pin(["step-000000001"])
    (tmp_path / "run/pins.json").write_bytes(damage)
    assert store.pinned() == frozenset()


@pytest.mark.parametrize("operation", ["open_output_stream", "open_input_stream"])
def test_r7_a_passing_error_does_not_lose_pins(tmp_path: Path, operation: str) -> None:
    store = store_at(tmp_path, FirstFail(operation, times=2, suffix="pins.json"))
    store.pin(["step-000000001"])
    assert store.pinned() == {"step-000000001"}


def test_r8_a_storage_that_does_not_answer_is_not_a_storage_without_pins(tmp_path: Path) -> None:
    store_at(tmp_path).pin(["step-000000001"])
    with pytest.raises(StorageError):
        store_at(tmp_path, FirstFail("open_input_stream", times=3, suffix="pins.json")).pinned()
