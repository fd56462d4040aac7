"""The rendezvous of one attempt: one generation of all its workers, which nobody leaves behind, and its roll."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raytrain.elastic import attempt_rendezvous as module
from raytrain.elastic.attempt_rendezvous import AttemptRendezvous
from raytrain.rendezvous.generation import NO_STATE, Entrant, Generation
from raytrain.rendezvous.vitals import WAITING, Beat
from tests.unit.rendezvous.handles import Handle, run


def at(worker: str, step: int = NO_STATE) -> Entrant:
    return Entrant(worker, step, ("127.0.0.1", 1))


def both(rendezvous: AttemptRendezvous, *handles: Handle, step: int = NO_STATE) -> Any:
    return asyncio.gather(*(rendezvous.enter(at(f"w{i}", step), handle) for i, handle in enumerate(handles)))


def test_generations_and_steps_count_on_from_the_attempts_before() -> None:
    async def story() -> Any:
        rendezvous = AttemptRendezvous(2, reached=9, after=4)
        first, _ = await both(rendezvous, Handle(), Handle())
        return first, await rendezvous.report()

    generation, report = run(story())
    assert (generation.number, generation.cause, generation.reached) == (5, "start", 9)
    assert (report.generation, report.step) == (5, NO_STATE), "nobody of this attempt has finished a step"


def test_whoever_lost_a_peer_waits_and_trains_with_nobody() -> None:
    async def story() -> Any:
        rendezvous, handles = AttemptRendezvous(2), (Handle(), Handle())
        await both(rendezvous, *handles)
        handles[1].error = RayActorError()
        waiting = asyncio.create_task(rendezvous.enter(at("w0", 3), handles[0]))
        while not rendezvous._state.gone:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        return await rendezvous.report()

    assert run(story()).step == 3


def test_the_same_workers_go_on_together_after_a_false_alarm() -> None:
    async def story() -> tuple[Generation, ...]:
        rendezvous, handles = AttemptRendezvous(2), (Handle(), Handle())
        await both(rendezvous, *handles)
        again: tuple[Generation, ...] = await both(rendezvous, *handles, step=3)
        return again

    assert {len(generation.members) for generation in run(story())} == {2}


def test_the_roll_says_where_workers_are_and_how_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(module.ray, "kill", killed.append)

    async def story() -> Any:
        rendezvous, handles = AttemptRendezvous(2), (Handle(), Handle())
        await rendezvous.begin("w0", "10.0.0.1", 11, handles[0])
        await rendezvous.begin("w1", "10.0.0.2", 12, handles[1])
        await rendezvous.beat(Beat("w0", 7, WAITING, 0.0, False), handles[0])
        await rendezvous.end("w0", has_raised=False)
        await rendezvous.end("w1", has_raised=True)
        await rendezvous.kill_all()
        assert killed == list(handles)
        assert not rendezvous._vitals.verdicts(1e9), "the silence of those that have ended says nothing"
        return await rendezvous.report()

    report = run(story())
    assert report.known == {"w0": ("10.0.0.1", 11), "w1": ("10.0.0.2", 12)}
    assert report.ended == {"w0": False, "w1": True}
    assert report.step == 7
