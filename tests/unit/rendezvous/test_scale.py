"""A thousand workers form again after a loss in less than a second of the rendezvous' own time."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable

import pytest

from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.generation import NO_STATE, Entrant, Generation
from raytrain.rendezvous.state import Rendezvous
from raytrain.rendezvous.vitals import Beat
from tests.unit.rendezvous.handles import Handle

LIMIT_S = 1.0
Record = Callable[[str, object], None]


def at(number: int, step: int = NO_STATE, after: int = 0) -> Entrant:
    return Entrant(f"w{number}", step, (f"10.0.{number % 256}.1", 40_000), node_id=f"{number:056x}", pid=number, after=after)


def spent_s(since: float) -> float:
    return time.process_time() - since


def form_again(num_workers: int) -> float:
    """CPU seconds that the state machine takes while all come one after the other, each of them causing a look."""
    state = Rendezvous(num_workers - 1)
    for number in range(num_workers):
        state.enter(at(number), 0.0)
    assert state.form(0.0) is not None
    began = time.process_time()
    state.lose("w7", 1.0)
    for number in range(num_workers):
        assert state.form(1.0) is None
        if number != 7:
            state.enter(at(number, 5), 1.0)
        state.dismiss()
    generation = state.form(1.0)
    assert generation is not None
    assert len(generation.members) == num_workers - 1
    return spent_s(began)


async def form_again_in_the_actor(num_workers: int) -> dict[str, float]:
    """CPU seconds of the actor: to start, to form again after a loss, to pack its answers, and for all heartbeats once."""
    actor, handles = RendezvousActor(num_workers - 1), [Handle() for _ in range(num_workers)]
    actor._state.min_workers = num_workers

    async def enter(number: int, step: int) -> Generation | None:
        await asyncio.sleep(number % 16 * 0.002)  # so that they do not come all in one turn of the loop
        return await actor.enter(at(number, step, after=max(0, step)), handles[number])

    began = time.process_time()
    first = await asyncio.gather(*(enter(number, NO_STATE) for number in range(num_workers)))
    spent = {"start": spent_s(began)}
    actor._state.min_workers = num_workers - 1

    began = time.process_time()
    await actor.lose("w7")
    again = await asyncio.gather(*(enter(number, 1) for number in range(num_workers) if number != 7))
    spent["form again"] = spent_s(began)
    assert {answer.number for answer in first + again if answer is not None} == {1, 2}
    assert len({id(answer) for answer in again}) == 1

    began = time.process_time()
    assert len({pickle.dumps(answer) for answer in again}) == 1
    spent["pack"] = spent_s(began)

    began = time.process_time()
    for number in range(num_workers):
        beat = Beat(f"w{number}", 1, "in loss", 0.1, False, again[0]).in_short()
        assert (await actor.beat(pickle.loads(pickle.dumps(beat)))).is_known
    spent["heartbeats"] = spent_s(began)
    await actor.close()
    return spent


def test_p1_a_thousand_members_form_again_in_less_than_a_second() -> None:
    assert form_again(1024) < LIMIT_S


def test_p1_the_actor_lets_a_thousand_who_wait_form_again_in_less_than_a_second() -> None:
    spent = asyncio.run(form_again_in_the_actor(1024))
    assert spent["form again"] + spent["pack"] < LIMIT_S, spent
    assert spent["heartbeats"] < LIMIT_S, spent


@pytest.mark.parametrize("num_workers", [4096])
def test_four_thousand_form_again_too(num_workers: int, record_property: Record) -> None:
    spent = {"state machine": form_again(num_workers)} | asyncio.run(form_again_in_the_actor(num_workers))
    for part, seconds in spent.items():
        record_property(f"{part} with {num_workers} workers, CPU seconds", round(seconds, 3))
    print(num_workers, "workers, CPU seconds:", {part: round(seconds, 3) for part, seconds in spent.items()})
