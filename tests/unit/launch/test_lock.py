"""One driver at a time uses a run, on any storage; one that was killed does not keep the next one out for long."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pyarrow import fs

from raytrain.errors import RunInUseError, StorageError
from raytrain.launch import lock as module
from raytrain.launch.lock import CLAIMS, LEASE_S, PATIENCE_S, Claim, RunLock, locked
from raytrain.rundir import RunDir
from tests.golden import check
from tests.unit.checkpoint.faults import FaultyFilesystem, FirstFail


class Scene:
    """A run's directory; time passes only while somebody sleeps, and `meanwhile` is what others do then."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.now, self.told = run_dir, 0.0, list[str]()
        self.meanwhile: Callable[[], None] = lambda: None

    def lock(self, elsewhere: bool = False) -> RunLock:
        claim = Claim.of_this_process()
        claim = replace(claim, machine="another one", host="gpu-3", pid=4711) if elsewhere else claim
        return RunLock(self.run_dir, self.told.append, lambda: self.now, self._sleep, claim)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()

    @property
    def claims(self) -> list[str]:
        files = self.run_dir.filesystem.get_file_info(fs.FileSelector(self.run_dir.child(CLAIMS), allow_not_found=True))
        return [info.base_name.removesuffix(".json") for info in files]


@pytest.fixture(params=["local", "an object store"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    is_local = request.param == "local"
    return Scene(RunDir.at(str(tmp_path), "run") if is_local else RunDir(fs._MockFileSystem(), "b/run", False))


def test_r10_a_second_driver_is_refused_and_told_who_the_first_one_is(scene: Scene) -> None:
    first, second = scene.lock(elsewhere=True), scene.lock()
    first.acquire()
    scene.meanwhile = first.beat
    with pytest.raises(RunInUseError) as caught:
        second.acquire()
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.claim.since))
    check("errors/run_in_use.txt", str(caught.value).replace(scene.run_dir.path, "RUN").replace(since, "THEN") + "\n")
    assert PATIENCE_S <= scene.now < PATIENCE_S + 2
    assert (len(scene.told), scene.claims) == (1, [first.claim.name])
    first.close()
    second.acquire()
    assert (len(scene.told), scene.claims) == (1, [second.claim.name]), "it does not wait for one that has ended"


def test_r10_a_driver_that_was_killed_on_this_machine_keeps_nobody_out(scene: Scene) -> None:
    process = subprocess.Popen(["sleep", "60"])
    created = psutil.Process(process.pid).create_time()
    first = scene.lock()
    first.claim = replace(first.claim, pid=process.pid, created=created)
    first.acquire()
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:  # its parent has not asked for its end yet
        time.sleep(0.01)
    second = scene.lock()
    second.acquire()
    process.wait()
    second.claim = replace(second.claim, pid=os.getpid(), created=created - 100)  # the number belongs to another one now
    second.beat()
    scene.lock().acquire()
    assert (scene.now, scene.told) == (0.0, [])


def test_r10_a_driver_that_was_killed_elsewhere_keeps_the_next_one_out_for_a_lease(scene: Scene) -> None:
    scene.lock(elsewhere=True).acquire()
    scene.lock().acquire()
    assert LEASE_S <= scene.now < LEASE_S + 2
    before = scene.now
    outdated = scene.lock(elsewhere=True)
    outdated.claim = replace(outdated.claim, time=outdated.claim.time - 3600)
    outdated._write()
    (name,) = set(scene.claims) - {outdated.claim.name}
    scene.run_dir.filesystem.delete_file(scene.run_dir.child(CLAIMS, f"{name}.json"))
    scene.lock().acquire()
    assert scene.now == before


def test_r10_of_drivers_that_start_at_the_same_moment_one_gets_the_run(scene: Scene) -> None:
    start, won, refused = threading.Barrier(6), list[RunLock](), list[RunInUseError]()

    def run() -> None:
        lock = RunLock(scene.run_dir, clock=lambda: 20 * time.monotonic(), sleep=lambda seconds: time.sleep(seconds / 20))
        start.wait()
        try:
            lock.acquire()
            won.append(lock)
        except RunInUseError as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 5)


def test_r10_a_late_heartbeat_does_not_bring_a_dead_claim_back(scene: Scene) -> None:
    sleeper, other = scene.lock(elsewhere=True), scene.lock()
    sleeper.acquire()
    other.acquire()
    sleeper._write()  # it was between its look and its write when the other one took the run
    sleeper.claim = replace(sleeper.claim, time=sleeper.claim.time - LEASE_S)
    sleeper.beat()
    with pytest.raises(RunInUseError):
        sleeper.check()


def test_r10_a_driver_that_was_taken_for_dead_ends(scene: Scene) -> None:
    sleeper = scene.lock(elsewhere=True)
    sleeper.acquire()
    scene.run_dir.filesystem.delete_dir(scene.run_dir.child(CLAIMS))  # by hand: nobody has taken the run
    sleeper.beat()
    sleeper.check()
    assert scene.claims == [sleeper.claim.name]
    other = scene.lock()
    other.acquire()
    sleeper.beat()
    with pytest.raises(RunInUseError, match=f"process {os.getpid()} on"):
        sleeper.check()
    assert scene.claims == [other.claim.name]


def test_r7_a_damaged_claim_may_be_one_that_is_being_written_and_is_dead_after_a_lease(scene: Scene) -> None:
    for number, text in enumerate(["{", "[]", '{"pid": 3}']):
        scene.run_dir.filesystem.create_dir(scene.run_dir.child(CLAIMS), recursive=True)
        with scene.run_dir.filesystem.open_output_stream(scene.run_dir.child(CLAIMS, f"{number}.json")) as stream:
            stream.write(text.encode())
    lock = scene.lock()
    lock.acquire()
    assert (scene.claims, LEASE_S <= scene.now < LEASE_S + 2) == ([lock.claim.name], True)


def test_the_lock_beats_while_it_is_held_and_storage_errors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    run_dir = RunDir.at(str(tmp_path), "run")
    with locked(run_dir) as lock:
        until = time.monotonic() + 30
        while lock.claim.beats < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert list((tmp_path / "run" / CLAIMS).iterdir()) == []
    broken = RunDir(FaultyFilesystem(FirstFail("open_output_stream", times=1)), str(tmp_path / "other"), True)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="Input/output error"), locked(broken):
        pass
