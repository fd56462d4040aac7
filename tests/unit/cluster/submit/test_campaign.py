"""Exit codes of jobs, and when a job is submitted again: after the loss of its cluster, and never else."""

from __future__ import annotations

import pytest

from raytrain.cluster.submit import campaign as module
from raytrain.cluster.submit import follow
from raytrain.cluster.submit.campaign import Campaign, again, exit_code, last_words
from raytrain.cluster.submit.follow import Ending
from raytrain.cluster.submit.jobs import Job, NoAnswerError, State
from raytrain.errors import ResourceError
from tests.unit.cluster.submit.test_follow import RUNNING, SUCCEEDED, UNKNOWN, Fake

JOB = Job("digits-ab12", "python digits.py", {})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (follow, module):
        monkeypatch.setattr(each, "ASK_EVERY_S", 0.001)
    monkeypatch.setattr(follow, "QUIET_S", 0.001)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (SUCCEEDED, 0),
        (State("FAILED", 1), 1),
        (State("FAILED", 2), 2),
        (State("FAILED", 137), 137),
        (State("FAILED", -9), 137),
        (State("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE"), 1),
        (State("STOPPED"), 143),
    ],
)
def test_r16_the_exit_code_is_that_of_the_job(state: State, code: int) -> None:
    assert exit_code(Ending("ended", state)) == code


def test_a_job_whose_end_is_not_known_has_failed() -> None:
    assert [exit_code(Ending(kind, RUNNING)) for kind in ("lost", "silent")] == [1, 1]


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (Ending("ended", SUCCEEDED), "d: succeeded"),
        (Ending("ended", State("STOPPED")), "d: stopped"),
        (Ending("ended", State("FAILED", -9)), "d: failed with exit code 137"),
        (Ending("ended", State("FAILED", None, "X", "pip failed")), "d: failed before it ran: pip failed"),
        (Ending("silent", RUNNING, "refused"), "d: the cluster did not answer any more (refused); the job may go on"),
        (Ending("lost", RUNNING, "x"), "d: lost with its cluster (x); submitted again, its run goes on from its checkpoint"),
    ],
)
def test_the_last_words_say_how_it_ended(ending: Ending, words: str) -> None:
    assert last_words("d", ending) == words


class Cluster(Fake):
    """Takes jobs as well.

    Args:
        answers: to submissions, in order: None, or an error.
    """

    def __init__(self, streams: list[list[object]], states: list[object], answers: list[Exception | None]) -> None:
        super().__init__(streams, states)
        self.answers, self.submitted = answers, []

    def submit(self, job: Job) -> None:
        self.submitted.append(job)
        if error := self.answers.pop(0):
            raise error


def carried_out(cluster: Cluster, retries: int, limit_s: float = 60, job: Job | None = JOB) -> tuple[int, list[str]]:
    said: list[str] = []
    return Campaign(cluster, JOB.name, job, retries, limit_s, said.append, said.append).run(), said


def test_a_lost_job_is_submitted_again_and_its_log_shown_from_the_beginning() -> None:
    cluster = Cluster([["one\n", NoAnswerError("x")], ["one\n", "two\n"]], [UNKNOWN, SUCCEEDED], [None])
    code, said = carried_out(cluster, retries=1)
    assert (code, [job.name for job in cluster.submitted]) == (0, ["digits-ab12-2"])
    assert cluster.submitted[0].entrypoint == JOB.entrypoint
    assert [line for line in said if not line.startswith("lost")] == ["one", "one", "two", "digits-ab12-2: succeeded"]


def test_it_is_submitted_again_as_often_as_allowed_and_no_more() -> None:
    cluster = Cluster([[], [], []], [UNKNOWN], [None, None])
    code, said = carried_out(cluster, retries=2)
    assert (code, [job.name for job in cluster.submitted]) == (1, ["digits-ab12-2", "digits-ab12-3"])
    assert said[-1].startswith("digits-ab12-3: lost with its cluster")


@pytest.mark.parametrize("state", [State("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR"), State("STOPPED"), SUCCEEDED])
def test_what_ended_by_itself_is_not_submitted_again(state: State) -> None:
    cluster = Cluster([[]], [state], [])
    assert carried_out(cluster, retries=3)[0] == exit_code(Ending("ended", state))
    assert cluster.submitted == []


def test_a_job_that_is_only_followed_is_not_submitted_again() -> None:
    assert carried_out(Cluster([[]], [UNKNOWN], []), retries=3, job=None)[0] == 1


def test_a_new_cluster_that_is_not_ready_is_asked_until_it_takes_the_job() -> None:
    not_ready: list[Exception | None] = [NoAnswerError("no agent")] * 3
    cluster = Cluster([[], []], [UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, SUCCEEDED], [*not_ready, None])
    assert carried_out(cluster, retries=1)[0] == 0
    assert len(cluster.submitted) == 4


def test_a_job_that_was_taken_although_the_answer_was_lost_is_not_submitted_twice() -> None:
    cluster = Cluster([[], []], [UNKNOWN, RUNNING, SUCCEEDED], [NoAnswerError("timed out")])
    assert carried_out(cluster, retries=1)[0] == 0
    assert len(cluster.submitted) == 1


def test_a_cluster_that_does_not_take_the_job_any_more_ends_it() -> None:
    with pytest.raises(NoAnswerError):
        carried_out(Cluster([[]], [UNKNOWN], [NoAnswerError("no agent")] * 10_000), retries=1, limit_s=0.05)
    refusal = ResourceError("the cluster", "413", "takes the job", "x")
    with pytest.raises(ResourceError):
        carried_out(Cluster([[]], [UNKNOWN], [refusal]), retries=1)


def test_the_job_after_a_job_has_a_name_of_its_own() -> None:
    assert [again(name) for name in ("digits", "digits-2", "digits-9", "a-12345678", "d-")] == [
        "digits-2",
        "digits-3",
        "digits-10",
        "a-12345678-2",
        "d--2",
    ]
