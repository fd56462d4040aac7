"""Run in namespaces of its own by `tests.cluster.test_namespaces`: one of two hosts is cut off from the other.

The second host is a network namespace with one cable to this one. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ray

from raytrain.events.kinds import GenerationFormed, StateRestored, WorkerLost
from tests.cluster.script import Story, run, seen, then, trained

HERE, THERE, PORT = "10.77.1.1", "10.77.1.2", "6399"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def lay_cable(pid: int) -> None:
    """A cable between this network and that of a process."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(pid))
    ip("addr", "add", f"{HERE}/24", "dev", "here")
    ip("link", "set", "here", "up")
    for words in (["lo", "up"], ["there", "up"]):
        subprocess.run([*inside(pid), "ip", "link", "set", *words], check=True)
    subprocess.run([*inside(pid), "ip", "addr", "add", f"{THERE}/24", "dev", "there"], check=True)


def inside(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def start_ray(*words: str, before: tuple[str, ...] = ()) -> None:
    command = [*before, str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(storage: Path) -> None:
    other = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    while os.readlink(f"/proc/{other.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        pass
    lay_cable(other.pid)
    start_ray("--head", f"--node-ip-address={HERE}", f"--port={PORT}", "--include-dashboard=false")
    start_ray(f"--address={HERE}:{PORT}", f"--node-ip-address={THERE}", before=tuple(inside(other.pid)))
    ray.init(address=f"{HERE}:{PORT}", _node_ip_address=HERE, log_to_driver=False)
    gate = storage / "gate"
    gate.touch()
    cut = then(lambda _: ip("link", "set", "here", "down"))
    story = Story(gate, trained(2), cut, seen(WorkerLost), trained(1))
    _, events = run(storage, story, gate, workers=(1, 2), logical_workers=4, cpus_per_worker=1.0)
    generations = [event for event in events if isinstance(event, GenerationFormed)]
    number, formed = next((i, event) for i, event in enumerate(generations) if event.cause == "loss")
    answer = {
        "nodes": sorted(member.node for member in generations[number - 1].members),
        "seconds": formed.time - story.times[1],
        "reason": story.of(WorkerLost)[0].reason,
        "restored": [event.step for event in events if isinstance(event, StateRestored)],
    }
    print(json.dumps(answer))
    ray.shutdown()
    other.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
