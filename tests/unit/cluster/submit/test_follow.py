"""A log is shown once, whole and in order, through lost connections; only a lost job is submitted again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.cluster.submit import follow
from raytrain.cluster.submit.follow import Ending, Follower, JobRunner, LineBuffer, exit_code
from raytrain.cluster.submit.jobs import Job, NoAnswerError, State, UnknownJobError
from raytrain.errors import ResourceError

RUNNING, SUCCEEDED, STOPPED = State("RUNNING"), State("SUCCEEDED", 0), State("STOPPED")
DIED = State("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED", "the node died")
NO_ENV = State("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "pip failed")
NO_ANSWER, UNKNOWN = NoAnswerError("connection refused"), UnknownJobError("no such job")
JOB = Job("digits-ab12", "python digits.py", {})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY_S", 0.001)
    monkeypatch.setattr(follow, "QUIET_S", 0.001)


class Cluster:
    """Plays a script; an error in it is raised.

    Args:
        streams: chunks of each connection to the log; None lets it hang.
        states: answers to requests for the job's state; the last one again and again.
        whole: the complete log.
        accepts: answers to submissions.
    """

    def __init__(
        self, streams: list[list[Any]], states: list[Any], whole: Any = "", accepts: list[Any] | None = None
    ) -> None:
        self.streams, self.states, self.whole, self.accepts = streams, states, whole, accepts or []
        self.num_asked, self.submitted = 0, list[Job]()

    async def tail(self, name: str) -> AsyncIterator[str]:
        for chunk in self.streams.pop(0):
            if chunk is None:
                await asyncio.Event().wait()
            yield raised(chunk)

    def state(self, name: str) -> Any:
        self.num_asked += 1
        return raised(self.states.pop(0) if len(self.states) > 1 else self.states[0])

    def log(self, name: str) -> Any:
        return raised(self.whole)

    def submit(self, job: Job) -> None:
        self.submitted.append(job)
        raised(self.accepts.pop(0))


def raised(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def followed(cluster: Cluster, timeout_s: float = 60) -> tuple[Ending, list[str], list[str]]:
    lines: list[str] = []
    reported: list[str] = []
    return Follower(cluster, "digits", LineBuffer(lines.append), reported.append, timeout_s).follow(), lines, reported


@pytest.mark.parametrize(
    ("streams", "states", "whole", "lines"),
    [
        ([["one\ntw", "o\nthr", "ee"]], [SUCCEEDED], "one\ntwo\nthree", ["one", "two", "three"]),
        ([["one\n"]], [SUCCEEDED], "one\ntwo\nlast", ["one", "two", "last"]),
        ([["one\nla"]], [SUCCEEDED], NO_ANSWER, ["one", "la"]),
        ([["one\ntw", NO_ANSWER], ["one\n", NO_ANSWER], ["one\ntwo\n"]], [RUNNING, RUNNING, SUCCEEDED], "", ["one", "two"]),
        ([["one\n", None], ["one\n", "two\n"]], [RUNNING, NO_ANSWER, RUNNING, SUCCEEDED], "one\ntwo\n", ["one", "two"]),
        ([["one\n", None]], [RUNNING, SUCCEEDED], "one\ntwo\n", ["one", "two"]),
    ],
)
def test_each_line_is_shown_once(streams: list[list[Any]], states: list[Any], whole: Any, lines: list[str]) -> None:
    ending, shown, _ = followed(Cluster(streams, states, whole))
    assert (ending.kind, shown) == ("ended", lines)


def test_a_cluster_that_is_away_for_a_while_is_reported_once() -> None:
    states = [NO_ANSWER, NO_ANSWER, NO_ANSWER, RUNNING, SUCCEEDED]
    ending, lines, reported = followed(Cluster([["one\n", NO_ANSWER], ["one\ntwo\n"]], states, "one\ntwo\n"))
    assert (ending, lines) == (Ending("ended", SUCCEEDED), ["one", "two"])
    assert reported[0] == "the cluster does not answer (connection refused); retrying for 1 min 0 s"
    assert reported[1:] == ["the cluster answers again"]


def test_a_cluster_that_stays_away_is_given_up() -> None:
    began = time.monotonic()
    ending, lines, reported = followed(Cluster([["one\n", NO_ANSWER]], [NO_ANSWER]), timeout_s=0.05)
    assert 0.05 <= time.monotonic() - began < 5
    assert (ending, lines, len(reported)) == (Ending("silent", State("PENDING"), "connection refused"), ["one"], 1)


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        *(([UNKNOWN], "lost"), ([NO_ANSWER, NO_ANSWER, UNKNOWN], "lost"), ([DIED], "lost")),
        *(([State("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR")], "ended"), ([NO_ENV], "ended")),
    ],
)
def test_only_the_loss_of_cluster_or_driver_node_is_a_loss(states: list[Any], kind: str) -> None:
    assert followed(Cluster([["one\n", NO_ANSWER], []], states))[0].kind == kind


def test_no_state_is_requested_while_the_log_flows() -> None:
    cluster = Cluster([["a\n"] * 50], [SUCCEEDED], "a\n" * 50)
    followed(cluster)
    assert cluster.num_asked == 1


@given(st.text(alphabet="ab\n", max_size=40), st.lists(st.integers(0, 40), max_size=5), st.data())
def test_no_line_is_lost_or_shown_twice_wherever_the_stream_breaks(log: str, breaks: list[int], data: Any) -> None:
    shown: list[str] = []
    lines = LineBuffer(shown.append)
    for end in [*breaks, len(log)]:
        lines.restart()
        rest = log[:end]
        while rest:
            size = data.draw(st.integers(1, len(rest)))
            lines.feed(rest[:size])
            rest = rest[size:]
    lines.flush()
    assert shown == log.split("\n")[: None if log and not log.endswith("\n") else -1]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        *((Ending("ended", SUCCEEDED), 0, "d: succeeded"), (Ending("ended", STOPPED), 143, "d: stopped")),
        (Ending("ended", State("FAILED", 2)), 2, "d: failed with exit code 2"),
        (Ending("ended", State("FAILED", -9)), 137, "d: failed with exit code 137"),
        (Ending("ended", NO_ENV), 1, "d: failed before it ran: pip failed"),
        (Ending("silent", RUNNING, "x"), 1, "d: the cluster stopped answering (x); the job may still be running"),
        (
            *(Ending("lost", RUNNING, "x"), 1),
            "d: lost with its cluster (x); submit it again to resume its run from the checkpoint",
        ),
    ],
)
def test_r16_the_exit_code_and_the_final_message_are_those_of_the_job(ending: Ending, code: int, message: str) -> None:
    assert (exit_code(ending), follow.final_message("d", ending)) == (code, message)


def run(cluster: Cluster, retries: int = 1, timeout_s: float = 60, job: Job | None = JOB) -> tuple[int, list[str]]:
    shown: list[str] = []
    return JobRunner(cluster, JOB.name, job, retries, timeout_s, shown.append, shown.append).run(), shown


def test_a_lost_job_is_submitted_again_and_its_log_shown_from_the_start() -> None:
    cluster = Cluster([["one\n", NO_ANSWER], ["one\n", "two\n"]], [UNKNOWN, SUCCEEDED], accepts=[None])
    code, shown = run(cluster)
    assert (code, cluster.submitted) == (0, [Job("digits-ab12-2", JOB.entrypoint, {})])
    assert [line for line in shown if not line.startswith("lost")] == ["one", "one", "two", "digits-ab12-2: succeeded"]


@pytest.mark.parametrize(
    ("states", "retries", "job", "names"),
    [
        *(([UNKNOWN], 2, JOB, ["digits-ab12-2", "digits-ab12-3"]), ([UNKNOWN], 3, None, [])),
        *(([State("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR")], 3, JOB, []), ([STOPPED], 3, JOB, [])),
        ([SUCCEEDED], 3, JOB, []),
    ],
)
def test_only_a_lost_job_is_submitted_again(states: list[Any], retries: int, job: Job | None, names: list[str]) -> None:
    cluster = Cluster([[], [], []], states, accepts=[None, None])
    run(cluster, retries, job=job)
    assert [job.name for job in cluster.submitted] == names


def test_a_new_cluster_is_retried_until_it_accepts_the_job() -> None:
    accepts = [NO_ANSWER, NO_ANSWER, NO_ANSWER, None]
    cluster = Cluster([[], []], [UNKNOWN, UNKNOWN, NO_ANSWER, UNKNOWN, SUCCEEDED], accepts=accepts)
    assert (run(cluster)[0], len(cluster.submitted)) == (0, 4)


def test_a_job_that_was_accepted_without_an_answer_is_not_submitted_twice() -> None:
    cluster = Cluster([[], []], [UNKNOWN, RUNNING, SUCCEEDED], accepts=[NoAnswerError("timed out")])
    assert (run(cluster)[0], len(cluster.submitted)) == (0, 1)


@pytest.mark.parametrize("error", [NO_ANSWER, ResourceError("the cluster", "413", "must accept the job", "x")])
def test_a_cluster_that_does_not_accept_the_job_again_is_an_error(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(Cluster([[]], [UNKNOWN], accepts=[error] * 10_000), timeout_s=0.05)


@pytest.mark.parametrize(
    ("name", "following"),
    [("digits", "digits-2"), ("d-2", "d-3"), ("d-9", "d-10"), ("a-12345678", "a-12345678-2"), ("d-", "d--2")],
)
def test_each_submission_has_its_own_name(name: str, following: str) -> None:
    assert follow.next_name(name) == following
