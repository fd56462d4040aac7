"""P2: a kill at any point of a step costs at most the step in flight, and no committed step is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.events.kinds import StepsDone
from raytrain.events.log import read
from raytrain.launch.schedule import build_schedule
from raytrain.report.audit import audit
from tests.laws.compare import assert_same, by_hand, settings, train_by_hand
from tests.support.child import PLACES
from tests.support.local import Kill, LocalRun, Plot
from tests.support.tasks import TASKS, OnBrokenGpu

END_OF_EPOCH = 13
CHAINS = {
    "reading, evaluation, forward": (("before reading", 5), ("before evaluation", 13), ("before forward", 20)),
    "forward, evaluation, backward": (("after forward", 5), ("after evaluation", 13), ("after backward", 20)),
    "commit": (("before commit", 5), ("after commit", 9), ("before recording", 20)),
    "recording, broadcast": (("after recording", 5), ("after broadcast", 5), ("before broadcast", 5)),
}
"""Points of death in one run of four workers, with the finished steps at each; a broadcast follows the death before it."""
VICTIMS = {"leaders": ("w0", "w1", "w2"), "followers": ("w3", "w2", "w1")}


def test_every_place_of_a_step_is_in_a_chain_of_kills() -> None:
    assert {place for chain in CHAINS.values() for place, _ in chain} | {"while saving", "after sending"} == set(PLACES)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victims", VICTIMS)
@pytest.mark.parametrize("chain", CHAINS)
def test_p2_kills_at_any_place_of_a_step_do_not_change_the_result(chain: str, victims: str, tmp_path: Path) -> None:
    kills = [Kill(worker, place, step) for worker, (place, step) in zip(VICTIMS[victims], CHAINS[chain], strict=True)]
    check(LocalRun(TASKS["dropout"], settings(), tmp_path, Plot(4, kills=kills, replace=False)))


@pytest.mark.timeout(60)
def test_p2_p5_leaders_that_die_while_saving_leave_the_checkpoint_to_a_peer(tmp_path: Path) -> None:
    kills = [Kill("w0", "while saving", END_OF_EPOCH), Kill("w1", "while saving", 3 * END_OF_EPOCH)]
    check(LocalRun(TASKS["dropout"], settings(), tmp_path, Plot(3, kills=kills, replace=False)))


@pytest.mark.timeout(60)
def test_p2_a_spare_takes_the_place_of_a_lost_worker_in_the_next_generation(tmp_path: Path) -> None:
    kills = [Kill("w0", "before commit", 5), Kill("w1", "after backward", 30)]
    run = LocalRun(TASKS["dropout"], settings(), tmp_path, Plot(2, kills=kills, spares=1))
    check(run)
    formed = [(generation.cause, len(generation.members)) for generation in run.generations]
    assert formed[:2] == [("start", 2), ("loss", 2)], "not first without a worker, and then with a newcomer"
    assert max(size for _, size in formed) == 2


@pytest.mark.timeout(60)
def test_r1_a_leader_that_dies_after_it_has_handed_over_its_state_leaves_no_gap(tmp_path: Path) -> None:
    """Its last steps are on no storage yet, and nobody is left who was there but the newcomer, who has their result."""
    kills = [Kill("w0", "after broadcast", END_OF_EPOCH + 1)]
    run = LocalRun(TASKS["dropout"], settings(), tmp_path, Plot(1, kills=kills, hold=END_OF_EPOCH, late=[5], replace=False))
    check(run)
    assert [[member.worker for member in generation.members] for generation in run.generations] == [
        ["w0"],
        ["w0", "w1"],
        ["w1"],
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("others", [0, 1])
def test_p1_a_leader_that_dies_while_it_hands_over_its_state_leaves_no_half_of_it(others: int, tmp_path: Path) -> None:
    """The newcomer has tensors of the leader by then; it goes on with the state of a survivor, or of a checkpoint."""
    first = 1 + others
    kills = [Kill("w0", "after sending", END_OF_EPOCH + 1)]
    plot = Plot(first, kills=kills, hold=END_OF_EPOCH, late=[5], replace=False)
    run = LocalRun(TASKS["dropout"], settings(), tmp_path, plot)
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand("dropout", settings()))
    assert audit(run.run_dir).passed
    left = ["w0"] if not others else ["w0", "w1"]
    members = [sorted(member.worker for member in generation.members) for generation in run.generations]
    assert members == [left, [*left, f"w{first}"], sorted({*left, f"w{first}"} - {"w0"})]


@pytest.mark.timeout(60)
def test_p2_a_gpu_that_fails_in_the_tasks_code_costs_its_worker_and_not_the_run(tmp_path: Path) -> None:
    bad_row = int(build_schedule(TASKS["dropout"], settings()).train.row_ids(5, 0)[0])
    task = OnBrokenGpu(mark=str(tmp_path / "failed"), bad_row=bad_row)
    run = LocalRun(task, settings(), tmp_path, Plot(2))
    steps = run.run()
    assert_same(run.run_dir, steps, train_by_hand(task, settings()))
    assert audit(run.run_dir).passed
    assert run.generations[0].members[0].worker not in {member.worker for member in run.generations[-1].members}


def check(run: LocalRun) -> None:
    steps = run.run()
    assert_same(run.run_dir, steps, by_hand("dropout", settings()))
    assert audit(run.run_dir).passed
    recorded = [e.first_step + i for e in read(run.run_dir) if isinstance(e, StepsDone) for i in range(len(e.losses))]
    assert recorded == sorted(set(recorded)), "a committed step was repeated"
