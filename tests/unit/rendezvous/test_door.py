"""Each call at the door is answered once, with what is right for this very arrival, and none waits for a failed task."""

from __future__ import annotations

import asyncio

import pytest

from raytrain.rendezvous.door import Door
from raytrain.rendezvous.generation import NOBODY, Entrant, Generation
from raytrain.rendezvous.state import Rendezvous
from tests.unit.rendezvous.handles import run


def at(worker: str, step: int = 0) -> Entrant:
    return Entrant(worker, step, ("127.0.0.1", 1))


def door_of(state: Rendezvous) -> Door:
    def reply(entrant: Entrant) -> tuple[bool, Generation | None]:
        return not state.is_waiting(entrant), state.generation if state.has_admitted(entrant) else NOBODY

    return Door(lambda: state.form(10.0) is not None, reply)


async def enter(state: Rendezvous, door: Door, entrant: Entrant) -> Generation | None:
    state.enter(entrant, 0.0)
    return await door.wait(entrant)


def test_a_worker_that_calls_again_is_answered_in_its_latest_call() -> None:
    async def story() -> tuple[Generation | None, Generation | None]:
        state = Rendezvous(2)
        door = door_of(state)
        first = asyncio.create_task(enter(state, door, at("w0")))
        await asyncio.sleep(0)
        second = asyncio.create_task(enter(state, door, at("w0")))
        answer = await first
        await enter(state, door, at("w1"))
        return answer, await second

    first, second = run(story())
    assert first is NOBODY
    assert second is not None
    assert [member.worker for member in second.members] == ["w0", "w1"]


def test_a_call_that_came_while_a_generation_formed_is_not_answered_with_that_one() -> None:
    async def story() -> None:
        state = Rendezvous(1)
        door = door_of(state)
        state.enter(at("w0"), 0.0)
        assert state.form(10.0) is not None
        late = asyncio.create_task(enter(state, door, at("w1")))
        await asyncio.sleep(0.1)
        assert not late.done()
        await enter(state, door, at("w0", 1))
        generation = await late
        assert generation is not None
        assert generation.number == 2

    run(story())


def test_r6_nobody_waits_for_ever_when_the_one_who_looks_has_failed() -> None:
    def broken() -> bool:
        raise KeyError("w3")

    async def story() -> list[BaseException | Generation | None]:
        door = Door(broken, lambda entrant: (False, None))
        return await asyncio.gather(door.wait(at("w0")), door.wait(at("w1")), return_exceptions=True)

    assert [type(answer) for answer in run(story())] == [KeyError, KeyError]


def test_a_caller_that_has_gone_does_not_stop_the_others() -> None:
    async def story() -> Generation | None:
        state = Rendezvous(2)
        door = door_of(state)
        gone = asyncio.create_task(enter(state, door, at("w0")))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await enter(state, door, at("w1"))

    assert run(story()) is not None


def test_news_ends_a_wait_at_once() -> None:
    async def story() -> None:
        door = door_of(Rendezvous(1))
        waiting = asyncio.create_task(door.news(1000.0))
        await asyncio.sleep(0)
        door.change()
        await waiting

    run(story())
