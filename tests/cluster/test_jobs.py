"""The contract of a job on a cluster with a dashboard: what reaches its workers, what it ends with, and what it outlives."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raytrain.events.kinds import CheckpointSaved, Event, RunEnded, StateRestored, StepsDone
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from tests.support.job_head import Command, Head, project

pytestmark = pytest.mark.timeout(280)

JOB = '''
"""Fits a line, slowly while a file is there."""
import hashlib, os, time
from pathlib import Path
import raytrain, torch

def told(who):
    mine = hashlib.sha256(os.environ.get("MY_OWN", "").encode()).hexdigest()[:8]
    print(who, raytrain.__file__, os.environ.get("OMP_NUM_THREADS"), os.environ.get("NCCL_DEBUG"), mine, flush=True)

class Line(raytrain.Task):
    gate: str = ""
    fails: bool = False

    def data(self):
        return {"train": raytrain.arrays(x=torch.arange(64.0).reshape(32, 2) / 64)}

    def model(self):
        told("in the worker")
        return torch.nn.Linear(2, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        if self.gate and Path(self.gate).exists():
            time.sleep(0.3)
        if self.fails:
            raise KeyError("boom")
        return model(batch["x"]).square().mean(1)

if __name__ == "__main__":
    told("in the driver")
    raytrain.main(Line, global_batch=4, cpus_per_worker=0.5, checkpoint_every=10, epochs=30, audit=True)
'''
STEPS = 240
OURS = r"/tmp/ray/session_[^/]*/runtime_resources/working_dir_files/_ray_pkg_[0-9a-f]*/raytrain/__init__.py"
TOKENS = {"MY_OWN": secrets.token_hex(16), "UNNAMED_KEY": secrets.token_hex(16)}
"""One is named by --run.forward-env, one is not; neither is ever to be seen."""
GIVEN = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", **TOKENS}


@dataclass
class Place:
    """A cluster, and somebody's project and storage."""

    head: Head
    root: Path
    storage: Path
    gate: Path

    def raytrain(self, *words: str) -> Command:
        return Command(self.head, ["raytrain", words[0], "--address", self.head.address, *words[1:]], self.root)

    def run(self, name: str, *flags: str) -> list[str]:
        """The job's command line; a run that is slow."""
        return ["job.py", "--run.name", name, "--run.storage", str(self.storage), "--gate", str(self.gate), *flags]

    def submit(self, name: str, *ours: str) -> Command:
        """`raytrain submit`; the submission and the run have the same name."""
        return self.raytrain("submit", "--name", name, *ours, *self.run(name))

    def ray(self, *words: str, **more: Any) -> Command:
        """`ray job WORD --address ...`."""
        return Command(self.head, ["ray", "job", words[0], "--address", self.head.address, *words[1:]], self.root, **more)

    def ray_submit(self, name: str, *job: str, ours: tuple[str, ...] = ()) -> Command:
        """`ray job submit`."""
        return self.ray("submit", "--submission-id", name, "--working-dir", ".", *ours, "--", "python", *job)

    def run_dir(self, name: str) -> RunDir:
        return RunDir.at(str(self.storage), name)

    def events(self, name: str) -> list[Event]:
        return list(read(self.run_dir(name)))

    def told(self, name: str) -> tuple[str, int | None]:
        """Status and exit code of the driver, as the cluster knows them."""
        info = self.head.ask(f"jobs/{name}")
        return info["status"], info["driver_exit_code"]

    def wait_for_checkpoint(self, name: str, limit_s: float = 90.0) -> None:
        until = time.monotonic() + limit_s
        while not [event for event in self.events(name) if isinstance(event, CheckpointSaved)]:
            assert time.monotonic() < until, f"{name} saved nothing"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("jobs")
    (base / "gate").touch()
    root = project(base / "project", {"job.py": JOB, ".gitignore": "*.csv\n"})
    with Head(base / "home") as head:
        yield Place(head, root, base / "storage", base / "gate")


@dataclass
class Ended:
    """Commands that have ended, by the name of the job: their exit codes, what they wrote, and what the cluster says."""

    codes: dict[str, int] = field(default_factory=dict)
    outs: dict[str, str] = field(default_factory=dict)
    told: dict[str, tuple[str, int | None]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def ended(place: Place) -> Ended:
    """Jobs that come to their end by themselves, and one that is stopped; all at the same time."""
    given = ("--no-wait", "--runtime-env-json", json.dumps({"env_vars": GIVEN}))
    slow = place.ray_submit("slow", *place.run("slow", "--run.forward-env", "MY_OWN"), ours=given)
    failing = place.ray_submit("failing", *place.run("failing", "--fails"))
    wrong = place.raytrain("submit", "jobs/digits.py", "--name", "wrong", "--follow", "--hiden", "3")
    digits = place.ray_submit("digits", "jobs/digits.py", "--run.epochs", "1", "--run.workers", "1")
    assert slow.finish() == 0, slow.out
    left_alone = place.raytrain("submit", "--attach", "slow")
    left_alone.read_until("in the driver")
    left_alone.interrupt()
    followed = place.raytrain("submit", "--attach", "slow")
    place.wait_for_checkpoint("slow")
    ended = Ended({"stop": place.ray("stop", "slow").finish()})
    ends = {"failing": failing, "wrong": wrong, "digits": digits, "left alone": left_alone, "slow": followed}
    for name, command in ends.items():
        ended.codes[name] = command.finish(120)
        ended.outs[name] = command.out
    ended.told = {name: place.told(name) for name in ("failing", "wrong", "digits", "slow")}
    return ended


def test_r16_a_plain_ray_job_submit_works_with_raytrain_from_the_working_directory(ended: Ended) -> None:
    assert (ended.codes["digits"], ended.told["digits"]) == (0, ("SUCCEEDED", 0)), ended.outs["digits"]
    assert "completed    step 23 of 23" in ended.outs["digits"]
    for who in ("in the driver", "in the worker"):
        assert re.search(f"{who} {OURS} ", ended.outs["slow"]), ended.outs["slow"]


def test_r11_a_relative_storage_of_a_job_is_kept_where_it_outlives_the_cluster(ended: Ended, place: Place) -> None:
    assert f"the run is kept in {place.head.home}/runs/digits, since" in ended.outs["digits"]
    assert RunDir.at(str(place.head.home / "runs"), "digits").exists("events.jsonl")


def test_r18_the_jobs_runtime_env_wins_and_reaches_the_workers(ended: Ended) -> None:
    out, mine = ended.outs["slow"], hashlib.sha256(TOKENS["MY_OWN"].encode()).hexdigest()[:8]
    assert "Failed to merge" not in out
    for who in ("in the driver", "in the worker"):
        assert re.search(f"{who} .* 2 INFO {mine}", out), out
    assert "1 thread per worker" in out


def test_r18_a_secret_is_written_nowhere(ended: Ended, place: Place) -> None:
    files = [path for path in Path(place.run_dir("slow").path).rglob("*") if path.is_file()]
    assert {"events.jsonl", "run.json", "manifest.json"} <= {path.name for path in files}
    for value in TOKENS.values():
        assert not [path for path in files if value.encode() in path.read_bytes()]
        assert value not in ended.outs["slow"]


def test_r16_a_user_exception_fails_the_job_with_its_traceback_once(ended: Ended) -> None:
    out = ended.outs["failing"]
    assert (ended.codes["failing"], ended.told["failing"]) == (1, ("FAILED", 1)), out
    lines = out.partition("Job 'failing' failed")[0].splitlines()  # after which Ray shows the log's last lines once more
    assert lines.count("Traceback (most recent call last):") == lines.count("KeyError: 'boom'") == 1
    assert "raytrain/" not in "".join(lines[lines.index("Traceback (most recent call last):") :])


def test_r16_a_wrong_flag_ends_with_2_through_raytrain_submit(ended: Ended) -> None:
    out = ended.outs["wrong"]
    assert (ended.codes["wrong"], ended.told["wrong"]) == (2, ("FAILED", 2)), out
    assert out.count("fix:   did you mean --hidden?") == 1
    assert out.endswith("wrong: failed with exit code 2\n")


def test_ctrl_c_of_who_follows_leaves_the_job_alone(ended: Ended, place: Place) -> None:
    out = ended.outs["left alone"]
    assert ended.codes["left alone"] == 130, out
    assert f"slow goes on\n  follow: raytrain submit --attach slow --address {place.head.address}\n" in out


def test_r16_a_stopped_job_ends_with_143_and_a_checkpoint_of_the_step_it_was_at(ended: Ended, place: Place) -> None:
    assert (ended.codes["stop"], ended.codes["slow"], ended.told["slow"]) == (0, 143, ("STOPPED", None)), ended.outs["slow"]
    events = place.events("slow")
    (last,) = [event for event in events if isinstance(event, RunEnded)]
    steps = max(event.first_step + len(event.losses) for event in events if isinstance(event, StepsDone))
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert last.outcome == "stopped"
    assert 0 < steps < STEPS
    assert saved[-1] == last.step == steps


def test_r16_a_followed_log_is_whole_lines_and_each_of_them_once(ended: Ended) -> None:
    out = ended.outs["slow"]
    assert "\r" not in out
    assert [out.count(line) for line in ("Running entrypoint for job slow", "starting workers", "stopped      step ")] == [
        1,
        1,
        1,
    ]
    assert out.endswith("slow: stopped\n")


@pytest.mark.usefixtures("ended")
def test_a_cluster_that_asks_for_a_token_says_so(place: Place) -> None:
    words = ["raytrain", "submit", "job.py", "--address", place.head.address]
    wrong: list[dict[str, str]] = [{"RAY_AUTH_TOKEN": "wrong-" * 8}, {"RAY_AUTH_MODE": "disabled"}]
    refused = [Command(place.head, words, place.root, more) for more in wrong]
    for command in refused:
        assert command.finish() == 2, command.out
        assert "error: RAY_AUTH_TOKEN\n" in command.out
        assert "fix:   set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in command.out


@pytest.fixture(scope="module")
def survived(place: Place, ended: Ended) -> Ended:
    """The head is killed while two jobs train; one is submitted again by itself, one by hand, on another head."""
    assert ended
    followed = place.submit("followed", "--follow", "--retries", "1", "--reconnect", "90")
    by_hand = place.submit("by-hand")
    assert by_hand.finish() == 0, by_hand.out
    for name in ("followed", "by-hand"):
        place.wait_for_checkpoint(name)
    place.head.kill()
    followed.read_until("the cluster does not answer")
    place.gate.unlink()
    place.head.start()
    again = place.submit("by-hand", "--follow")
    found = Ended()
    for name, command in {"followed": followed, "by-hand": again}.items():
        found.codes[name] = command.finish(120)
        found.outs[name] = command.out
    return found


@pytest.mark.parametrize("name", ["followed", "by-hand"])
def test_r10_a_job_that_lost_its_cluster_goes_on_from_its_checkpoint_on_another_one(
    survived: Ended, place: Place, name: str
) -> None:
    assert survived.codes[name] == 0, survived.outs[name]
    restored = [event.step for event in place.events(name) if isinstance(event, StateRestored)]
    assert (len(restored), restored[0]) == (2, 0)
    assert 0 < restored[1] < STEPS
    report = audit(place.run_dir(name))
    assert report.passed, report.lines()


def test_a_lost_job_was_submitted_again_once(survived: Ended) -> None:
    assert survived.outs["followed"].count("submitting it again as followed-2") == 1
    assert survived.outs["followed"].endswith("followed-2: succeeded\n")
