"""Does the number of workers change a single bit of the result, and what does it cost that it does not?

    python jobs/bench/exactness.py [--models mlp,conv,transformer] [--steps 300] [--only proof|price] [--quick] [--json]

**The proof** is the protocol of EasyScale (SC'23). Each model is trained three times in each mode (`--run.exactness`), with
the same 4 logical workers and the same global batch, on real Ray with nodes of one CPU each:

    elastic      on 4 nodes; after a third of the steps two nodes are killed, after two thirds one is added; in each third
                 one worker's process gets `kill -9`, and its replacement joins. The others go on in their processes
    4 workers    from beginning to end
    1 worker     from beginning to end

Shown are the digests of weights and optimizer after each third. In bitwise mode those of the three runs must be equal; in
default mode losses and final weights must be those of 1 worker up to 1e-6: the largest relative difference of the losses
of all steps, and for each tensor of the model the largest difference as a part of its largest value. How many steps each
number of workers took is counted from the run's events: a replacement needs seconds to start, and until it is there fewer
workers take the steps, so the thirds are not exact. `lost` is how many of the workers that were killed the run told as lost.

**The price** is the time per step as a ratio to default mode: of PyTorch's deterministic kernels alone, and of bitwise mode,
which needs them, too. On a CPU nearly all kernels are deterministic anyway; on a GPU they are not. See `exact_price.py` for
what is measured, and what is left out. How to read it: rounding and reducing cost so much per weight and logical worker,
whatever the rows, so a model with many weights and few rows in a step pays most (here the mlp: 8 rows for each logical
worker), and one that computes much with each weight least. On one worker nothing is hidden: it rounds for all four.

The exit code is 1 if bitwise runs end in different bits, if default ones differ by more than 1e-6, or if something that was
killed was not told as lost, or a run went back to a checkpoint. The price does not change it: a machine has worse minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from exact_models import KINDS
from exact_price import BITWISE, KERNELS, MODES, Price, measure
from exact_runs import MOST_NODES, STAGES, Runs, Told
from machine import Machine
from workload import show_table

from raytrain.launch.cluster import connected

EXACTNESS = ("default", "bitwise")
ELASTIC, MANY, ONE = HOW = ("elastic", f"{MOST_NODES} workers", "1 worker")
RELATIVE = 1e-6
BOUND, BOUND_FOR = 1.35, ("transformer", 2)
SHOWN_DIGITS = 12
NUM_TURNS, QUICK_TURNS, QUICK_STEPS = 24, 4, 90

Proof = dict[str, Told]
"""The runs of one model in one mode, by how they were run."""


def main() -> None:
    arguments = parse()
    results: dict[str, object] = {}
    broken: list[str] = []
    if arguments.only != "price":
        proofs = prove(arguments.models, arguments.steps)
        broken = [line for (kind, mode), runs in proofs.items() for line in flaws(kind, mode, runs)]
        results |= {"proof": [as_json(kind, mode, runs) for (kind, mode), runs in proofs.items()], "broken": broken}
        if not arguments.json:
            show_proofs(proofs)
    if arguments.only != "proof":
        prices = {(kind, number): price(kind, number, arguments.turns) for kind in arguments.models for number in (2, 1)}
        results["price"] = [{"model": kind, "workers": number, **asdict(some)} for (kind, number), some in prices.items()]
        if not arguments.json:
            show_prices(prices)
    if arguments.json:
        print(json.dumps(results, indent=1))
    for line in broken:
        print(f"BROKEN: {line}", file=sys.stderr if arguments.json else sys.stdout)
    sys.exit(1 if broken else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(KINDS), help="of mlp, conv, transformer; by default all")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run of the proof, a multiple of 3")
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of each mode for the price")
    parser.add_argument("--only", choices=["proof", "price"], help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help=f"see whether it works: {QUICK_STEPS} steps, few turns")
    parser.add_argument("--json", action="store_true", help="write JSON instead of tables")
    arguments = parser.parse_args()
    arguments.models = arguments.models.split(",")
    if unknown := set(arguments.models) - set(KINDS):
        parser.error(f"--models: there is no {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if arguments.quick:
        arguments.steps, arguments.turns = QUICK_STEPS, QUICK_TURNS
    if arguments.steps % len(STAGES) or arguments.steps < QUICK_STEPS:
        parser.error(f"--steps: a multiple of {len(STAGES)}, at least {QUICK_STEPS}, so that each stage has its time")
    return arguments


def prove(models: list[str], num_steps: int) -> dict[tuple[str, str], Proof]:
    """Trains each model in each mode in each way."""
    proofs = {}
    with tempfile.TemporaryDirectory(prefix="exactness-") as scratch, cluster_of_nodes() as machine:
        runs = Runs(machine, Path(scratch), num_steps)
        for kind in models:
            for mode in EXACTNESS:
                tell(f"{kind}, {mode}: {ONE}")
                one = runs.fixed(kind, mode, 1)
                tell(f"{kind}, {mode}: {MANY}")
                many = runs.fixed(kind, mode, MOST_NODES)
                tell(f"{kind}, {mode}: {ELASTIC}")
                proofs[kind, mode] = {ELASTIC: runs.elastic(kind, mode), MANY: many, ONE: one}
    return proofs


@contextlib.contextmanager
def cluster_of_nodes() -> Iterator[Machine]:
    """A cluster on this machine that still lacks its nodes, with this process connected to it."""
    machine = Machine()
    os.environ["RAY_ADDRESS"] = machine.address
    try:
        with connected():
            yield machine
    finally:
        del os.environ["RAY_ADDRESS"]
        machine.close()


def price(kind: str, num_workers: int, num_turns: int) -> Price:
    tell(f"{kind}: price on {num_workers}")
    return measure(kind, num_workers, num_turns)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def differences(told: Told, expected: Told) -> tuple[float, float]:
    """The largest relative difference of the losses, and that of the weights as a part of their tensor's largest value."""
    losses = float(np.max(np.abs(told.losses / expected.losses - 1)))
    weights = [_difference(told.weights[name], value) for name, value in expected.weights.items()]
    return losses, max(weights)


def _difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.double().abs().max())
    difference = float((values.double() - expected.double()).abs().max())
    return difference / scale if difference else 0.0


def has_one_digest(runs: Proof) -> bool:
    return all(told.digests == runs[ONE].digests for told in runs.values())


def flaws(kind: str, mode: str, runs: Proof) -> list[str]:
    """What the runs of one model in one mode do not keep."""
    found = []
    if mode == "bitwise" and not has_one_digest(runs):
        found.append("the digests differ")
    for how, told in runs.items():
        losses, weights = differences(told, runs[ONE])
        if max(losses, weights) > RELATIVE:
            found.append(f"{how} differs from {ONE}: losses by {losses:.1e}, weights by {weights:.1e}")
        if told.lost < told.planned:
            found.append(f"{how}: {told.planned} workers were killed, and {told.lost} told as lost")
        if told.restores:
            found.append(f"{how}: went back to a checkpoint")
        if not told.is_played:
            found.append(f"{how}: the run was over before its last worker joined")
    return [f"{kind}, {mode}: {flaw}" for flaw in found]


def as_json(kind: str, mode: str, runs: Proof) -> dict[str, object]:
    told = {}
    for how, some in runs.items():
        losses, weights = differences(some, runs[ONE])
        facts = asdict(some) | {"losses differ by": losses, "weights differ by": weights, "last loss": some.losses[-1]}
        told[how] = {name: value for name, value in facts.items() if name not in ("losses", "weights")}
    return {"model": kind, "mode": mode, "one digest": has_one_digest(runs), "runs": told}


def show_proofs(proofs: dict[tuple[str, str], Proof]) -> None:
    for (kind, mode), runs in proofs.items():
        marks = sorted(runs[ONE].digests)
        rows = []
        for how, told in runs.items():
            losses, weights = differences(told, runs[ONE])
            took = ", ".join(f"{steps} on {size}" for size, steps in told.steps_on.items())
            cells = [told.digests.get(step, "none")[:SHOWN_DIGITS] for step in marks]
            rows.append(
                [how, *cells, f"{losses:.1e}", f"{weights:.1e}", f"{told.lost} of {told.planned}", str(told.joined), took]
            )
        verdict = f"one digest: {'yes' if has_one_digest(runs) else 'no'}"
        header = ["", *(f"after {step}" for step in marks), "losses", "weights", "lost", "joined", "steps"]
        show_table(f"{kind}, {mode}: {verdict}", header, rows)
        print()


def show_prices(prices: dict[tuple[str, int], Price]) -> None:
    rows = []
    for (kind, number), some in prices.items():
        cells = [f"{some.step_ms[mode]:.1f} ms" for mode in MODES]
        for mode in (KERNELS, BITWISE):
            low, high = np.quantile(some.ratios[mode], [0.25, 0.75])
            cells.append(f"{some.ratio(mode):.3f} ({low:.2f} to {high:.2f})")
        rows.append([f"{kind}, {number} worker{'s' * (number > 1)}", *cells])
    header = ["", *MODES, f"ratio of {KERNELS}", f"ratio of {BITWISE}"]
    show_table("median time per step; ratios to default mode, median and quartiles of the turns", header, rows)
    if (shown := prices.get(BOUND_FOR)) is None:
        return
    ratio = shown.ratio(BITWISE)
    print(f"{BITWISE} on the {BOUND_FOR[0]} with {BOUND_FOR[1]} workers: {ratio:.2f}, the bound is {BOUND}")
    print()
    parts = list(dict.fromkeys(part for some in shown.parts_ms.values() for part in some))
    cells = [[part, *(f"{shown.parts_ms[mode].get(part, 0.0):.2f} ms" for mode in MODES)] for part in parts]
    show_table(f"parts of a step, {BOUND_FOR[0]}, {BOUND_FOR[1]} workers, mean", ["", *MODES], cells)


if __name__ == "__main__":
    main()
