"""The hand-over of the state to newcomers: what is sent, when it is loaded, and how it is verified."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.errors import CheckpointError
from raytrain.rendezvous.state import NO_STATE
from raytrain.worker import group as group_module
from raytrain.worker import handover, tensor_hash
from raytrain.worker.failures import PeerLost, WorkerBroken
from raytrain.worker.handover import StateMismatch, broadcast_state, digest_of
from raytrain.worker.state import EvaluationState, TrainState
from raytrain.worker.tensor_hash import hash_tensors
from tests.support.ranks import ThreadGroup, in_ranks
from tests.support.tasks import WideMomentum
from tests.unit.worker.stubs import built, trained


def share(*states: TrainState) -> tuple[list[Any], list[ThreadGroup]]:
    """Broadcasts the first state to the ranks that have the others; what each rank raised, and the groups."""
    groups: dict[int, ThreadGroup] = {}

    def run(rank: int, group: ThreadGroup) -> None:
        groups[rank] = group
        broadcast_state(states[rank], group)

    return in_ranks(run, len(states)), [groups[rank] for rank in range(len(states))]


def first_weight(state: TrainState) -> torch.Tensor:
    return next(state.model.parameters()).detach().view(-1)


# What is compared


def reverse(values: torch.Tensor) -> None:
    values.copy_(values.flip(0).clone())


def swap_two(values: torch.Tensor) -> None:
    values[[2, 5]] = values[[5, 2]]


def up_and_down_by_one_bit(values: torch.Tensor) -> None:
    values.view(torch.int32)[3] += 1
    values.view(torch.int32)[4] -= 1


def negate_zero(values: torch.Tensor) -> None:
    values[0] = -0.0 if values[0] == 0 else 0.0


@pytest.mark.parametrize("change", [reverse, swap_two, up_and_down_by_one_bit, negate_zero])
def test_digests_tell_apart_what_sums_of_words_do_not(change: Any) -> None:
    state, other = trained(2), trained(2)
    assert digest_of(state) == digest_of(other)
    change(first_weight(other))
    assert digest_of(state) != digest_of(other)


def shift_slot(state: TrainState) -> None:
    list(state.optimizer.state.values())[1]["exp_avg"].view(-1)[0] += 1e-6


def exchange_slots(state: TrainState) -> None:
    slots = next(iter(state.optimizer.state.values()))
    slots["exp_avg"], slots["exp_avg_sq"] = slots["exp_avg_sq"], slots["exp_avg"]


def set_rate(state: TrainState) -> None:
    state.optimizer.param_groups[0]["lr"] *= 1.5


def advance_schedule(state: TrainState) -> None:
    state.scheduler.last_epoch += 1  # type: ignore[union-attr]


def advance_step(state: TrainState) -> None:
    state.step += 1


def other_type(state: TrainState) -> None:
    slots = next(iter(state.optimizer.state.values()))
    slots["step"] = slots["step"].view(torch.int32)


@pytest.mark.parametrize("change", [shift_slot, exchange_slots, set_rate, advance_schedule, advance_step, other_type])
def test_digests_cover_all_that_a_step_depends_on(change: Any) -> None:
    state = trained(2)
    change(state)
    assert digest_of(state) != digest_of(trained(2))


def test_digests_cover_weights_of_every_type_and_shape() -> None:
    model = nn.Linear(3, 1).bfloat16()
    model.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("empty", torch.ones(0, 3))
    model.register_buffer("grid", torch.arange(12.0).view(3, 4).t())
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    digests = {digest_of(state)}
    for place, value in ((model.mask[4:], False), (model.count, 4), (model.phase[1:], 1j), (model.grid[0, 2:], 7.0)):
        place.fill_(value)
        digests.add(digest_of(state))
    assert len(digests) == 5


def test_a_hash_depends_on_neither_memory_layout_nor_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 5, 7)
    moved = values.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert hash_tensors([values]) == hash_tensors([moved])
    monkeypatch.setitem(tensor_hash.WORDS_AT_ONCE, "cpu", 64)
    long, short = torch.randn(64 * 5 + 3), torch.randn(7)
    exchanged = torch.cat([long[128:256], long[:128], long[256:]])
    unaligned = torch.cat([long[:1], long])[1:]
    assert len({*hash_tensors([long, exchanged, long.flip(0), short, short[:6]])}) == 5
    assert hash_tensors([short, unaligned]) == [*hash_tensors([short]), *hash_tensors([long])]


# What is sent


def test_nothing_is_sent_if_all_ranks_are_equal() -> None:
    states = [trained(3) for _ in range(3)]
    states[1].evaluation = EvaluationState()
    raised, groups = share(*states)
    assert raised == [None] * 3
    assert [group.broadcasts for group in groups] == [[]] * 3
    assert states[1].evaluation == EvaluationState(2, 0.5)


def test_a_worker_alone_does_not_hash_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainState, "live", lambda self: pytest.fail("it was looked at"))
    assert share(trained(1))[0] == [None]


@pytest.mark.parametrize("newcomer", ["new", "with other last bits"])
def test_who_differs_takes_all_of_the_leaders_state(newcomer: str) -> None:
    leader, peer, mine = trained(3), trained(3), built(seed=9) if newcomer == "new" else trained(3)
    first_weight(mine)[0] += 1e-7
    assert share(leader, peer, mine)[0] == [None] * 3
    assert (mine.step, mine.evaluation.best_score) == (3, 0.5)
    assert digest_of(mine) == digest_of(leader) == digest_of(peer) == digest_of(trained(3))
    assert mine.learning_rate == leader.learning_rate < 0.005


def test_only_tensors_that_somebody_lacks_are_sent() -> None:
    def bytes_sent(*states: TrainState) -> int:
        raised, groups = share(*states)
        assert raised == [None] * len(states)
        return sum(groups[0].broadcasts[2:])  # after the outline and its length

    leader, fresh = built(), built()
    leader.step = 0
    assert bytes_sent(leader, fresh) == 0, "at the start all have the same weights already"
    assert fresh.step == 0
    behind = trained(3)
    first_weight(behind)[0] += 1e-7
    assert bytes_sent(trained(3), behind) == 12 * 24 * 4, "one weight matrix"


def test_a_large_state_is_sent_in_chunks_and_never_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickling holds the GIL, and with it the heartbeats of the leader."""
    pickled: list[int] = []
    dumps = pickle.dumps

    def recording(value: Any) -> bytes:
        pickled.append(len(dumps(value)))
        return dumps(value)

    monkeypatch.setattr(group_module.pickle, "dumps", recording)
    monkeypatch.setattr(group_module, "CHUNK_BYTES", 1000)
    leader, newcomer, beats = trained(3), built(seed=9), []

    def run(rank: int, group: ThreadGroup) -> list[int]:
        broadcast_state((leader, newcomer)[rank], group, lambda: beats.append(rank))
        return group.broadcasts

    sent, received = in_ranks(run, 2)
    assert sent == received
    weights = sum(p.numel() * 4 for p in leader.model.parameters())
    chunks = sent[2:-2]  # between the outline without and with hashes
    assert sum(chunks) >= 3 * weights > 4000, "weights and two slots each"
    assert max(chunks) <= 1000
    assert beats.count(0) == beats.count(1) == len(chunks), "progress is told with each chunk"
    assert max(pickled) < weights * 3
    assert digest_of(newcomer) == digest_of(leader)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_state_of_which_a_part_has_arrived_is_marked(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(group_module, "CHUNK_BYTES", 1000)
    newcomer = built(seed=9)
    chunks: list[int] = []

    def run(rank: int, group: ThreadGroup) -> None:
        def last_chunk() -> None:
            chunks.append(rank)
            if chunks.count(0) == chunk:
                group.die()

        broadcast_state((trained(3), newcomer)[rank], group, last_chunk)

    assert [type(error).__name__ for error in in_ranks(run, 2)] == ["BrokenBarrierError"] * 2
    assert (newcomer.step, newcomer.evaluation, newcomer.is_partial) == (NO_STATE, EvaluationState(), True)


def test_tensors_arrive_where_they_stay_so_that_nobody_holds_the_state_twice() -> None:
    leader, newcomer = trained(3), built(seed=9)
    places = [parameter.data_ptr() for parameter in newcomer.model.parameters()]
    received: list[torch.Tensor] = []
    load = newcomer.load_live

    def recording(state: Any) -> None:
        received.extend(tensor for slots in state["optimizer"]["state"].values() for tensor in slots.values())
        load(state)

    newcomer.load_live = recording  # type: ignore[method-assign]
    assert share(leader, newcomer)[0] == [None, None]
    assert (digest_of(newcomer), newcomer.is_partial) == (digest_of(leader), False)
    assert [parameter.data_ptr() for parameter in newcomer.model.parameters()] == places
    kept = [tensor.data_ptr() for slots in newcomer.optimizer.state.values() for tensor in slots.values()]
    assert received
    assert [tensor.data_ptr() for tensor in received] == kept


def test_a_newcomer_does_not_hash_what_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    original = handover.hash_tensors
    monkeypatch.setattr(handover, "hash_tensors", lambda tensors: hashed.append(len(tensors)) or original(tensors))
    assert share(trained(3), built(seed=9), built(seed=8))[0] == [None] * 3
    assert len(hashed) == 3, "the leader once, and the others what has arrived"


# How it is verified


class Forgetful(TrainState):
    """A machine that cannot be trusted: one bit of what it loads is another."""

    def load_live(self, state: Any) -> None:
        super().load_live(state)
        first_weight(self).view(torch.int32)[7] ^= 1


def test_a_worker_whose_state_differs_after_the_broadcast_is_refused_by_name_and_by_its_peers() -> None:
    new = built(seed=9)
    states = trained(3), Forgetful(new.model, new.optimizer, new.schedule), trained(3)
    leader, refused, peer = share(*states)[0]
    assert isinstance(refused, StateMismatch)
    assert isinstance(refused, WorkerBroken), "its process ends, and is replaced"
    assert "after the broadcast of step 3, this worker's state is not the leader's: model.0.weight" in str(refused)
    assert isinstance(leader, PeerLost)
    assert isinstance(peer, PeerLost)


def test_a_state_that_no_checkpoint_could_hold_is_refused_on_the_leader() -> None:
    leader = trained(3)
    leader.optimizer.param_groups[0]["hook"] = first_weight

    def run(rank: int, group: ThreadGroup) -> None:
        if rank:
            group.all_gather_object((NO_STATE, EvaluationState()))
            group.all_gather_object("")
        else:
            broadcast_state(leader, group)

    error, _ = in_ranks(run, 2)
    assert isinstance(error, CheckpointError)
    assert "optimizer.param_groups[0].hook is a builtins.function" in str(error)


# Which types arrive


def stepped(weight: torch.dtype, steps: int, state: TrainState | None = None) -> TrainState:
    torch.manual_seed(0)
    model = nn.Linear(7, 5).to(weight)
    state = state or TrainState(model, WideMomentum(model.parameters(), 0.1), None, step=0)
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(torch.linspace(0, 1, 7, dtype=weight)).sum().backward()
        state.optimizer.step()
        state.step += 1
    return state


@pytest.mark.parametrize("by", ["hand-over", "checkpoint"])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_optimizer_state_keeps_its_types(weight: torch.dtype, by: str) -> None:
    straight, newcomer = stepped(weight, 3), stepped(weight, 0)
    if by == "hand-over":
        assert share(straight, newcomer)[0] == [None, None]
    else:
        newcomer.load_checkpoint(straight.snapshot().files())
    assert digest_of(newcomer) == digest_of(straight)
    assert digest_of(stepped(weight, 2, newcomer)) == digest_of(stepped(weight, 2, straight)), "and goes on alike"
