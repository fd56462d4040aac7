"""R7: a checkpoint is complete or absent, whatever happens to the process, the disk, or the files."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import fs

from raytrain.checkpoint.manifest import Checkpoint
from raytrain.checkpoint.store import CheckpointStore
from raytrain.errors import CheckpointError, StorageError
from raytrain.rundir import RunDir
from tests.unit.checkpoint.faults import FILES, FirstFail, KillAt, Killed, store_at

METRICS, RUN = {"valid/loss": 0.5}, {"global_batch": 64}


def write(store: CheckpointStore, step: int) -> Checkpoint:
    return store.write(step, FILES, METRICS, RUN)


def newest(store: CheckpointStore) -> str:
    found = store.newest_verified()
    return found.name if found else ""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(RunDir.at(str(tmp_path), "run"))


@pytest.mark.parametrize("filesystem", ["local", "mock"])
def test_what_was_written_is_listed_verified_and_read(tmp_path: Path, filesystem: str) -> None:
    run_dir = RunDir.at(str(tmp_path), "run") if filesystem == "local" else RunDir(fs._MockFileSystem(), "b/r", False)
    store = CheckpointStore(run_dir)
    assert (store.list(), store.newest_verified()) == ([], None)
    written = [write(store, step) for step in (3, 20)]
    assert (store.list(), store.newest_verified(), store.skipped) == (written, written[1], ())
    assert {name: store.read(written[0], name) for name in FILES} == FILES
    assert (written[0].name, written[0].step) == ("step-000000003", 3)
    assert (written[0].manifest.metrics, written[0].manifest.run) == (METRICS, RUN)
    assert pickle.loads(pickle.dumps(written)) == written


def test_memoryviews_empty_files_and_several_blocks_are_written(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.checkpoint.store.BLOCK_BYTES", 7)
    checkpoint = store.write(1, {"a": memoryview(bytes(range(16))).cast("I"), "b": b""}, {}, {})
    monkeypatch.setattr("raytrain.checkpoint.store.BLOCK_BYTES", 1000)
    assert store.newest_verified() == checkpoint
    assert [store.read(checkpoint, name) for name in "ab"] == [bytes(range(16)), b""]


def test_r6_a_long_read_tells_of_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain.checkpoint.store.BLOCK_BYTES", 7)
    blocks: list[int] = []
    store = CheckpointStore(RunDir.at(str(tmp_path), "run"), on_block=lambda: blocks.append(1))
    checkpoint = store.write(1, {"a": bytes(64)}, {}, {})
    store.read(checkpoint, "a")
    store.newest_verified()
    assert len(blocks) == 2 * 10


@pytest.mark.parametrize("is_local", [True, False])
def test_r7_no_two_attempts_share_a_directory(tmp_path: Path, is_local: bool) -> None:
    store = store_at(tmp_path / "run", is_local=is_local)
    (tmp_path / "run/checkpoints/step-000000005").mkdir(parents=True)  # an unfinished attempt
    assert [write(store, 5).name for _ in range(3)] == [f"step-000000005-{n}" for n in (2, 3, 4)]
    assert newest(store) == "step-000000005-4"


def test_r7_two_concurrent_local_writers_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makedirs, overtaken = os.makedirs, []

    def overtake(path: str, exist_ok: bool) -> None:
        """The other writer creates its directory after this one has listed them."""
        makedirs(path, exist_ok=exist_ok)
        if path.endswith("checkpoints") and not overtaken:
            overtaken.append(path)
            os.mkdir(f"{path}/step-000000001")

    monkeypatch.setattr("os.makedirs", overtake)
    assert write(store_at(tmp_path, is_local=True), 1).name == "step-000000001-2"
    assert overtaken


@pytest.mark.parametrize("is_local", [True, False])
def test_r7_a_kill_at_any_operation_of_a_save_leaves_a_complete_checkpoint(tmp_path: Path, is_local: bool) -> None:
    """Also on an object store, although this one shows half a manifest, which a real one does not."""
    outcomes = set()
    for n in range(100):
        root = tmp_path / str(n)
        before = write(store_at(root), 1)
        kill, after = KillAt(n), None
        with contextlib.suppress(Killed):
            after = write(store_at(root, kill, is_local), 2)
        healthy = store_at(root)
        found = healthy.newest_verified()
        assert found in ([after] if after else healthy.list())
        assert {name: healthy.read(found, name) for name in FILES} == FILES
        outcomes.add((found.step, kill.fired))
        healthy.delete_incomplete()
        assert healthy.list()[0] == before
        assert all("not JSON" in skipped.reason and not is_local for skipped in healthy.skipped)
        if not kill.fired:
            break
    assert {(1, True), (2, False)} <= outcomes


def test_r7_a_kill_at_any_operation_of_a_deletion_leaves_no_half_checkpoint(tmp_path: Path) -> None:
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


def flip_bit(directory: Path) -> None:
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[100] ^= 1
    (directory / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
        (lambda path: os.truncate(path / "model.safetensors", 10), "is 10 bytes, the manifest says 7000 bytes"),
        (flip_bit, "SHA-256"),
        (lambda path: os.truncate(path / "manifest.json", 40), "not JSON"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "not JSON"),
        (lambda path: (path / "manifest.json").unlink(), "never finished"),
    ],
)
def test_r7_a_damaged_checkpoint_is_skipped_with_its_reason_and_kept(
    store: CheckpointStore, tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    good, bad = write(store, 1), write(store, 2)
    damage(tmp_path / "run/checkpoints" / bad.name)
    assert store.newest_verified() == good
    assert [skipped.name for skipped in store.skipped] == [bad.name]
    assert reason in store.skipped[0].reason
    is_unfinished = reason == "never finished"
    assert [leftover.name for leftover in store.delete_incomplete()] == ([bad.name] if is_unfinished else [])
    assert (tmp_path / "run/checkpoints" / bad.name).exists() != is_unfinished


def test_r7_deleted_directories_and_foreign_files_are_ignored(store: CheckpointStore, tmp_path: Path) -> None:
    good, bad, gone = (write(store, step) for step in (1, 2, 3))
    shutil.rmtree(tmp_path / "run/checkpoints" / gone.name)
    (tmp_path / "run/checkpoints/notes").mkdir()
    (tmp_path / "run/checkpoints/step-000000009").write_text("a file")
    for _ in range(2):
        store.delete(bad)
    assert (store.list(), store.delete_incomplete()) == ([good], ())
    assert (tmp_path / "run/checkpoints/notes").exists()


@pytest.mark.parametrize("operation", ["create_dir", "open_output_stream", "write"])
def test_r7_two_transient_errors_are_retried_with_backoff(tmp_path: Path, operation: str) -> None:
    fault, pauses = FirstFail(operation, times=2), list[float]()
    store = store_at(tmp_path / "run", fault, sleep=pauses.append)
    checkpoint = write(store, 1)
    assert (fault.left, pauses, store.newest_verified()) == (0, [0.5, 1.0], checkpoint)
    assert (store.pinned(), pauses) == (frozenset(), [0.5, 1.0]), "a missing file is not retried"


@pytest.mark.parametrize("suffix", ["model.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EROFS, "Read-only file system")]
)
def test_r7_a_full_or_read_only_disk_is_reported_and_the_old_checkpoint_stays(
    tmp_path: Path, suffix: str, error: OSError
) -> None:
    old = write(store_at(tmp_path / "run"), 1)
    fault = FirstFail("write", times=3, suffix=suffix, error=error)
    store = store_at(tmp_path / "run", fault)
    with pytest.raises(CheckpointError, match=r"checkpoints/step-000000002 could not be written in 3 attempts: .*") as e:
        write(store, 2)
    assert str(error) in str(e.value)
    assert (fault.left, store.newest_verified()) == (0, old)
    assert not (tmp_path / "run/checkpoints/step-000000002").exists()
    assert write(store, 2).step == 2


def test_r7_a_failed_save_that_cannot_be_deleted_is_not_a_checkpoint(tmp_path: Path) -> None:
    def broken(operation: str, path: str) -> None:
        if operation == "delete_dir" or (operation == "write" and path.endswith("state.pt")):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write(store_at(tmp_path / "run", broken), 1)
    healthy = store_at(tmp_path / "run")
    assert newest(healthy) == ""
    assert [skipped.is_leftover for skipped in healthy.skipped] == [True]


@pytest.mark.parametrize("operation", ["get_file_info", "open_input_stream"])
def test_r7_an_unreadable_storage_is_an_error_and_not_an_empty_one(tmp_path: Path, operation: str) -> None:
    checkpoint = write(store_at(tmp_path / "run"), 1)
    for action in (CheckpointStore.newest_verified, CheckpointStore.delete_incomplete):
        with pytest.raises(StorageError, match="Input/output error"):
            action(store_at(tmp_path / "run", FirstFail(operation, times=9)))
    assert store_at(tmp_path / "run", FirstFail(operation, times=2)).newest_verified() == checkpoint


def test_a_failed_deletion_names_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = write(store_at(tmp_path / "run"), 1)
    with pytest.raises(CheckpointError, match="step-000000001 could not be deleted"):
        store_at(tmp_path / "run", FirstFail("delete_dir", times=3)).delete(checkpoint)


def test_reading_checks_the_digest_and_the_name(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = write(store, 1)
    flip_bit(tmp_path / "run/checkpoints" / checkpoint.name)
    (tmp_path / "run/checkpoints" / checkpoint.name / "state.pt").unlink()
    for name, reason in (("model.safetensors", "SHA-256"), ("manifest.json", "has only model"), ("state.pt", "missing")):
        with pytest.raises(CheckpointError, match=reason):
            store.read(checkpoint, name)


@pytest.mark.parametrize("damage", [b"", b"[", b"\xff[", b'["step-0000'])
def test_r8_pins_are_replaced_and_damaged_pins_are_empty(store: CheckpointStore, tmp_path: Path, damage: bytes) -> None:
    assert store.pinned() == frozenset()
    store.pin(["step-000000001"])
    store.pin(["step-000000002", "step-000000003"])
    assert CheckpointStore(RunDir.at(str(tmp_path), "run")).pinned() == {"step-000000002", "step-000000003"}
    (tmp_path / "run/pins.json").write_bytes(damage)
    assert store.pinned() == frozenset()


@pytest.mark.parametrize("operation", ["open_output_stream", "open_input_stream"])
def test_r8_a_storage_error_does_not_lose_pins(tmp_path: Path, operation: str) -> None:
    store = store_at(tmp_path, FirstFail(operation, times=2, suffix="pins.json"))
    store.pin(["step-000000001"])
    assert store.pinned() == {"step-000000001"}
    with pytest.raises(StorageError):
        store_at(tmp_path, FirstFail("open_input_stream", times=3, suffix="pins.json")).pinned()
