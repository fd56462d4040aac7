"""Does another driver use this run? A file with a heartbeat in the run's directory says so, on any storage.

Storages such as S3 have no locks, so each driver writes a claim of its own and then lists the claims: who sees another
living one withdraws. A claim is dead if its process is known to be gone, which a driver on the same machine sees at once, or
if its heartbeat stands still for `LEASE_S`; clocks of different machines are not compared. Runs in the driver.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import psutil
from pyarrow import fs

from raytrain.errors import RunInUseError, StorageError
from raytrain.rundir import RunDir

CLAIMS = "drivers"
"""In the run's directory: one file for each driver."""
BEAT_S = 4.0
LEASE_S = 20.0
"""A claim whose heartbeat stands still for so long is dead."""
OUTDATED_S = 600.0
"""A claim of which the last heartbeat is so old is dead: no two clocks differ by so much."""
PATIENCE_S = 10.0
"""How long to wait for a driver that is alive, since it may be about to end."""
PAUSE_S = 0.5


@dataclass(frozen=True)
class Claim:
    """A driver's claim on a run.

    Args:
        name: of the claim, unique.
        host, pid: of the driver.
        machine: identity of its machine's process table, so equal where `pid` has the same meaning.
        created: when its process started, in Unix seconds; a later process may have the same number.
        since: when it made the claim, in Unix seconds of its own clock.
        beats: number of its heartbeats.
        time: of the last one, in Unix seconds of its own clock.
    """

    name: str
    host: str
    pid: int
    machine: str
    created: float
    since: float
    beats: int = 0
    time: float = 0.0

    @classmethod
    def of_this_process(cls) -> Claim:
        """A new claim."""
        created, now = psutil.Process().create_time(), time.time()
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), _machine(), created, since=now, time=now)

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended; False on another machine."""
        if self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - self.created) > 2.0
        except psutil.NoSuchProcess:
            return True


@dataclass
class RunLock:
    """The right to use a run's directory, for one driver at a time.

    Args:
        run_dir: of the run, or of a sweep.
        tell: called once with what the driver waits for.
        clock: monotonic time in seconds.
        sleep: sleeps for a number of seconds.
    """

    run_dir: RunDir
    tell: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    claim: Claim = field(default_factory=Claim.of_this_process)
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Heartbeats of other claims, and since when they have stood still."""
    _alive: set[str] = field(default_factory=set)
    """Other claims that were seen to be alive, on this machine or by a heartbeat."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _taken_by: Claim | None = None

    def acquire(self) -> None:
        """Waits until no other driver uses the run, but not for long once one is known to be alive.

        Raises:
            RunInUseError: another driver is alive.
            OSError: the storage failed.
        """
        deadline, is_told = self.clock() + PATIENCE_S, False
        while True:
            others = self._living()
            if not others:
                self._write()
                if not (others := self._living()):
                    return
                self._delete(self.claim.name)
            alive = [claim for claim in others if claim.name in self._alive]
            if alive and self.clock() >= deadline:
                raise in_use(self.run_dir, alive[0])
            if not is_told:
                self.tell(f"waiting for {_driver(others[0])}, which uses this run if it is still alive")
                is_told = True
            self.sleep(PAUSE_S * (0.5 + random.random()))  # two that withdrew do not claim again at the same time

    def beat(self) -> None:
        """Shows that this driver is alive, or finds that another one has taken the run. Raises OSError."""
        if self._taken_by is None and not self.run_dir.exists(CLAIMS, f"{self.claim.name}.json"):
            self._taken_by = next(iter(self._living()), None)  # None if somebody has deleted the file by hand
        if self._taken_by is None:
            is_late = time.time() - self.claim.time >= LEASE_S / 2
            self.claim = replace(self.claim, beats=self.claim.beats + 1, time=time.time())
            self._write()
            if is_late:  # it stood still, and may have written the claim anew just after it was deleted
                self._taken_by = next(iter(self._living()), None)

    def check(self) -> None:
        """Raises RunInUseError if this driver stood still for so long that another one has taken the run."""
        if self._taken_by is not None:
            raise in_use(self.run_dir, self._taken_by)

    def hold(self) -> None:
        """Beats until `end`, and then ends the claim; runs in a thread of its own."""
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # tried again with the next one
                self.beat()
        self.close()

    def end(self) -> None:
        """Ends `hold`."""
        self._ended.set()

    def close(self) -> None:
        """Ends the claim. Nothing may beat any more, since that would write it anew."""
        with contextlib.suppress(OSError):
            self._delete(self.claim.name)

    def _living(self) -> list[Claim]:
        """Other claims that may be alive; deletes dead ones."""
        found = self.run_dir.filesystem.get_file_info(fs.FileSelector(self.run_dir.child(CLAIMS), allow_not_found=True))
        names = [info.base_name.removesuffix(".json") for info in found if info.base_name.endswith(".json")]
        others = []
        for name in names:
            if name == self.claim.name:
                continue
            claim = self._read(name)
            if claim is not None and self._is_dead(claim):
                self._delete(name)
            elif claim is not None:
                others.append(claim)
        return others

    def _is_dead(self, claim: Claim) -> bool:
        now = self.clock()
        is_known, is_here = claim.name in self._seen, claim.machine == self.claim.machine
        beats, since = self._seen.get(claim.name, (claim.beats, now))
        if is_here or beats != claim.beats:
            self._alive.add(claim.name)
        if not is_known or beats != claim.beats:
            self._seen[claim.name], since = (claim.beats, now), now
        if is_here:
            return claim.is_gone
        return now - since >= LEASE_S or abs(time.time() - claim.time) >= OUTDATED_S

    def _read(self, name: str) -> Claim | None:
        """None for a file that has just gone; one that cannot be read may be written at this moment."""
        try:
            return Claim(**self.run_dir.read_json(CLAIMS, f"{name}.json"))
        except FileNotFoundError:
            return None
        except (TypeError, ValueError):
            now = time.time()
            return Claim(name, "an unknown machine", 0, "", 0.0, since=now, beats=-1, time=now)

    def _write(self) -> None:
        self.run_dir.write_json(asdict(self.claim), CLAIMS, f"{self.claim.name}.json")

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.run_dir.filesystem.delete_file(self.run_dir.child(CLAIMS, f"{name}.json"))


@contextlib.contextmanager
def locked(run_dir: RunDir, tell: Callable[[str], None] = lambda text: None) -> Iterator[RunLock]:
    """The lock of a run, held for as long as the block lasts.

    Raises:
        RunInUseError: another driver is alive.
        StorageError: the storage failed.
    """
    lock = RunLock(run_dir, tell)
    try:
        lock.acquire()
    except OSError as error:
        raise StorageError(
            run_dir.path, error, "the storage can be read and written", "check it, and start again"
        ) from error
    thread = threading.Thread(target=lock.hold, name="driver's lock", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        lock.end()
        thread.join(LEASE_S)


def in_use(run_dir: RunDir, claim: Claim) -> RunInUseError:
    """The error for a run that another driver uses."""
    return RunInUseError(
        run_dir.path,
        f"in use by {_driver(claim)}",
        "one driver at a time uses the directory of a run or a sweep",
        "wait until that driver ends, stop it, or choose another run.name",
    )


def _driver(claim: Claim) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.since))
    return f"the driver with process {claim.pid} on {claim.host}, since {since}"


def _machine() -> str:
    """The same text for all processes that see this one under its number, and for no others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # without Linux's /proc
        with open("/proc/sys/kernel/random/boot_id") as boot:
            parts.append(boot.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
