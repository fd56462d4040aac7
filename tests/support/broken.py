"""Run in namespaces of its own by `tests.cluster.test_namespaces`: storage that fails, and one of two hosts that is cut off.

A small filesystem lies where the run keeps its checkpoints; its log is elsewhere. It is full while the leader dies in a
save, then read-only, then full for a moment. The second host is a network namespace with one cable to this one, which is cut
at the end. Prints what happened as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray

from raytrain.checkpoint.store import MANIFEST, CheckpointStore
from raytrain.events.kinds import CheckpointFailed, CheckpointSaved, Event, GenerationFormed, StateRestored, WorkerLost
from raytrain.rundir import CHECKPOINTS, RunDir
from tests.cluster.script import Part, Story, run, seen, then, trained

HERE, THERE, PORT = "10.77.1.1", "10.77.1.2", "6399"
SIZE = "1m"
"""Room for dozens of the run's checkpoints."""
NEXT_ATTEMPT_S = 0.25
"""The store pauses for longer than that before it writes a file again; writing one takes less."""
PAUSES_S = 1.4
"""The pauses before the second and the third attempt take longer than that."""


class SmallDisk:
    """A filesystem mounted at a directory, with the ways to break it and to mend it."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler, self._told_when_emptied = path, path / "filler", -1
        self.left_behind = ""
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)], check=True)

    def fill(self) -> None:
        """Takes what is free at this moment."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def empty(self, _: Story) -> bool:
        self._filler.unlink()
        return True

    def remounted(self, mode: str) -> Part:
        """Until it could be made "ro" or "rw", which is not possible while a file is being written."""
        command = ["mount", "-o", f"remount,{mode}", str(self.path)]
        return lambda _: subprocess.run(command, check=False, capture_output=True).returncode == 0

    def filled_until(self, check: Part) -> Part:
        """Fills it again and again, since a checkpoint that is deleted makes room for the next one."""

        def part(story: Story) -> bool:
            self.fill()
            return check(story)

        return part

    def leader_dies_in_a_save(self, story: Story) -> bool:
        for directory in self._unfinished()[:1]:
            os.kill(story.members[0].pid, signal.SIGKILL)
            self.left_behind = directory.name
        return bool(self.left_behind)

    def full_until_it_is_written_again(self, story: Story) -> bool:
        """Two writes of a file fail and the third one does not; tried anew where it came too late on a slow machine."""
        since = story.times[-1]
        saved = [event for event in story.of(CheckpointSaved) if event.time > since]
        if any(event.seconds > PAUSES_S for event in saved):
            return True
        told = len(saved) + len([event for event in story.of(CheckpointFailed) if event.time > since])
        if told == self._told_when_emptied:
            return False
        if self._is_written_again():
            self._told_when_emptied = told
            return not self.empty(story)
        self.fill()
        return False

    def _unfinished(self) -> list[Path]:
        return [path for path in self.path.glob("step-*") if not (path / MANIFEST).exists()]

    def _is_written_again(self) -> bool:
        """Whether somebody writes a file for the second time, the first one having failed."""
        with contextlib.suppress(FileNotFoundError):
            for directory in self._unfinished():
                made = directory.stat().st_mtime
                if any(file.stat().st_mtime > made + NEXT_ATTEMPT_S for file in directory.iterdir()):
                    return True
        return False


def newer(kind: type[Event], num_steps: int = 1) -> Part:
    """Until there are events of a kind, of so many steps, that are newer than the last part."""
    return lambda story: len({event.step for event in story.of(kind) if event.time > story.times[-1]}) >= num_steps


def ip(*words: str, before: tuple[str, ...] = ()) -> None:
    subprocess.run([*before, "ip", *words], check=True)


def start_hosts() -> subprocess.Popen[bytes]:
    """Ray on this host and on a second one, whose first process is returned; this process is connected to it."""
    other = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    while os.readlink(f"/proc/{other.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        pass
    inside = ("nsenter", f"--net=/proc/{other.pid}/ns/net")
    ip("link", "set", "lo", "up")
    ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(other.pid))
    ip("addr", "add", f"{HERE}/24", "dev", "here")
    ip("link", "set", "here", "up")
    ip("link", "set", "lo", "up", before=inside)
    ip("link", "set", "there", "up", before=inside)
    ip("addr", "add", f"{THERE}/24", "dev", "there", before=inside)
    start = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", "--object-store-memory=80000000"]
    head = [*start, "--head", f"--node-ip-address={HERE}", f"--port={PORT}", "--include-dashboard=false"]
    subprocess.run(head, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = [*inside, *start, f"--address={HERE}:{PORT}", f"--node-ip-address={THERE}"]
    subprocess.run(second, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ray.init(address=f"{HERE}:{PORT}", _node_ip_address=HERE, log_to_driver=False)
    return other


def told(events: list[Any], start: float, end: float) -> dict[str, Any]:
    """What the run told of its checkpoints in some time."""
    failed = [event for event in events if isinstance(event, CheckpointFailed) and start < event.time < end]
    saved = [event for event in events if isinstance(event, CheckpointSaved) and start < event.time < end]
    return {
        "failures": [event.reason for event in failed],
        "steps_meanwhile": failed[-1].step - failed[0].step if failed else 0,
        "longest_save_s": max(event.seconds for event in saved),
    }


def whole(run_dir: RunDir) -> list[str]:
    """The checkpoints that the store lists, each of which is read."""
    store = CheckpointStore(run_dir)
    found = store.list()
    assert all(store.read(checkpoint, name) for checkpoint in found for name in checkpoint.manifest.files)
    return sorted(checkpoint.name for checkpoint in found)


def main(storage: Path) -> None:
    disk = SmallDisk(storage / "run" / CHECKPOINTS)
    other = start_hosts()
    gate = storage / "gate"
    gate.touch()
    cut = then(lambda _: ip("link", "set", "here", "down"))
    full, read_only, mended = disk.filled_until(newer(CheckpointFailed)), disk.remounted("ro"), disk.remounted("rw")
    parts = [
        *(trained(2), seen(CheckpointSaved), full, disk.leader_dies_in_a_save, seen(WorkerLost), newer(CheckpointFailed)),
        *(disk.empty, newer(CheckpointSaved), read_only, newer(CheckpointFailed, num_steps=2), mended),
        *(newer(CheckpointSaved), trained(2), disk.full_until_it_is_written_again, cut, seen(WorkerLost, 2), trained(1)),
    ]
    story = Story(gate, *parts)
    more = {"workers": (1, 2), "logical_workers": 4, "cpus_per_worker": 1.0, "epochs": 8, "checkpoint_every": 2}
    run_dir, events = run(storage, story, gate, **more)
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    number, left = next((i, event) for i, event in enumerate(generations) if event.time > story.time_of(cut))
    before = [story.times[parts.index(part) - 1] for part in (full, read_only)]
    again = story.times[parts.index(disk.full_until_it_is_written_again) - 1]
    answer = {
        "full": told(events, *before),
        "read-only": told(events, before[1], again),
        "full for a moment": told(events, again, story.time_of(cut)),
        "left_behind": disk.left_behind,
        "restored": [event.step for event in events if isinstance(event, StateRestored)],
        "there": sorted(os.listdir(disk.path)),
        "whole": whole(run_dir),
        "nodes": sorted(member.node for member in generations[number - 1].members),
        "cut off": [left.cause, left.time - story.time_of(cut)],
    }
    print(json.dumps(answer))
    ray.shutdown()
    other.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
