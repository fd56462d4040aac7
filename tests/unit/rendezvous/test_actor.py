"""The rendezvous actor as a plain asyncio object: who waits, who is let go, who is given up, and what is told to whom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain.rendezvous import actor
from raytrain.rendezvous.actor import RendezvousActor
from raytrain.rendezvous.generation import NO_STATE, NOBODY, Entrant, Generation, Signals
from raytrain.rendezvous.vitals import READING, WAITING, Answer, Beat, Limits
from tests.unit.rendezvous.handles import Handle, run


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whom the rendezvous has killed; it looks after the workers all the time."""
    found: list[Any] = []
    monkeypatch.setattr(actor.ray, "kill", found.append)
    monkeypatch.setattr(actor, "LOOK_EVERY_S", 0.01)
    return found


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


def beat(worker: str, step: int = 3, place: str = "in loss", since_s: float = 0.0, generation: Any = None) -> Beat:
    return Beat(worker, step, place, since_s, False, generation)


async def trains(rendezvous: RendezvousActor, handles: dict[str, Handle]) -> Generation:
    """A generation of all these, and no smaller one."""
    rendezvous._state.min_workers = len(handles)
    generation, *_ = await enter_all(rendezvous, handles)
    rendezvous._state.min_workers = 1
    assert generation is not None
    return generation


# Heartbeats


def test_r6_a_member_that_others_wait_for_is_killed_and_left_behind(killed: list[Any]) -> None:
    handles = {"w0": Handle(), "w1": Handle()}

    async def story() -> tuple[Generation | None, Any]:
        rendezvous = RendezvousActor(1, Limits(heartbeat_s=0.2))
        await trains(rendezvous, handles)
        again = asyncio.create_task(rendezvous.enter(at("w0", 3), handles["w0"]))
        while not again.done():
            await rendezvous.beat(beat("w0", place="waiting for a generation"))
            await rendezvous.beat(beat("w1", place=WAITING, since_s=0.3))
            await asyncio.sleep(0.05)
        return await again, await rendezvous.survey()

    generation, survey = run(story())
    assert members(generation) == ["w0"]
    assert generation is not None
    assert generation.cause == "loss"
    assert killed == [handles["w1"]]
    assert survey.given_up == {"w1": "stuck for 0 s: waiting for its peers at step 3"}


def test_a_member_that_reads_data_is_waited_for(killed: list[Any]) -> None:
    async def story() -> None:
        rendezvous, handles = RendezvousActor(1, Limits(heartbeat_s=0.1)), {"w0": Handle(), "w1": Handle()}
        await trains(rendezvous, handles)
        again = asyncio.create_task(rendezvous.enter(at("w0", 3), handles["w0"]))
        for _ in range(10):
            for worker, place in (("w0", "waiting for a generation"), ("w1", READING)):
                await rendezvous.beat(beat(worker, place=place))
            await asyncio.sleep(0.03)
        assert not again.done()
        await rendezvous.enter(at("w1", 3), handles["w1"])
        await again

    run(story())
    assert killed == []


def test_r6_a_silent_member_is_given_up_also_where_nobody_waits(killed: list[Any]) -> None:
    handles = {"w0": Handle(), "w1": Handle()}

    async def story() -> tuple[Answer, Any]:
        rendezvous = RendezvousActor(1, Limits(heartbeat_s=0.2))
        generation = await trains(rendezvous, handles)
        await rendezvous.beat(beat("w1"))
        while not (answer := await rendezvous.beat(beat("w0", step=9, generation=generation))).is_broken:
            await asyncio.sleep(0.02)
        await rendezvous.beat(beat("w1"))  # it was given up: this comes too late
        return answer, await rendezvous.survey()

    answer, survey = run(story())
    assert answer == Answer(is_broken=True, is_known=True)
    assert survey.given_up["w1"].startswith("no heartbeat for 0 s; it was last in loss")
    assert (survey.step, survey.members, survey.left) == (9, ("w0", "w1"), frozenset())
    assert killed == [handles["w1"]]


def test_a_worker_that_has_left_is_not_given_up_for_its_silence(killed: list[Any]) -> None:
    async def story() -> Any:
        rendezvous, handles = RendezvousActor(1, Limits(heartbeat_s=0.1)), {"w0": Handle(), "w1": Handle()}
        await trains(rendezvous, handles)
        assert await rendezvous.leave("w1")
        answers = await enter_all(rendezvous, handles, step=3)
        assert answers[1] is None
        await rendezvous.beat(beat("w1"))  # it is still closing
        for _ in range(20):
            await rendezvous.beat(beat("w0"))
            await asyncio.sleep(0.02)
        return await rendezvous.survey()

    survey = run(story())
    assert (survey.given_up, survey.left, killed) == ({}, frozenset({"w1"}), [])


def test_the_handle_of_a_worker_is_asked_for_until_it_is_there(killed: list[Any]) -> None:
    async def story() -> list[Answer]:
        rendezvous = RendezvousActor(1)
        return [
            await rendezvous.beat(beat("w0")),
            await rendezvous.beat(beat("w0"), Handle()),
            await rendezvous.beat(beat("w0")),
        ]

    assert [answer.is_known for answer in run(story())] == [False, True, True]


def test_a_member_whose_generation_has_lost_somebody_or_is_over_is_told_so(killed: list[Any]) -> None:
    async def story() -> list[bool]:
        rendezvous, handles = RendezvousActor(1), {"w0": Handle(), "w1": Handle()}
        first = await trains(rendezvous, handles)
        answers = [await rendezvous.beat(beat("w0", generation=first))]
        await rendezvous.lose("w1")
        answers.append(await rendezvous.beat(beat("w0", generation=first)))
        second = await rendezvous.enter(at("w0", 3), handles["w0"])
        answers.append(await rendezvous.beat(beat("w0", generation=second)))
        answers.append(await rendezvous.beat(beat("w1", generation=first)))  # it lives after all
        return [answer.is_broken for answer in answers]

    assert run(story()) == [False, True, False, True]


# Drains


def test_p2_a_worker_that_is_to_leave_is_let_go_and_the_others_form_again() -> None:
    async def story() -> tuple[Signals, list[Any], list[bool]]:
        rendezvous, handles = RendezvousActor(1), {"w0": Handle(), "w1": Handle()}
        await trains(rendezvous, handles)
        watching = asyncio.create_task(rendezvous.watch(1))
        await asyncio.sleep(0)
        waits = [await rendezvous.leave("w0")]
        signals = await watching
        answers = await enter_all(rendezvous, handles, step=4)
        waits += [await rendezvous.leave("w0"), await rendezvous.leave("w9")]
        return signals, answers, waits

    signals, (gone, stays), waits = run(story())
    assert signals == Signals(gather=True, leave=True)
    assert gone is None
    assert (members(stays), stays.cause) == (["w1"], "drain")
    assert waits == [True, True, False], "one that has left may still be closing; one that never came may go"


def test_p2_the_last_one_leaves_when_its_state_is_saved() -> None:
    async def story() -> tuple[Signals, Generation | None, Generation | None]:
        rendezvous, handle = RendezvousActor(1), Handle()
        await rendezvous.enter(at("w0"), handle)
        await rendezvous.leave("w0")
        signals = await rendezvous.watch(1)
        unsaved = await rendezvous.enter(at("w0", 4), handle)
        saved = Entrant("w0", 5, ("127.0.0.1", 1), is_saved=True)
        return signals, unsaved, await rendezvous.enter(saved, handle)

    signals, unsaved, saved = run(story())
    assert signals == Signals(gather=True, save=True, leave=True)
    assert members(unsaved) == ["w0"]
    assert saved is None


# Watching


def test_watching_ends_when_a_newcomer_waits_and_the_member_then_lets_it_in() -> None:
    async def story() -> tuple[Signals, list[str]]:
        rendezvous, handle = RendezvousActor(1), Handle()
        await rendezvous.enter(at("w0"), handle)
        watching = asyncio.create_task(rendezvous.watch(1))
        newcomer = asyncio.create_task(rendezvous.enter(at("w1"), Handle()))
        answer = await watching
        await rendezvous.enter(at("w0", 5), handle)
        return answer, members(await newcomer)

    assert run(story()) == (Signals(gather=True), ["w0", "w1"])


def test_watching_ends_when_a_stop_is_asked_for() -> None:
    async def story() -> Signals:
        rendezvous = RendezvousActor(1)
        await rendezvous.enter(at("w0"), Handle())
        watching = asyncio.create_task(rendezvous.watch(1))
        await rendezvous.stop()
        return await watching

    assert run(story()) == Signals(stop=True)


def test_who_watches_a_generation_that_is_over_is_called_to_the_door() -> None:
    """A member that was taken for dead by mistake may train on alone."""

    async def story() -> Signals:
        rendezvous = RendezvousActor(1)
        await rendezvous.enter(at("w0"), Handle())
        await rendezvous.enter(at("w0", 1), Handle())
        return await rendezvous.watch(1)

    assert run(story()) == Signals(gather=True)


def test_watching_without_news_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "WATCH_S", 0.05)

    async def story() -> Signals:
        rendezvous = RendezvousActor(1)
        await rendezvous.enter(at("w0"), Handle())
        return await rendezvous.watch(1)

    assert run(story()) == Signals()


# The end


def test_closing_lets_everybody_go() -> None:
    async def story() -> tuple[Any, Any]:
        rendezvous = RendezvousActor(3)
        waiting = asyncio.create_task(rendezvous.enter(at("w0"), Handle()))
        await until(rendezvous, "w0")
        await rendezvous.close()
        return await waiting, await rendezvous.enter(at("w1"), Handle())

    assert run(story()) == (None, None)


def test_r6_when_patience_ends_those_at_the_door_form_a_generation_and_are_told_to_stop() -> None:
    async def story() -> tuple[list[str], Signals]:
        rendezvous = RendezvousActor(3)
        waiting = asyncio.create_task(rendezvous.enter(at("w0", 7), Handle()))
        await until(rendezvous, "w0")
        await rendezvous.give_up()
        return members(await waiting), await rendezvous.watch(1)

    assert run(story()) == (["w0"], Signals(stop=True))


# Started again


OPENS_AFTER = Limits(heartbeat_s=1.0)
TOLD = Generation(7, (at("w0"), at("w1")), "loss")


async def beating(rendezvous: RendezvousActor, *workers: str) -> None:
    """These live and train in generation 7, until the story is over."""
    while True:
        for worker in workers:
            await rendezvous.beat(beat(worker, place=WAITING, generation=TOLD), Handle())
        await asyncio.sleep(0.02)


def test_one_that_was_started_again_lets_nobody_in_before_it_knows_who_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> tuple[Signals, list[str], int]:
        rendezvous, handles = RendezvousActor(1, OPENS_AFTER, is_reborn=True), {"w0": Handle(), "w1": Handle()}
        newcomer = asyncio.create_task(rendezvous.enter(at("w2"), Handle()))
        await asyncio.sleep(0.1)
        assert not newcomer.done()
        short = Generation(7, (), "loss")
        assert not (await rendezvous.beat(beat("w0", generation=short), handles["w0"])).is_known, "it wants the members"
        assert (await rendezvous.beat(beat("w0", generation=TOLD), handles["w0"])).is_known
        assert (await rendezvous.beat(beat("w1", generation=short), handles["w1"])).is_known
        lives = asyncio.create_task(beating(rendezvous, "w0", "w1", "w2"))
        assert await rendezvous.watch(7) == Signals(gather=True)
        await enter_all(rendezvous, handles, step=5)
        generation = await newcomer
        assert generation is not None
        monkeypatch.setattr(actor, "WATCH_S", 0.05)
        signals = await rendezvous.watch(8)
        lives.cancel()
        return signals, members(generation), generation.number

    signals, who, number = run(story())
    assert (signals, who, number) == (Signals(), ["w0", "w1", "w2"], 8)


def test_one_that_was_started_again_does_not_call_anybody_to_a_closed_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "WATCH_S", 0.05)

    async def story() -> list[Signals]:
        rendezvous = RendezvousActor(1, OPENS_AFTER, is_reborn=True)
        await rendezvous.beat(beat("w0", generation=TOLD), Handle())
        newcomer = asyncio.create_task(rendezvous.enter(at("w2"), Handle()))
        signals = [await rendezvous.watch(7)]
        await rendezvous.stop()
        signals.append(await rendezvous.watch(7))
        newcomer.cancel()
        return signals

    assert run(story()) == [Signals(), Signals(stop=True)]


def test_p2_one_that_was_started_again_knows_who_trains_before_it_says_that_somebody_may_go() -> None:
    async def story() -> tuple[bool, bool]:
        rendezvous = RendezvousActor(1, OPENS_AFTER, is_reborn=True)
        leaving = asyncio.create_task(rendezvous.leave("w1"))
        await asyncio.sleep(0.1)
        assert not leaving.done()
        lives = asyncio.create_task(beating(rendezvous, "w0", "w1"))
        answers = await leaving, await rendezvous.leave("w9")
        lives.cancel()
        return answers

    assert run(story()) == (True, False)


def test_r6_a_member_that_died_together_with_the_rendezvous_is_found_out(killed: list[Any]) -> None:
    async def story() -> tuple[list[str], Any]:
        rendezvous, handle = RendezvousActor(1, OPENS_AFTER, is_reborn=True), Handle()
        again = asyncio.create_task(rendezvous.enter(at("w0", 4), handle))
        while not again.done():
            await rendezvous.beat(beat("w0", place="waiting for a generation", generation=TOLD), handle)
            await asyncio.sleep(0.05)
        return members(await again), await rendezvous.survey()

    who, survey = run(story())
    assert who == ["w0"]
    assert list(survey.given_up) == ["w1"]
    assert killed == [], "nobody knows its handle"


def test_a_generation_of_which_it_hears_too_late_is_called_to_the_door() -> None:
    async def story() -> tuple[Answer, Signals, list[str]]:
        rendezvous, handle = RendezvousActor(1, is_reborn=True), Handle()
        rendezvous._opens_at = 0.0
        await rendezvous.enter(at("w2"), handle)
        answer = await rendezvous.beat(beat("w0", generation=TOLD), Handle())
        signals = await rendezvous.watch(7)
        late = asyncio.create_task(rendezvous.enter(Entrant("w0", 9, ("127.0.0.1", 1), after=7), Handle()))
        await until(rendezvous, "w0")
        generation = await rendezvous.enter(at("w2", 0), handle)
        await late
        assert generation is not None
        assert generation.number == 8
        return answer, signals, members(generation)

    assert run(story()) == (Answer(is_broken=True, is_known=True), Signals(gather=True), ["w0", "w2"])


def test_ray_is_asked_whether_it_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=True)
    monkeypatch.setattr(actor.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: context)
    assert not RendezvousActor(1)._is_open
    context.was_current_actor_reconstructed = False
    assert RendezvousActor(1)._is_open
