"""The rendezvous actor as a plain asyncio object: who waits, who is asked after, who is let go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain.rendezvous import actor
from raytrain.rendezvous.actor import RendezvousActor, is_alive
from raytrain.rendezvous.state import NO_STATE, NOBODY, Entrant, Generation

LIMIT_S = 20.0
Answer = TypeVar("Answer")


class Handle:
    """What the rendezvous knows of a worker: `execute.remote(int)`, which fails if its process is gone."""

    def __init__(self, error: Exception | None = None, is_stuck: bool = False) -> None:
        self.error, self.is_stuck = error, is_stuck
        self.execute = SimpleNamespace(remote=self._execute)

    async def _execute(self, function: Any) -> Any:
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return function()


def run(story: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(asyncio.wait_for(story, LIMIT_S))


def at(worker: str, step: int = NO_STATE) -> Entrant:
    return Entrant(worker, step, ("127.0.0.1", 1))


async def enter_all(rendezvous: RendezvousActor, handles: dict[str, Handle], step: int = NO_STATE) -> list[Any]:
    return await asyncio.gather(*(rendezvous.enter(at(worker, step), handle) for worker, handle in handles.items()))


def members(generation: Generation | None) -> list[str]:
    assert generation is not None
    return [member.worker for member in generation.members]


async def until(rendezvous: RendezvousActor, *waiting: str) -> None:
    """Until exactly these wait at the door."""
    while set(rendezvous._state.waiting) != set(waiting):
        await asyncio.sleep(0.001)


def test_all_who_wait_leave_with_the_same_generation() -> None:
    async def story() -> list[Any]:
        return await enter_all(RendezvousActor(2), {"w0": Handle(), "w1": Handle()})

    first, second = run(story())
    assert first is second
    assert members(first) == ["w0", "w1"]


@pytest.mark.parametrize("error", [RayActorError(), ActorUnavailableError("away", None)], ids=["dead", "unavailable"])
def test_a_dead_member_is_found_out_and_left_behind(error: Exception) -> None:
    async def story() -> Generation | None:
        rendezvous, handles = RendezvousActor(1), {"w0": Handle(), "w1": Handle()}
        rendezvous._state.min_workers = 2
        await enter_all(rendezvous, handles)
        rendezvous._state.min_workers = 1
        handles["w1"].error = error
        return await rendezvous.enter(at("w0", 3), handles["w0"])

    generation = run(story())
    assert members(generation) == ["w0"]
    assert generation is not None
    assert generation.cause == "loss"


def test_a_death_that_the_controller_reports_is_acted_on_too() -> None:
    async def story() -> Generation | None:
        rendezvous, handles = RendezvousActor(1), {"w0": Handle(), "w1": Handle()}
        rendezvous._state.min_workers = 2
        await enter_all(rendezvous, handles)
        rendezvous._state.min_workers = 1
        await rendezvous.lose("w1")
        return await rendezvous.enter(at("w0", 3), handles["w0"])

    assert members(run(story())) == ["w0"]


def test_a_worker_that_enters_while_a_generation_forms_is_never_told_of_one_without_it() -> None:
    async def story() -> tuple[Generation | None, Generation | None]:
        rendezvous = RendezvousActor(1)
        await rendezvous._changed.acquire()  # as somebody who wakes up at the door does
        late = asyncio.create_task(rendezvous.enter(at("w1"), Handle()))
        await asyncio.sleep(0)
        rendezvous._state.enter(at("w0"), 0.0)
        rendezvous._handles["w0"] = Handle()
        formed = rendezvous._state.form(10.0)
        rendezvous._changed.release()
        await until(rendezvous, "w1")
        again = asyncio.create_task(rendezvous.enter(at("w0", 1), rendezvous._handles["w0"]))
        await again
        return formed, await late

    formed, joined = run(story())
    assert members(formed) == ["w0"]
    assert members(joined) == ["w0", "w1"]


def test_a_worker_that_was_taken_for_dead_while_it_waited_is_told_to_enter_again() -> None:
    async def story() -> tuple[Generation | None, Generation | None]:
        rendezvous, handle = RendezvousActor(2), Handle()
        waiting = asyncio.create_task(rendezvous.enter(at("w0", 3), handle))
        await until(rendezvous, "w0")
        await rendezvous.lose("w0")
        answer = await waiting
        again, _ = await asyncio.gather(rendezvous.enter(at("w0", 3), handle), rendezvous.enter(at("w1"), Handle()))
        return answer, again

    answer, again = run(story())
    assert answer == NOBODY
    assert members(again) == ["w0", "w1"]


def test_a_member_that_was_taken_for_dead_is_not_sent_back_to_its_old_generation() -> None:
    async def story() -> Generation | None:
        rendezvous, handles = RendezvousActor(2), {"w0": Handle(), "w1": Handle()}
        await enter_all(rendezvous, handles)
        waiting = asyncio.create_task(rendezvous.enter(at("w0"), handles["w0"]))
        await until(rendezvous, "w0")
        await rendezvous.lose("w0")
        return await waiting

    assert run(story()) == NOBODY


def test_r6_a_member_that_lives_but_does_not_come_is_killed_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(actor.ray, "kill", killed.append)

    async def story(handles: dict[str, Handle]) -> Generation | None:
        rendezvous = RendezvousActor(1, patience_s=0.05)
        rendezvous._state.min_workers = 2
        await enter_all(rendezvous, handles)
        rendezvous._state.min_workers = 1
        return await rendezvous.enter(at("w0", 3), handles["w0"])

    handles = {"w0": Handle(), "w1": Handle()}
    assert members(run(story(handles))) == ["w0"]
    assert killed == [handles["w1"]]


def test_a_busy_worker_is_not_a_dead_one() -> None:
    assert run(is_alive(Handle(is_stuck=True)))
    assert run(is_alive(Handle()))
    assert not run(is_alive(Handle(RayActorError())))


def test_watching_ends_when_a_newcomer_waits_and_the_member_then_lets_it_in() -> None:
    async def story() -> tuple[tuple[bool, bool], list[str]]:
        rendezvous, handle = RendezvousActor(1), Handle()
        await rendezvous.enter(at("w0"), handle)
        watching = asyncio.create_task(rendezvous.watch(1))
        newcomer = asyncio.create_task(rendezvous.enter(at("w1"), Handle()))
        answer = await watching
        await rendezvous.enter(at("w0", 5), handle)
        return answer, members(await newcomer)

    assert run(story()) == ((True, False), ["w0", "w1"])


def test_watching_ends_when_a_stop_is_asked_for() -> None:
    async def story() -> tuple[bool, bool]:
        rendezvous = RendezvousActor(1)
        await rendezvous.enter(at("w0"), Handle())
        watching = asyncio.create_task(rendezvous.watch(1))
        await rendezvous.stop()
        return await watching

    assert run(story()) == (False, True)


def test_watching_an_older_generation_ends_at_once() -> None:
    async def story() -> tuple[bool, bool]:
        rendezvous = RendezvousActor(1)
        await rendezvous.enter(at("w0"), Handle())
        await rendezvous.enter(at("w0", 1), Handle())
        return await rendezvous.watch(1)

    assert run(story()) == (False, False)


def test_closing_lets_everybody_go() -> None:
    async def story() -> tuple[Any, Any]:
        rendezvous = RendezvousActor(3)
        waiting = asyncio.create_task(rendezvous.enter(at("w0"), Handle()))
        await until(rendezvous, "w0")
        await rendezvous.close()
        return await waiting, await rendezvous.enter(at("w1"), Handle())

    assert run(story()) == (None, None)
