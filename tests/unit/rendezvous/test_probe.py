"""Who lives: those that Ray does not call dead, and those whose stores answer although their heartbeats have stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from raytrain.rendezvous.probe import LivenessProbe, is_alive, store_answers
from tests.unit.rendezvous.handles import Handle, story

UNAVAILABLE = ActorUnavailableError("away", None)
WORKER = """
import ctypes, sys
from raytrain.rendezvous.probe import WORKER_KEY
from raytrain.worker.network import serve_store

store = serve_store("127.0.0.1", 10.0)
store.set(WORKER_KEY, "w7")
print(store.port, flush=True)
ctypes.PyDLL(None).sleep(60)  # a call of the task's code that holds the GIL
"""


@pytest.mark.parametrize(
    ("handle", "lives"),
    [(Handle(), True), (Handle(is_stuck=True), True), (Handle(RayActorError()), False), (Handle(UNAVAILABLE), False)],
)
@story
async def test_a_busy_worker_is_not_a_dead_one(handle: Handle, lives: bool) -> None:
    assert await is_alive(handle) is lives


@story
async def test_workers_with_a_handle_are_probed_while_somebody_waits() -> None:
    to_probe, lost = ["w0", "w1", "w2"], list[str]()
    handles = {"w0": Handle(), "w1": Handle(RayActorError())}
    probe = LivenessProbe(lambda: to_probe if not lost else [], handles, lost.append)
    probe.start()
    assert probe._task is not None
    await probe._task
    assert lost == ["w1"]


@pytest.fixture(scope="module")
def holding_its_gil() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A worker's process, and the port of its store."""
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_r6_the_store_of_a_worker_answers_while_its_gil_is_held(holding_its_gil: tuple[subprocess.Popen[str], int]) -> None:
    process, port = holding_its_gil

    @story
    async def asked() -> None:
        assert await store_answers("w7", ("127.0.0.1", port), 10.0)
        assert not await store_answers("w8", ("127.0.0.1", port), 10.0), "another worker has its port now"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert not await store_answers("w7", ("127.0.0.1", port), 0.2), "a stopped process is not a busy one"
        process.kill()
        process.wait()
        assert not await store_answers("w7", ("127.0.0.1", port), 10.0)

    asked()
