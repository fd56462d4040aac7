"""The first group of a process is closed when the process leaves it, or peers would wait for it in vain.

In a process of its own, since what a process imports while it is in a group can keep that group for ever.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc, sys, weakref
from contextlib import nullcontext
import torch
import torch.distributed as dist
from raytrain.rendezvous.state import JoinRequest, Generation
from raytrain.worker.failures import PeerLost
from raytrain.worker.group import process_group, serve_store
from raytrain.worker.hooks import user_code
from tests.unit.worker.tasks import Slope
from tests.unit.worker.test_step import CPU, Bench

def wait_in_vain(group):
    work = group.all_reduce_async(torch.ones(1))
    kept_by_the_traceback = dist.group.WORLD
    raise RuntimeError("gloo: Connection closed by peer")

gc.disable()
store = serve_store("127.0.0.1")
members = (JoinRequest("w0", 0, ("127.0.0.1", store.port)),)
try:
    with process_group(Generation(1, members, "start"), "w0", store, CPU, 10.0) as group:
        kept = weakref.ref(dist.group.WORLD)
        bench = Bench(Slope(), group, exactness=sys.argv[1])
        bench.run()
        bench.run()
        bench.train_step.close()
        bench.train_step = None
        with user_code("loss") if sys.argv[1] == "default" else nullcontext():
            wait_in_vain(group)
except PeerLost:
    pass
assert kept() is None, gc.get_referrers(kept())
"""


def test_p1_the_first_group_of_a_process_is_closed_when_it_leaves() -> None:
    for exactness in ("default", "bitwise"):
        command = [sys.executable, "-c", SCRIPT, exactness]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr[-2000:]
