"""Deals the workers of a cluster out among the trials of a sweep, as a Ray actor; one per sweep.

It looks at the cluster several times a second, and lets `table` decide. It may die: Ray starts it anew, and the trials tell
it again what it must know. It belongs to nobody, since every trial may be the first to need it or the last; so it ends by
itself when no trial has told it anything for a while.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util import placement_group_table

from raytrain.elastic.quota import Claim
from raytrain.tune.table import Table

LOOK_EVERY_S = 0.25
LISTEN_FIRST_S = 2.0
"""A broker that was just started listens for so long before it deals."""
ALONE_S = 30.0
"""Without trials it ends after so long."""


class Broker:
    """The actor: `hold`, `changed`, `leave` and `tell` are called by trials, `claims` by whoever shows the sweep.

    Args:
        policy, mode, max_workers: of `Table`.
    """

    def __init__(self, policy: str, mode: str, max_workers: int | None = None) -> None:
        self._table = Table(policy, mode, max_workers)
        self._born = self._last_told = time.monotonic()
        self._news = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Starts to look, if it does not yet."""
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())

    async def hold(self, claim: Claim) -> None:
        """A trial tells how it is; it is over when it does not for a while."""
        self._last_told = time.monotonic()
        self._table.claims[claim.name] = claim, self._last_told
        await self.begin()

    async def changed(self, name: str, known: int) -> int:
        """Answers once the number of workers of a trial is another one than it knows."""
        while self._table.quotas.get(name, known) == known:
            await self._news.wait()
        return self._table.quotas[name]

    async def leave(self, name: str) -> None:
        """A trial needs no workers any more."""
        self._table.claims.pop(name, None)

    async def tell(self, name: str, step: int, value: float) -> None:
        """A trial has a value of the sweep's metric after `step` finished steps."""
        self._table.curves.setdefault(name, {})[step] = value

    async def claims(self) -> dict[str, Claim]:
        """What the trials that run told last, by name."""
        return {name: claim for name, (claim, _) in self._table.claims.items()}

    async def _keep(self) -> None:
        while time.monotonic() - self._last_told < ALONE_S:
            self._look(time.monotonic())
            await asyncio.sleep(LOOK_EVERY_S)
        ray.actor.exit_actor()

    def _look(self, now: float) -> None:
        if now - self._born < LISTEN_FIRST_S:
            return
        if self._table.look(placement_group_table(), ray.available_resources(), now):
            self._news.set()
            self._news = asyncio.Event()


def broker_of(sweep: str, policy: str, mode: str, max_workers: int | None) -> Any:
    """The broker of a sweep: the one that is there, or a new one on the node of the one who asks first."""
    here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=10_000, label_selector=here)(Broker)
    options = {"lifetime": "detached", "get_if_exists": True, "scheduling_strategy": "DEFAULT"}
    broker = remote.options(name=f"raytrain-broker/{sweep}", **options).remote(policy, mode, max_workers)
    broker.begin.remote()
    return broker
