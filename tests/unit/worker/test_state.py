"""The state in memory: how it is built, handed over and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain.config import RunConfig
from raytrain.errors import ConfigError, TaskError
from raytrain.rendezvous.state import NO_STATE
from raytrain.worker import state as module
from raytrain.worker.group import Group, PeerLost
from raytrain.worker.state import Boundary, StateDiffers, TrainState, build_state, digest, synchronise
from tests.support.tasks import WithDropout
from tests.unit.worker.tasks import Slope

CPU = torch.device("cpu")


def built(task: Any = None, seed: int = 5) -> TrainState:
    return build_state(task or WithDropout(), RunConfig(seed=seed), 10, CPU)


def trained(steps: int) -> TrainState:
    state = built()
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 12)).sum().backward()
        state.optimizer.step()
        state.scheduler.step()  # type: ignore[union-attr]
    state.step = steps
    return state


class Answers(Group):
    """A follower of a group of two, whose leader has the values that the test gives.

    Args:
        shared: what the leader shares, one after the other.
        theirs: what the leader adds to each gathering, one after the other.
    """

    def __init__(self, shared: list[Any], theirs: list[Any]) -> None:
        self.rank, self.size, self.device = 1, 2, CPU
        self._shared, self._theirs = shared, theirs

    def share(self, value: Any) -> Any:
        return self._shared.pop(0)

    def gather(self, value: Any) -> list[Any]:
        return [self._theirs.pop(0), value]


def test_the_initial_state_depends_on_the_seed_alone() -> None:
    assert digest(built()) == digest(built())
    assert digest(built()) != digest(built(seed=6))
    assert built().step == NO_STATE


def test_two_states_differ_in_their_digests_if_weights_or_the_optimizer_differ() -> None:
    state, other = trained(2), trained(2)
    assert digest(state) == digest(other)
    with torch.no_grad():
        weight = next(other.model.parameters()).view(-1)
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    assert digest(state) != digest(other)
    third = trained(2)
    next(iter(third.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-6
    assert digest(state) != digest(third)


def test_the_digest_knows_weights_of_every_type_and_shape() -> None:
    model = nn.Linear(3, 1).bfloat16()
    model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    model.register_buffer("count", torch.tensor(3))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    before = digest(state)
    model.mask[4] = False
    assert digest(state) != before


def test_nothing_is_sent_where_all_ranks_are_equal() -> None:
    state, best = trained(3), Boundary(3, 0.25, 3, {"valid/loss": 0.25})
    synchronise(state, Answers([best], [(3, digest(state))]))
    assert state.boundary == best


def test_a_newcomer_takes_all_of_the_leaders_state() -> None:
    leader, newcomer = trained(3), built(seed=9)
    theirs = [(3, digest(leader)), digest(leader)]
    synchronise(newcomer, Answers([Boundary(2, 0.5), leader.snapshot().to_bytes()], theirs))
    assert (newcomer.step, newcomer.boundary.best_score) == (3, 0.5)
    assert digest(newcomer) == digest(leader)
    assert newcomer.learning_rate == leader.learning_rate < 0.005


def test_a_rank_at_the_same_step_that_differs_in_last_bits_takes_the_leaders_state() -> None:
    leader, other = trained(3), trained(3)
    with torch.no_grad():
        next(other.model.parameters()).view(-1)[0] += 1e-7
    synchronise(other, Answers([Boundary(), leader.snapshot().to_bytes()], [(3, digest(leader)), digest(leader)]))
    assert digest(other) == digest(leader)


def test_a_worker_whose_state_still_differs_after_the_hand_over_is_not_admitted() -> None:
    leader, newcomer = trained(3), built()
    with pytest.raises(StateDiffers, match="after step 3 was handed over"):
        synchronise(newcomer, Answers([Boundary(), leader.snapshot().to_bytes()], [(3, (0, 0)), (0, 0)]))


def test_the_others_do_not_train_with_a_worker_whose_state_differs() -> None:
    class Three(Answers):
        def gather(self, value: Any) -> list[Any]:
            return [*super().gather(value), (0, 0)]

    leader, follower = trained(3), trained(3)
    theirs = [(3, digest(leader)), digest(leader)]
    with pytest.raises(PeerLost, match="another worker differs"):
        synchronise(follower, Three([Boundary(), leader.snapshot().to_bytes()], theirs))
    assert digest(follower) == digest(leader)


def test_a_loss_in_the_middle_of_the_hand_over_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer = built()
    before = digest(newcomer)
    with pytest.raises(IndexError):  # the leader is gone before its state has come
        synchronise(newcomer, Answers([Boundary(2, 0.5)], [(3, (0, 0))]))
    assert (newcomer.step, newcomer.boundary, digest(newcomer)) == (NO_STATE, Boundary(), before)


class Frozen(Slope):
    def model(self) -> nn.Module:
        return super().model().requires_grad_(False)


class NoModel(Slope):
    def model(self) -> nn.Module:
        return None  # type: ignore[return-value]


class NoOptimizer(Slope):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return None  # type: ignore[return-value]


class RaisingModel(Slope):
    def model(self) -> nn.Module:
        raise ValueError("no such layer")


def test_r14_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Frozen\.model") as caught:
        built(Frozen())
    assert "no parameter that is trained" in str(caught.value)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (NoModel(), "model returned NoneType; it returns a torch.nn.modules.module.Module"),
        (NoOptimizer(), "optimizer returned NoneType; it returns a torch.optim.optimizer.Optimizer"),
        (RaisingModel(), "ValueError: no such layer\nraised by model"),
    ],
)
def test_a_hook_that_fails_or_returns_something_else_is_named(task: Any, text: str) -> None:
    with pytest.raises(TaskError) as caught:
        built(task)
    assert text in str(caught.value)
    assert module.__file__ not in str(caught.value)
