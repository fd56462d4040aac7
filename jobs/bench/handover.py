"""How long does training stand still until a newcomer has the state, and how much memory does that take on both ends?

    python jobs/bench/handover.py
    python jobs/bench/handover.py --gb 4 --repeat 1

A leader has a model and its AdamW state, a newcomer the model as it begins. They are two processes in a gloo group over
loopback, without Ray. For each size, in turns:

    raytrain           the product's own hand-over: hash, broadcast, load, and hash again
    plain broadcast    the same number of bytes as one tensor, into new memory: the limit
    pickled object     `broadcast_object_list` of the state dictionaries, and `load_state_dict`: what one writes oneself

    pause     from the moment at which both are there until both have the state
    leader,   the peak of the process's memory above what it held before it had a state, divided by the bytes of the state:
    newcomer  what is more than 1 is not the state itself
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from workload import median_of, show_table

from raytrain.rendezvous.state import NO_STATE, Generation, JoinRequest
from raytrain.worker.group import Group
from raytrain.worker.handover import broadcast_state
from raytrain.worker.state import TrainState

OURS, PLAIN, PICKLED = SIDES = ("raytrain", "plain broadcast", "pickled object")
WIDTH, PARTS = 1024, 3  # of a layer; and how often Adam's state has each weight, with the weight itself
TARGET = 1.5


@dataclass(frozen=True)
class Outcome:
    """One hand-over: seconds, and memory in multiples of the state."""

    pause_s: float
    leader: float
    newcomer: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, action="append", help="sizes of the state in GB; by default 0.1, 1 and 4")
    parser.add_argument("--repeat", type=int, default=3, help="hand-overs of each side; medians are shown")
    parser.add_argument("--only", choices=SIDES, action="append", help="sides to run; all by default")
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    arguments = parser.parse_args()
    sides, sizes = arguments.only or SIDES, arguments.gb or [0.1, 1.0, 4.0]
    outcomes: dict[float, dict[str, list[Outcome]]] = {size: {side: [] for side in sides} for size in sizes}
    for size, by_side in outcomes.items():
        for number in range(arguments.repeat):
            for side in by_side:
                print(f"{size:g} GB, run {number + 1} of {arguments.repeat}: {side}", file=sys.stderr, flush=True)
                by_side[side].append(measure(side, size))
    if arguments.json:
        print(json.dumps({size: {s: [asdict(o) for o in some] for s, some in x.items()} for size, x in outcomes.items()}))
    else:
        show(outcomes)


def show(outcomes: dict[float, dict[str, list[Outcome]]]) -> None:
    for size, by_side in outcomes.items():
        pauses = {side: median_of([one.pause_s for one in some]) for side, some in by_side.items()}
        rows = [
            [side, f"{pauses[side]:.2f} s", f"{size / pauses[side]:.2f} GB/s"]
            + [f"{median_of([getattr(one, end) for one in some]):.2f}" for end in ("leader", "newcomer")]
            for side, some in by_side.items()
        ]
        show_table(f"{size:g} GB of state", ["", "pause", "rate", "leader", "newcomer"], rows)
        if {OURS, PLAIN} <= pauses.keys():
            print(f"pause, {OURS} : {PLAIN} = {pauses[OURS] / pauses[PLAIN]:.2f} (target {TARGET})\n")


def measure(side: str, size_gb: float) -> Outcome:
    """Hands a state over once, between two new processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="handover-") as scratch:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_work, args=(rank, f"file://{scratch}/store", side, size_gb, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            (pause_s, leader), (_, newcomer) = [ours.recv() for ours, _ in pipes]
        except EOFError:
            sys.exit(f"{side}, {size_gb:g} GB: a process has ended without a result")
        finally:
            for process in processes:
                process.join(60)
                process.kill()
    return Outcome(pause_s, leader, newcomer)


def _work(rank: int, store: str, side: str, size_gb: float, result) -> None:
    """One end; sends the seconds and the memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    dist.barrier()
    before = resident_bytes()
    run, num_bytes = SETUPS[side](rank, size_gb)
    held = resident_bytes() if rank == 0 else before
    reset_peak()
    dist.barrier()
    started = time.monotonic()
    run()
    dist.barrier()
    took_s = time.monotonic() - started
    own = num_bytes if rank == 0 else 0  # what the leader had before is its state
    result.send((took_s, (peak_bytes() - held + own) / num_bytes))
    dist.barrier()
    os._exit(0)  # taking gloo's threads down now and then aborts the process (torch 2.13)


Setup = tuple[Callable[[], object], int]
"""What hands the state over, and the bytes of the state."""


def ours(rank: int, size_gb: float) -> Setup:
    state, num_bytes = build_state(rank, size_gb)
    members = tuple(JoinRequest(f"w{number}", 0, ("", 0)) for number in range(2))
    group = Group(Generation(1, members, "start"), rank, torch.device("cpu"))

    def run() -> None:
        broadcast_state(state, group)
        if state.step != 1:
            raise RuntimeError("the newcomer does not have the state")

    return run, num_bytes


def pickled(rank: int, size_gb: float) -> Setup:
    state, num_bytes = build_state(rank, size_gb)

    def run() -> None:
        parts = [state.model.state_dict(), state.optimizer.state_dict()] if rank == 0 else [None, None]
        dist.broadcast_object_list(parts)
        if rank:
            state.model.load_state_dict(parts[0])
            state.optimizer.load_state_dict(parts[1])

    return run, num_bytes


def plain(rank: int, size_gb: float) -> Setup:
    num_bytes = int(size_gb * 1e9)
    line = torch.ones(num_bytes, dtype=torch.uint8) if rank == 0 else torch.empty(num_bytes, dtype=torch.uint8)
    return lambda: dist.broadcast(line, src=0), line.numel()


SETUPS: dict[str, Callable[[int, float], Setup]] = {OURS: ours, PLAIN: plain, PICKLED: pickled}


def build_state(rank: int, size_gb: float) -> tuple[TrainState, int]:
    """The state of the leader after a step, or that of a newcomer; and the bytes that it has after a step."""
    torch.manual_seed(rank)
    num_layers = max(1, round(size_gb * 1e9 / (PARTS * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    state = TrainState(model, optimizer, None, step=NO_STATE if rank else 1)
    return state, num_layers * WIDTH * WIDTH * 4 * PARTS


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
