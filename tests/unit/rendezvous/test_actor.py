"""The rendezvous actor as a plain asyncio object: who waits, who is released, who is evicted, and what each one learns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain.rendezvous import actor
from raytrain.rendezvous.actor import JoinBarrier, RendezvousActor
from raytrain.rendezvous.health import AT_RENDEZVOUS, WAITING, HealthTimeouts, Heartbeat, HeartbeatReply
from raytrain.rendezvous.state import EMPTY_GENERATION, NO_STATE, Generation, JoinRequest, Signals
from tests.unit.rendezvous.handles import Handle, story

STORE = ("127.0.0.1", 1)
UNAVAILABLE = ActorUnavailableError("away", None)


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The handles that the rendezvous has killed; it checks the workers all the time."""
    found: list[Any] = []
    monkeypatch.setattr(actor.ray, "kill", found.append)
    monkeypatch.setattr(actor, "CHECK_EVERY_S", 0.01)
    return found


def at(worker: str, step: int = NO_STATE, is_saved: bool = False, last: int = 0) -> JoinRequest:
    return JoinRequest(worker, step, ("127.0.0.1", 1), is_saved=is_saved, last_generation=last)


def beat(worker: str, step: int = 3, activity: str = "in loss", since_s: float = 0.0, generation: Any = None) -> Heartbeat:
    return Heartbeat(worker, step, activity, since_s, False, generation)


async def join_all(rendezvous: RendezvousActor, handles: dict[str, Handle], step: int = NO_STATE) -> list[Any]:
    return await asyncio.gather(*(rendezvous.join(at(worker, step), handle) for worker, handle in handles.items()))


def members(generation: Generation | None) -> list[str]:
    assert generation is not None
    return [member.worker for member in generation.members]


async def waiting(rendezvous: RendezvousActor, request: JoinRequest) -> asyncio.Task[Generation | None]:
    """A call of this worker, which is the only one at the barrier."""
    call = asyncio.create_task(rendezvous.join(request, Handle()))
    while set(rendezvous._state.waiting) != {request.worker}:
        await asyncio.sleep(0.001)
    return call


async def training(heartbeat_s: float = 10.0) -> tuple[RendezvousActor, dict[str, Handle], Generation]:
    """A rendezvous in whose first generation w0 and w1 train; one of them may train alone."""
    rendezvous, handles = RendezvousActor(2, HealthTimeouts(heartbeat_s)), {"w0": Handle(), "w1": Handle()}
    generation, _ = await join_all(rendezvous, handles)
    rendezvous._state.min_workers = 1
    return rendezvous, handles, generation


@pytest.mark.parametrize("error", [RayActorError(), UNAVAILABLE, None], ids=["dead", "unavailable", "reported"])
@story
async def test_a_dead_member_is_found_or_reported_and_left_out(error: Exception | None) -> None:
    rendezvous, handles, _ = await training()
    handles["w1"].error = error
    if error is None:
        await rendezvous.report_lost("w1")
    generation = await rendezvous.join(at("w0", 3), handles["w0"])
    assert members(generation) == ["w0"]
    assert generation is not None
    assert generation.cause == "loss"


@story
async def test_a_member_declared_dead_while_it_waits_joins_again() -> None:
    rendezvous, handles = RendezvousActor(2), {"w0": Handle(), "w1": Handle()}
    await join_all(rendezvous, handles)
    call = await waiting(rendezvous, at("w0"))
    rendezvous._report_lost("w0")  # as the probe does when Ray calls it unavailable
    assert await call == EMPTY_GENERATION, "not its old generation"
    again, other = await join_all(rendezvous, handles)
    assert members(again) == ["w0", "w1"]
    assert again is other


# Heartbeats


@story
async def test_r6_an_overdue_member_is_evicted(killed: list[Any]) -> None:
    rendezvous, handles, first = await training(heartbeat_s=0.2)
    again = asyncio.create_task(rendezvous.join(at("w0", 3), handles["w0"]))
    told = False
    while not again.done():
        await rendezvous.heartbeat(beat("w0", activity=AT_RENDEZVOUS))
        reply = await rendezvous.heartbeat(beat("w1", activity=WAITING, since_s=0.3, generation=first))
        told |= reply.is_broken
        await asyncio.sleep(0.05)
    assert told, "it could have joined, too"
    generation = await again
    assert generation is not None
    assert (members(generation), generation.cause, killed) == (["w0"], "loss", [handles["w1"]])
    assert (await rendezvous.status()).evicted == {
        "w1": "stuck for 0 s: waiting for its peers at step 3, in a group that is over"
    }


@story
async def test_r6_a_silent_member_is_evicted_although_nobody_waits(killed: list[Any]) -> None:
    rendezvous, handles, generation = await training(heartbeat_s=0.2)
    await rendezvous.heartbeat(beat("w1"))
    while not (reply := await rendezvous.heartbeat(beat("w0", step=9, generation=generation))).is_broken:
        await asyncio.sleep(0.02)
    await rendezvous.heartbeat(beat("w1"))  # it was evicted: this comes too late
    assert reply == HeartbeatReply(is_broken=True, is_known=True)
    status = await rendezvous.status()
    assert status.evicted["w1"].startswith("no heartbeat for 0 s; it was last in loss")
    assert (status.step, status.members, status.drained) == (9, ("w0", "w1"), frozenset())
    await asyncio.sleep(0.1)
    assert killed == [handles["w1"]]


@pytest.mark.parametrize("since_s", [3.0, 30.0], ids=["busy", "for too long"])
@story
async def test_r6_members_that_all_wait_for_each_other_are_told_after_a_while(since_s: float, killed: list[Any]) -> None:
    rendezvous, handles, first = await training()
    beats = [beat(worker, activity=WAITING, since_s=since_s, generation=first) for worker in handles]
    broken = False
    for _ in range(10):
        broken |= any([(await rendezvous.heartbeat(one)).is_broken for one in beats])
        await asyncio.sleep(0.02)
    assert broken is (since_s > HealthTimeouts().collective_s)
    if broken:
        again, _ = await join_all(rendezvous, handles, step=3)
        assert (members(again), again.cause) == (["w0", "w1"], "retry")
        assert not (await rendezvous.heartbeat(replace(beats[0], generation=again))).is_broken
    assert killed == []


@story
async def test_r6_a_silent_worker_whose_store_answers_is_waited_for(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the task holds its GIL; the other silent one is stopped, or cut off."""

    async def answers(worker: str, store: Any, timeout_s: float) -> bool:
        return store == STORE

    monkeypatch.setattr(actor, "store_answers", answers)
    rendezvous, handles, _ = await training(heartbeat_s=0.2)
    for worker, port in (("w0", 1), ("w1", 2)):
        await rendezvous.heartbeat(replace(beat(worker), store=("127.0.0.1", port)))
    while not killed:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.4)
    assert killed == [handles["w1"]]


@pytest.mark.parametrize("kind", ["evicted", "given up by the controller"])
@story
async def test_r6_a_worker_that_was_replaced_and_comes_back_may_exit(kind: str, killed: list[Any]) -> None:
    """It was cut off; if it were let in, there would be more workers than the run may have."""
    rendezvous, handles, first = await training(heartbeat_s=0.2)
    if kind == "evicted":
        await rendezvous.heartbeat(beat("w1"))
        while not (await rendezvous.status()).evicted:
            await rendezvous.heartbeat(beat("w0"))
            await asyncio.sleep(0.02)
    else:
        await rendezvous.report_lost("w1")
    assert (await rendezvous.heartbeat(beat("w1", generation=first))).is_broken
    assert await rendezvous.join(at("w1", 9), handles["w1"]) is None
    assert members(await rendezvous.join(at("w0", 3), handles["w0"])) == ["w0"]
    assert (await rendezvous.status()).lost_in == {"w1": 1}


@story
async def test_a_drained_worker_is_not_evicted_for_its_silence(killed: list[Any]) -> None:
    rendezvous, handles, _ = await training(heartbeat_s=0.1)
    await rendezvous.heartbeat(beat("w1"))
    assert await rendezvous.drain("w1")
    assert (await join_all(rendezvous, handles, step=3))[1] is None
    await rendezvous.heartbeat(beat("w1"))  # it is still closing
    for _ in range(20):
        await rendezvous.heartbeat(beat("w0"))
        await asyncio.sleep(0.02)
    status = await rendezvous.status()
    assert (status.evicted, status.drained, killed) == ({}, frozenset({"w1"}), [])


@story
async def test_heartbeats_learn_if_their_generation_is_broken_and_their_handle_known() -> None:
    async def is_broken(worker: str, generation: Generation | None) -> bool:
        return (await rendezvous.heartbeat(beat(worker, generation=generation))).is_broken

    rendezvous, handles, first = await training()
    assert not await is_broken("w0", first)
    await rendezvous.report_lost("w1")
    assert await is_broken("w0", first)
    assert not await is_broken("w0", await rendezvous.join(at("w0", 3), handles["w0"]))
    assert await is_broken("w1", first), "it lives after all"
    replies = [await rendezvous.heartbeat(beat("w2"), handle) for handle in (None, Handle(), None)]
    assert [reply.is_known for reply in replies] == [False, True, True], "a handle is requested until it is known"


# Drains


@story
async def test_p2_a_draining_worker_is_released_and_the_others_regroup() -> None:
    rendezvous, handles, _ = await training()
    watching = asyncio.create_task(rendezvous.watch(1))
    await asyncio.sleep(0)
    assert await rendezvous.drain("w0")
    assert await watching == Signals(regroup=True, drain=True)
    gone, stays = await join_all(rendezvous, handles, step=4)
    assert gone is None
    assert (members(stays), stays.cause) == (["w1"], "drain")
    assert await rendezvous.drain("w0"), "one that has left may still be closing"
    assert not await rendezvous.drain("w9"), "one that never joined may go"


@story
async def test_p2_the_last_worker_drains_once_its_state_is_saved() -> None:
    rendezvous, handle = RendezvousActor(1), Handle()
    await rendezvous.join(at("w0"), handle)
    await rendezvous.drain("w0")
    assert await rendezvous.watch(1) == Signals(regroup=True, save=True, drain=True)
    assert members(await rendezvous.join(at("w0", 4), handle)) == ["w0"]
    assert await rendezvous.join(at("w0", 5, is_saved=True), handle) is None


# Watching


@pytest.mark.parametrize(
    ("act", "signals"),
    [
        (lambda rendezvous: rendezvous.join(at("w1"), Handle()), Signals(regroup=True)),
        (lambda rendezvous: rendezvous.stop(), Signals(stop=True)),
        (lambda rendezvous: rendezvous.join(at("w0", 1), Handle()), Signals(regroup=True)),
        (lambda rendezvous: asyncio.sleep(0), Signals()),
    ],
    ids=["newcomer", "stop", "others have gone on", "nothing for a while"],
)
@story
async def test_watching_ends_with_a_signal(
    act: Callable[[RendezvousActor], Any], signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if signals == Signals():
        monkeypatch.setattr(actor, "WATCH_S", 0.05)
    rendezvous = RendezvousActor(1)
    await rendezvous.join(at("w0"), Handle())
    watching = asyncio.create_task(rendezvous.watch(1))
    await asyncio.sleep(0)
    acting = asyncio.create_task(act(rendezvous))
    assert await watching == signals
    acting.cancel()


@story
async def test_closing_releases_all_waiting_workers() -> None:
    rendezvous = RendezvousActor(3)
    call = await waiting(rendezvous, at("w0"))
    await rendezvous.close()
    assert (await call, await rendezvous.join(at("w1"), Handle())) == (None, None)


@story
async def test_r6_too_few_workers_form_a_generation_to_save_and_stop() -> None:
    rendezvous = RendezvousActor(3)
    call = await waiting(rendezvous, at("w0", 7))
    await rendezvous.save_and_stop()
    assert members(await call) == ["w0"]
    assert await rendezvous.watch(1) == Signals(stop=True)


# Restarted


REPORTED, SHORT = Generation(7, (at("w0"), at("w1")), "loss"), Generation(7, (), "loss")


@pytest.fixture
def restarted() -> RendezvousActor:
    return RendezvousActor(1, HealthTimeouts(heartbeat_s=1.0), is_restarted=True)


async def beating(rendezvous: RendezvousActor, *workers: str) -> None:
    """These live and train in generation 7, until the story is over."""
    while True:
        for worker in workers:
            await rendezvous.heartbeat(beat(worker, activity=WAITING, generation=REPORTED), Handle())
        await asyncio.sleep(0.02)


@story
async def test_a_restarted_rendezvous_admits_nobody_before_it_knows_who_trains(
    restarted: RendezvousActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = {"w0": Handle(), "w1": Handle()}
    newcomer = asyncio.create_task(restarted.join(at("w2"), Handle()))
    await asyncio.sleep(0.1)
    assert not newcomer.done()
    for worker, generation, is_known in (("w0", SHORT, False), ("w0", REPORTED, True), ("w1", SHORT, True)):
        reply = await restarted.heartbeat(beat(worker, generation=generation), handles[worker])
        assert reply.is_known is is_known, "it needs the members"
    monkeypatch.setattr(actor, "WATCH_S", 0.05)
    assert await restarted.watch(7) == Signals()
    restarted._state.stop_requested = True
    assert await restarted.watch(7) == Signals(stop=True)
    restarted._state.stop_requested = False
    monkeypatch.setattr(actor, "WATCH_S", 10.0)
    lives = asyncio.create_task(beating(restarted, "w0", "w1", "w2"))
    assert await restarted.watch(7) == Signals(regroup=True)
    await join_all(restarted, handles, step=5)
    generation = await newcomer
    assert generation is not None
    assert (members(generation), generation.number) == (["w0", "w1", "w2"], 8)
    monkeypatch.setattr(actor, "WATCH_S", 0.05)
    assert await restarted.watch(8) == Signals()
    lives.cancel()


@story
async def test_p2_a_restarted_rendezvous_knows_who_trains_before_a_worker_drains(restarted: RendezvousActor) -> None:
    leaving = asyncio.create_task(restarted.drain("w1"))
    await asyncio.sleep(0.1)
    assert not leaving.done()
    lives = asyncio.create_task(beating(restarted, "w0", "w1"))
    assert (await leaving, await restarted.drain("w9")) == (True, False)
    lives.cancel()


@story
async def test_r6_a_member_that_died_together_with_the_rendezvous_is_evicted(
    restarted: RendezvousActor, killed: list[Any]
) -> None:
    handle = Handle()
    again = asyncio.create_task(restarted.join(at("w0", 4), handle))
    while not again.done():
        await restarted.heartbeat(beat("w0", activity=AT_RENDEZVOUS, generation=REPORTED), handle)
        await asyncio.sleep(0.05)
    assert members(await again) == ["w0"]
    assert list((await restarted.status()).evicted) == ["w1"]
    assert killed == [], "its handle is not known"


@story
async def test_a_generation_that_is_reported_too_late_regroups(restarted: RendezvousActor) -> None:
    restarted._opens_at = 0.0
    await restarted.join(at("w2"), handle := Handle())
    reply = await restarted.heartbeat(beat("w0", generation=REPORTED), Handle())
    assert (reply, await restarted.watch(7)) == (HeartbeatReply(is_broken=True, is_known=True), Signals(regroup=True))
    late = await waiting(restarted, at("w0", 9, last=7))
    generation = await restarted.join(at("w2", 0), handle)
    assert await late is generation
    assert generation is not None
    assert (generation.number, members(generation)) == (8, ["w0", "w2"])


@pytest.mark.parametrize("is_restarted", [True, False])
def test_ray_says_whether_the_actor_was_restarted(monkeypatch: pytest.MonkeyPatch, is_restarted: bool) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=is_restarted)
    monkeypatch.setattr(actor.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: context)
    assert RendezvousActor(1)._is_open is not is_restarted


# Parts


@pytest.mark.parametrize("is_cancelled", [True, False])
@story
async def test_a_call_that_is_lost_or_cancelled_does_not_stop_the_others(is_cancelled: bool) -> None:
    rendezvous = RendezvousActor(2)
    first = await waiting(rendezvous, at("w0"))
    if is_cancelled:
        first.cancel()
        assert members(await rendezvous.join(at("w1"), Handle())) == ["w0", "w1"]
        return
    again, _ = await join_all(rendezvous, {"w0": Handle(), "w1": Handle()})
    assert (await first, members(again)) == (EMPTY_GENERATION, ["w0", "w1"])


@story
async def test_r6_all_calls_fail_if_the_barrier_has_failed() -> None:
    def broken() -> bool:
        raise KeyError("w3")

    barrier = JoinBarrier(broken, lambda request: (False, None))
    replies = await asyncio.gather(barrier.wait(at("w0")), barrier.wait(at("w1")), return_exceptions=True)
    assert [type(reply) for reply in replies] == [KeyError, KeyError]


@story
async def test_a_change_ends_a_wait_at_once() -> None:
    barrier = JoinBarrier(lambda: False, lambda request: (False, None))
    waits = asyncio.create_task(barrier.changed(1000.0))
    await asyncio.sleep(0)
    barrier.notify()
    await waits
