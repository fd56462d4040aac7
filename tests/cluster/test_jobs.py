"""The contract of a job on a cluster with a dashboard: what reaches its workers, its exit code, and the loss of its head.

One story: four jobs run side by side; one of them loses its head, resumes on another one, and is stopped there.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain.events.kinds import CheckpointSaved, RunEnded, StateRestored, StepsDone
from raytrain.events.log import read
from raytrain.report.audit import audit
from raytrain.rundir import RunDir
from tests.support.job_head import Command, Head, project

pytestmark = pytest.mark.timeout(280)

JOB = '''
"""Fits a line, slowly while a file exists."""
import hashlib, os, time
from pathlib import Path
import raytrain, torch

def report(who):
    mine = hashlib.sha256(os.environ.get("MY_OWN", "").encode()).hexdigest()[:8]
    print(who, raytrain.__file__, os.environ.get("OMP_NUM_THREADS"), os.environ.get("NCCL_DEBUG"), mine, flush=True)

class Line(raytrain.Task):
    gate: str = ""
    fails: bool = False

    def data(self):
        return {"train": raytrain.arrays(x=torch.arange(64.0).reshape(32, 2) / 64)}

    def model(self):
        report("in the worker")
        return torch.nn.Linear(2, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model, batch):
        if self.gate and Path(self.gate).exists():
            time.sleep(0.2)
        if self.fails:
            raise KeyError("boom")
        return model(batch["x"]).square().mean(1)

if __name__ == "__main__":
    report("in the driver")
    raytrain.main(Line, global_batch=4, workers=1, cpus_per_worker=0.5, checkpoint_every=5, epochs=100, audit=True)
'''
STEPS = 800
OURS = r"/tmp/ray/session_[^/]*/runtime_resources/working_dir_files/_ray_pkg_[0-9a-f]*/raytrain/__init__.py"
TOKENS = {"MY_OWN": secrets.token_hex(16), "UNNAMED_KEY": secrets.token_hex(16)}
"""Secrets: one is named by --run.forward-env, both are in the job's runtime_env; neither may be seen."""


class Story:
    """Plays the story.

    Args:
        base: directory of the project, the storage and the head's home.
    """

    def __init__(self, base: Path) -> None:
        self.head, self._gate, self.storage = Head(base / "home"), base / "gate", base / "storage"
        self._gate.touch()
        self._root = project(base / "project", {"job.py": JOB, ".gitignore": "*.csv\n"})
        self.commands: dict[str, Command] = {}
        self.told: dict[str, tuple[str, int | None]] = {}
        """Status and exit code of each driver, as the cluster knows them."""

    def play(self) -> None:
        self.head.start()
        given = ("--env", "OMP_NUM_THREADS=2", "--env=NCCL_DEBUG=INFO", "--env", "MY_OWN", "--env", "UNNAMED_KEY")
        run = ("--run.storage", str(self.storage), "--gate", str(self._gate), "--run.forward-env", "MY_OWN")
        retried = (*given, "--follow", "--retries", "1", "--reconnect", "90")
        self._submit("slow", *retried, "job.py", "--run.name", "slow", *run, more=TOKENS)
        self._submit("failing", "--follow", "job.py", "--fails", "--run.name", "failing", "--run.storage", str(self.storage))
        self._submit("wrong", "--follow", "job.py", "--gatt", "x")
        plain = ["ray", "job", "submit", "--address", self.head.address, "--submission-id", "short", "--working-dir", "."]
        self._start("short", [*plain, "--", "python", "job.py", "--run.name", "short", "--run.epochs", "2"])
        self.commands["slow"].read_until("in the worker")
        self._start("left alone", ["raytrain", "submit", "--address", self.head.address, "--attach", "slow"])
        self.commands["left alone"].read_until("in the driver")
        self.commands["left alone"].interrupt()
        for name in ("left alone", "failing", "wrong", "short"):
            self.commands[name].finish()
        self._ask("failing", "wrong", "short")
        self._wait_for_checkpoints(1)
        self.head.kill()
        self.commands["slow"].read_until("the cluster does not answer")
        self.head.start()
        self._submit("no token", "job.py", more={"RAY_AUTH_MODE": "disabled"})
        self._wait_for_checkpoints(2)
        self.head.request("jobs/slow-2/stop", "POST")
        self.commands["slow"].finish()
        self.commands["no token"].finish()
        self._ask("slow-2")

    def _start(self, name: str, words: list[str], more: dict[str, str] | None = None) -> None:
        self.commands[name] = Command(self.head, words, self._root, more)

    def _submit(self, name: str, *words: str, more: dict[str, str] | None = None) -> None:
        ours = ["raytrain", "submit", "--address", self.head.address, "--name", name.replace(" ", "-")]
        self._start(name, [*ours, *words], more)

    def _ask(self, *names: str) -> None:
        for name in names:
            info = self.head.request(f"jobs/{name}")
            self.told[name] = info["status"], info["driver_exit_code"]

    def _wait_for_checkpoints(self, num_starts: int, timeout_s: float = 90.0) -> None:
        """Until the run has saved a checkpoint after so many starts."""
        deadline = time.monotonic() + timeout_s
        while True:
            kinds = [type(event) for event in read(self.run_dir("slow"))]
            starts = [number for number, kind in enumerate(kinds) if kind is StateRestored]
            if len(starts) >= num_starts and CheckpointSaved in kinds[starts[-1] :]:
                return
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.1)

    def run_dir(self, name: str) -> RunDir:
        return RunDir.at(str(self.storage), name)

    def out(self, name: str) -> str:
        return self.commands[name].out


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    story = Story(tmp_path_factory.mktemp("jobs"))
    try:
        story.play()
        yield story
    finally:
        story.head.kill()


@pytest.mark.parametrize(
    ("command", "code", "job", "told"),
    [
        ("short", 0, "short", ("SUCCEEDED", 0)),
        ("failing", 1, "failing", ("FAILED", 1)),
        ("wrong", 2, "wrong", ("FAILED", 2)),
        ("slow", 143, "slow-2", ("STOPPED", None)),
    ],
)
def test_r16_exit_code_and_status_of_a_job(
    story: Story, command: str, code: int, job: str, told: tuple[str, int | None]
) -> None:
    assert (story.commands[command].code, story.told[job]) == (code, told), story.out(command)


def test_r16_a_plain_ray_job_submit_runs_raytrain_from_the_working_directory(story: Story) -> None:
    assert "completed    step 16 of 16" in story.out("short")
    for who in ("in the driver", "in the worker"):
        assert re.search(f"{who} {OURS} ", story.out("short")), story.out("short")


def test_r11_a_relative_storage_of_a_job_outlives_its_working_directory(story: Story) -> None:
    assert f"the run is stored in {story.head.home}/runs/short, because" in story.out("short")
    assert RunDir.at(str(story.head.home / "runs"), "short").exists("events.jsonl")


def test_r16_a_user_exception_is_logged_once(story: Story) -> None:
    lines = story.out("failing").splitlines()
    assert lines.count("Traceback (most recent call last):") == lines.count("KeyError: 'boom'") == 1
    assert "raytrain/" not in "".join(
        lines[lines.index("Traceback (most recent call last):") : lines.index("KeyError: 'boom'")]
    )
    assert lines[-1] == "failing: failed with exit code 1"


def test_r16_a_wrong_flag_is_explained_once(story: Story) -> None:
    assert story.out("wrong").count("fix:   did you mean --gate?") == 1
    assert story.out("wrong").endswith("wrong: failed with exit code 2\n")


def test_r18_the_runtime_env_of_a_job_reaches_its_workers(story: Story) -> None:
    mine = hashlib.sha256(TOKENS["MY_OWN"].encode()).hexdigest()[:8]
    assert "Failed to merge" not in story.out("slow")
    for who in ("in the driver", "in the worker"):
        assert re.search(f"{who} .* 2 INFO {mine}", story.out("slow")), story.out("slow")


def test_r18_a_secret_is_written_nowhere(story: Story) -> None:
    files = [path for path in Path(story.run_dir("slow").path).rglob("*") if path.is_file()]
    assert {"events.jsonl", "run.json", "manifest.json"} <= {path.name for path in files}
    for value in TOKENS.values():
        assert not [path for path in files if value.encode() in path.read_bytes()]
        assert value not in story.out("slow")


def test_ctrl_c_of_a_follower_leaves_the_job_running(story: Story) -> None:
    assert story.commands["left alone"].code == 130, story.out("left alone")
    assert f"slow keeps running\n  follow: raytrain submit --attach slow --address {story.head.address}\n" in story.out(
        "left alone"
    )


def test_r10_a_job_that_lost_its_cluster_resumes_on_another_one(story: Story) -> None:
    events = list(read(story.run_dir("slow")))
    restored = [event.step for event in events if isinstance(event, StateRestored)]
    assert (len(restored), restored[0]) == (2, 0), story.out("slow")
    assert 0 < restored[1] < STEPS
    assert story.out("slow").count("submitting it again as slow-2") == 1
    report = audit(story.run_dir("slow"))
    assert report.passed, report.lines()


def test_r16_a_stopped_job_saves_a_checkpoint_of_its_last_step(story: Story) -> None:
    events = list(read(story.run_dir("slow")))
    (last,) = [event for event in events if isinstance(event, RunEnded)]
    steps = max(event.first_step + len(event.losses) for event in events if isinstance(event, StepsDone))
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert last.outcome == "stopped"
    assert saved[-1] == last.step == steps < STEPS


def test_r16_a_followed_log_shows_each_line_once(story: Story) -> None:
    out = story.out("slow")
    once = ("Running entrypoint for job slow:", "Running entrypoint for job slow-2:", "stopped      step ")
    assert [out.count(line) for line in once] == [1, 1, 1], out
    assert "\r" not in out
    assert out.endswith("slow-2: stopped\n")


def test_a_cluster_that_requires_a_token_says_so(story: Story) -> None:
    assert story.commands["no token"].code == 2
    assert "error: RAY_AUTH_TOKEN\n" in story.out("no token")
    assert "fix:   set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in story.out("no token")
