"""The worker's side of the rendezvous, with an actor that answers by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.rendezvous import client
from raytrain.rendezvous.client import RayRendezvousClient
from raytrain.rendezvous.state import NOBODY, Entrant, Generation

ME = Entrant("w0", 3, ("127.0.0.1", 1))


def speaking_to(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[RayRendezvousClient, list[Any]]:
    asked: list[Any] = []

    def enter(entrant: Entrant, handle: str) -> Any:
        asked.append((entrant, handle))
        return answers.pop(0)

    context = SimpleNamespace(current_actor="my handle")
    monkeypatch.setattr(client, "ray", SimpleNamespace(get=lambda value: value, get_runtime_context=lambda: context))
    return RayRendezvousClient(SimpleNamespace(enter=SimpleNamespace(remote=enter))), asked


def test_entering_returns_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = Generation(4, (ME,), "loss")
    speaker, asked = speaking_to([generation], monkeypatch)
    assert speaker.enter(ME) is generation
    assert asked == [(ME, "my handle")]


def test_a_worker_that_was_taken_for_dead_enters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = Generation(4, (ME,), "loss")
    speaker, asked = speaking_to([NOBODY, NOBODY, generation], monkeypatch)
    assert speaker.enter(ME) is generation
    assert len(asked) == 3


def test_the_end_of_the_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker, _ = speaking_to([NOBODY, None], monkeypatch)
    assert speaker.enter(ME) is None
