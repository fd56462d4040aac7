"""The log of a job is shown once, whole, in order, whatever happens to the connection; an end is no loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain.cluster.submit import follow
from raytrain.cluster.submit.follow import Ending, Follower, Tail
from raytrain.cluster.submit.jobs import NoAnswerError, State, UnknownJobError

RUNNING, SUCCEEDED = State("RUNNING"), State("SUCCEEDED", 0)
NO_ANSWER, UNKNOWN = NoAnswerError("connection refused"), UnknownJobError("no such job")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ASK_EVERY_S", 0.001)
    monkeypatch.setattr(follow, "QUIET_S", 0.001)


class Fake:
    """A cluster that plays a script.

    Args:
        streams: of each time that the log is followed, its pieces; an error ends one, and None lets it hang.
        states: what is answered, or raised, when the job's state is asked for; the last one again and again.
        whole: the log in the end.
    """

    def __init__(self, streams: list[list[Any]], states: list[Any], whole: str | Exception = "") -> None:
        self.streams, self.states, self.whole = streams, states, whole
        self.num_asked = 0

    async def tail(self, name: str) -> AsyncIterator[str]:
        for piece in self.streams.pop(0):
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                await asyncio.Event().wait()
            yield piece

    def state(self, name: str) -> State:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        self.num_asked += 1
        if isinstance(state, Exception):
            raise state
        assert isinstance(state, State)
        return state

    def log(self, name: str) -> str:
        if isinstance(self.whole, Exception):
            raise self.whole
        return self.whole


def followed(fake: Fake, limit_s: float = 60) -> tuple[Ending, list[str], list[str]]:
    lines: list[str] = []
    said: list[str] = []
    ending = Follower(fake, "digits", Tail(lines.append), said.append, limit_s).follow()
    return ending, lines, said


def test_r16_pieces_become_whole_lines_and_the_end_is_that_of_the_job() -> None:
    ending, lines, said = followed(Fake([["one\ntw", "o\nthr", "ee\nfo", "ur"]], [SUCCEEDED], "one\ntwo\nthree\nfour"))
    assert (ending, lines, said) == (Ending("ended", SUCCEEDED), ["one", "two", "three", "four"], [])


def test_lines_that_the_stream_did_not_bring_are_fetched_at_the_end() -> None:
    _, lines, _ = followed(Fake([["one\n"]], [SUCCEEDED], "one\ntwo\nlast"))
    assert lines == ["one", "two", "last"]
    _, lines, _ = followed(Fake([["one\nla"]], [SUCCEEDED], NoAnswerError("agent is gone")))
    assert lines == ["one", "la"]


def test_a_stream_that_breaks_off_is_taken_up_where_it_was() -> None:
    streams = [["one\ntw", NO_ANSWER], ["one\n", NO_ANSWER], ["one\ntwo\n", "three\n"], ["one\ntwo\nthree\n", "four\n"]]
    ending, lines, said = followed(Fake(streams, [RUNNING, RUNNING, RUNNING, SUCCEEDED], "one\ntwo\nthree\nfour\n"))
    assert (ending.kind, lines, said) == ("ended", ["one", "two", "three", "four"], [])


def test_a_cluster_that_is_away_for_a_while_is_waited_for_and_told_once() -> None:
    fake = Fake([["one\n", NO_ANSWER], ["one\ntwo\n"]], [NO_ANSWER, NO_ANSWER, NO_ANSWER, RUNNING, SUCCEEDED], "one\ntwo\n")
    ending, lines, said = followed(fake)
    assert (ending.kind, lines) == ("ended", ["one", "two"])
    assert said == [
        "the cluster does not answer (connection refused); asking it again for 1 min 0 s",
        "the cluster answers again",
    ]


def test_a_cluster_that_stays_away_is_given_up() -> None:
    ending, lines, said = followed(Fake([["one\n", NO_ANSWER]], [NO_ANSWER]), limit_s=0.05)
    assert (ending, lines, len(said)) == (Ending("silent", State("PENDING"), "connection refused"), ["one"], 1)


@pytest.mark.parametrize("states", [[UNKNOWN], [NO_ANSWER, NO_ANSWER, UNKNOWN]])
def test_another_cluster_at_the_address_is_a_loss(states: list[Any]) -> None:
    ending, _, _ = followed(Fake([["one\n", NO_ANSWER]], states))
    assert (ending.kind, ending.cause.split(",")[0]) == ("lost", "the cluster does not know the job")


def test_the_loss_of_the_drivers_node_is_a_loss_and_a_failure_of_the_driver_is_none() -> None:
    died = State("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED", "the node died")
    assert followed(Fake([[]], [died]))[0] == Ending("lost", died, "the node died")
    for state in (State("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR"), State("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE")):
        assert followed(Fake([[]], [state]))[0].kind == "ended"


def test_a_stream_that_hangs_is_noticed_by_the_cluster_not_answering() -> None:
    ending, lines, _ = followed(
        Fake([["one\n", None], ["one\n", "two\n"]], [RUNNING, NO_ANSWER, RUNNING, SUCCEEDED], "one\ntwo\n")
    )
    assert (ending.kind, lines) == ("ended", ["one", "two"])


def test_a_stream_that_hangs_after_the_end_of_the_job_does_not_hold_up() -> None:
    ending, lines, _ = followed(Fake([["one\n", None]], [RUNNING, SUCCEEDED], "one\ntwo\n"))
    assert (ending.kind, lines) == ("ended", ["one", "two"])


def test_a_log_that_flows_is_not_asked_about() -> None:
    fake = Fake([["a\n"] * 50], [SUCCEEDED], "a\n" * 50)
    followed(fake)
    assert fake.num_asked == 1


@given(st.text(alphabet="ab\n", max_size=40), st.lists(st.integers(0, 40), max_size=5), st.data())
def test_no_line_is_lost_or_shown_twice_wherever_the_stream_breaks(log: str, breaks: list[int], data: Any) -> None:
    lines: list[str] = []
    tail = Tail(lines.append)
    for end in [*breaks, len(log)]:
        tail.begin()
        rest = log[:end]
        while rest:
            size = data.draw(st.integers(1, len(rest)))
            tail.take(rest[:size])
            rest = rest[size:]
    tail.end()
    assert lines == log.split("\n")[: None if log and not log.endswith("\n") else -1]
