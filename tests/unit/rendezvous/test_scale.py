"""A thousand workers form again after a loss in less than a second of the rendezvous' own time."""

from __future__ import annotations

import asyncio
import pickle
import time

from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.health import Heartbeat
from raytrain.rendezvous.state import NO_STATE, Generation, JoinRequest
from tests.unit.rendezvous.handles import Handle

LIMIT_S = 1.0


def at(number: int, step: int = NO_STATE, last: int = 0) -> JoinRequest:
    store = (f"10.0.{number % 256}.1", 40_000)
    return JoinRequest(f"w{number}", step, store, node_id=f"{number:056x}", last_generation=last)


def spent_s(since: float) -> float:
    return time.process_time() - since


async def form_again(num_workers: int) -> dict[str, float]:
    """CPU seconds of the actor: to start, to form again after a loss, to pack its answers, and for all heartbeats once."""
    actor, handles = RendezvousActor(num_workers - 1), [Handle() for _ in range(num_workers)]
    actor._state.min_workers = num_workers

    async def enter(number: int, step: int) -> Generation | None:
        await asyncio.sleep(number % 16 * 0.002)  # so that they do not come all in one turn of the loop
        return await actor.join(at(number, step, max(0, step)), handles[number])

    began = time.process_time()
    first = await asyncio.gather(*(enter(number, NO_STATE) for number in range(num_workers)))
    spent = {"start": spent_s(began)}
    actor._state.min_workers = num_workers - 1

    began = time.process_time()
    await actor.report_lost("w7")
    again = await asyncio.gather(*(enter(number, 1) for number in range(num_workers) if number != 7))
    spent["form again"] = spent_s(began)
    assert {answer.number for answer in first + again if answer is not None} == {1, 2}
    assert len({id(answer) for answer in again}) == 1

    began = time.process_time()
    assert len({pickle.dumps(answer) for answer in again}) == 1
    spent["pack"] = spent_s(began)

    began = time.process_time()
    for number in range(num_workers):
        beat = Heartbeat(f"w{number}", 1, "in loss", 0.1, False, again[0]).without_members()
        assert (await actor.heartbeat(pickle.loads(pickle.dumps(beat)))).is_known
    spent["heartbeats"] = spent_s(began)
    await actor.close()
    return spent


def test_p1_a_thousand_members_form_again_in_less_than_a_second() -> None:
    spent = asyncio.run(form_again(1024))
    assert spent["form again"] + spent["pack"] < LIMIT_S, spent
    assert spent["heartbeats"] < LIMIT_S, spent
