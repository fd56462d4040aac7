"""Who is asked whether it lives, how often, and what counts as dead."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain.rendezvous import asking
from raytrain.rendezvous.asking import Asking, is_alive
from tests.unit.rendezvous.handles import Handle, run


def test_a_busy_worker_is_not_a_dead_one() -> None:
    assert run(is_alive(Handle(is_stuck=True)))
    assert run(is_alive(Handle()))
    assert not run(is_alive(Handle(RayActorError())))
    assert not run(is_alive(Handle(ActorUnavailableError("away", None))))


def test_all_whose_death_matters_are_asked_until_nobody_waits_and_the_dead_are_named_once() -> None:
    waiting, lost, handles = ["w0", "w1", "w2"], [], {"w0": Handle(), "w1": Handle(RayActorError())}

    def lose(worker: str) -> None:
        lost.append(worker)
        waiting.clear()

    async def story() -> None:
        asking = Asking(lambda: waiting, handles, lose)
        asking.hurry()
        while waiting:
            await asyncio.sleep(0.001)
        assert asking._rounds is not None
        await asking._rounds

    run(story())
    assert lost == ["w1"]


def test_rounds_become_rarer_until_somebody_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(event: Any, limit_s: float) -> None:
        event.close()
        pauses.append(limit_s)
        if len(pauses) == 8:
            asking_around.hurry()
        if len(pauses) == 10:
            waiting.clear()
        raise asyncio.TimeoutError

    waiting, asking_around = ["w0"], Asking(lambda: waiting, {}, lambda worker: None)
    fake = SimpleNamespace(**{name: getattr(asyncio, name) for name in ("gather", "sleep", "create_task", "TimeoutError")})
    monkeypatch.setattr(asking, "asyncio", SimpleNamespace(**vars(fake), wait_for=pause))

    async def story() -> None:
        asking_around.hurry()
        assert asking_around._rounds is not None
        await asking_around._rounds

    run(story())
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.02, 0.04])
