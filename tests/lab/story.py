"""Played by `tests.lab.test_lab` in namespaces of its own: what happens to a real cluster, from `ray up` to `ray down`.

One host that never trains and three that do train jobs/digits.py; a cable is pulled and plugged in again, a host loses
its power, another one is announced to go. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytrain.cluster.fault_injection import drain, worker_nodes_at
from raytrain.cluster.file.render import render
from raytrain.cluster.file.spec import ClusterSpec
from raytrain.events.curve import curve
from raytrain.events.kinds import RunEnded, StateRestored, WorkerDrained
from raytrain.events.log import read
from raytrain.rundir import RunDir
from tests.cluster.script import Script, seen, trained
from tests.lab.hosts import NETWORK, Host, build, first_processes
from tests.lab.laptop import Laptop

HEAD = f"{NETWORK}.1"
CLUSTER = f"{HEAD}:6379"
DASHBOARD = "http://127.0.0.1:8265"
NAME = "digits"
FLAGS = ("--run.logical-workers", "3", "--run.eval-every", "500", "--run.exactness", "bitwise")
DIGITS = ("python", "jobs/digits.py", "--run.name", NAME, *FLAGS)
ENDLESS = "1000000"
NOTICE_S = 5.0
LIMIT_S = 100.0


class Watched(Script):
    """A run that is watched through its storage."""

    def __init__(self, storage: Path) -> None:
        super().__init__()
        self.run_dir = RunDir.at(str(storage), NAME)
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        """When something was seen, in seconds since the beginning."""

    def act(self) -> None:
        """Only watches."""

    def until(self, condition: Callable[[Any], bool], what: str) -> None:
        """Waits for something to be told."""
        wait(lambda: self._refreshed() and condition(self), what)
        self.note(what)

    def note(self, what: str) -> None:
        """Something has happened just now."""
        self.seconds[what] = round(time.monotonic() - self._began, 1)

    def _refreshed(self) -> bool:
        self.events = list(read(self.run_dir))
        return bool(self.events)


def wait(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"waited {LIMIT_S:g} s for: {what}")
        time.sleep(0.2)


def start_cluster(laptop: Laptop, workers: list[Host]) -> None:
    """As on the first day: a token, a cluster file, and `ray up`."""
    laptop.run("ray", "get-auth-token", "--generate")
    spec = ClusterSpec(
        provider="local",
        head_ip=HEAD,
        worker_ips=tuple(host.address for host in workers),
        ssh_user="root",
        ssh_key=str(laptop.key),
        worker_cpus=1,
        object_store_memory=100_000_000,
        setup="none",
    )
    laptop.file.write_text(render(spec))
    laptop.run("raytrain", "cluster", "check", str(laptop.file), "--workers", "1:3")
    laptop.run("ray", "up", "-y", "--no-config-cache", str(laptop.file))
    wait(lambda: all(worker_nodes_at(CLUSTER, host.address) for host in workers), "all workers' nodes")


def disturb(run: Watched, workers: list[Host]) -> None:
    """A host is cut off and comes back, one loses its power, one is announced to go, and goes."""
    run.until(trained(3), "three hosts train")
    workers[2].unplug()
    run.until(trained(2), "one was cut off")
    workers[2].plug_in()
    run.until(trained(3), "it is back")
    workers[1].power_off()
    run.until(trained(2), "one lost its power")
    [node] = worker_nodes_at(CLUSTER, workers[0].address)
    noticed = time.monotonic()
    drain(CLUSTER, node, NOTICE_S, "maintenance")
    run.until(seen(WorkerDrained), "one left as it was announced to")
    run.until(trained(1), "the last one goes on")
    time.sleep(max(0.0, noticed + NOTICE_S - time.monotonic()))
    workers[0].power_off()


def main(lab: Path) -> None:
    hosts = build(lab, 4)
    head, *workers = hosts
    laptop = Laptop(lab)
    boots = len(first_processes())
    run = Watched(lab / "shared")
    start_cluster(laptop, workers)
    run.note("ray up")
    tunnel = laptop.start("ray", "dashboard", "--no-config-cache", str(laptop.file))
    wait(lambda: laptop.try_to("ray", "job", "list", "--address", DASHBOARD).returncode == 0, "the dashboard")

    submit = ("ray", "job", "submit", "--address", DASHBOARD, "--working-dir", ".")
    flags = ("--run.workers", "1:3", "--run.storage", "/mnt", "--run.steps")
    refused = laptop.try_to(*submit, "--", *DIGITS, "--run.storage", "/root/runs")
    job = laptop.start(*submit, "--submission-id", "first", "--", *DIGITS, *flags, ENDLESS)
    disturb(run, workers)
    laptop.run("ray", "job", "stop", "--address", DASHBOARD, "first")
    run.until(seen(RunEnded), "stopped")
    stopped = run.of(RunEnded)[0].step
    log, _ = job.communicate(timeout=LIMIT_S)
    last = str(stopped + 500)
    alone = laptop.start(*DIGITS, "--run.workers", "1", "--run.storage", str(lab / "alone"), "--run.steps", last)
    again = laptop.run(*submit, "--", *DIGITS, *flags, last)
    run.until(seen(RunEnded, 2), "completed")
    tunnel.terminate()
    laptop.run("ray", "down", "-y", str(laptop.file))
    wait(lambda: not any("raylet" in line for host in (head, workers[2]) for line in host.commands()), "Ray's end")
    run.note("ray down")

    said, _ = alone.communicate(timeout=LIMIT_S)
    assert alone.returncode == 0, said
    answer = {
        "seconds": run.seconds,
        "boots": boots,
        "stopped": stopped,
        "refused": [refused.returncode, refused.stdout],
        "log": log,
        "again": again,
        "restored": [event.step for event in run.of(StateRestored)],
        "outcomes": [event.outcome for event in run.of(RunEnded)],
        "nodes": sorted({member.node for event in run.events for member in getattr(event, "members", [])}),
        "losses": losses(run.run_dir),
        "alone": losses(RunDir.at(str(lab / "alone"), NAME)),
    }
    print(json.dumps(answer))


def losses(run_dir: RunDir) -> list[float]:
    return [record.loss for _, record in sorted(curve(read(run_dir)).items())]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
