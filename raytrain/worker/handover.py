"""How do all ranks of a new generation come to have the leader's state, and how is that verified?

Ranks that have a state hash it; if all hashes are equal, as after the loss of a peer, nothing is sent. Otherwise the leader
sends the plain values, and those tensors that some rank lacks, piece by piece, so that heartbeats go on meanwhile, and into
the memory where they stay, so that nobody holds the state twice. What has arrived is loaded, and hashed again. If only a
part arrives, the state is built anew, see `TrainState.is_partial`. Runs in the worker's training thread.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from raytrain.checkpoint.state import refuse_objects
from raytrain.rendezvous.state import NO_STATE
from raytrain.worker.bitwise import value_digest
from raytrain.worker.failures import PeerLost, WorkerBroken
from raytrain.worker.group import Group
from raytrain.worker.state import TrainState
from raytrain.worker.tensor_hash import hash_tensors

Path = tuple[Any, ...]
"""Keys and indices on the way to a tensor in nested plain values."""


class StateMismatch(WorkerBroken):
    """This worker's state is not the one that the leader sent: its process, or its machine, cannot be trusted."""


@dataclass(frozen=True)
class TensorSlot:
    """Stands for a tensor among plain values."""

    path: Path


@dataclass(frozen=True)
class TensorForm:
    """The type and the shape of a tensor, and the hash of its bytes, where that is known."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: int | None = None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Outline:
    """A state without the bytes of its tensors; equal states have equal outlines.

    Args:
        plain: nested plain values, with a `TensorSlot` for each tensor.
        forms: of the tensors.
    """

    plain: dict[str, Any]
    forms: dict[Path, TensorForm]

    @cached_property
    def digest(self) -> str:
        lines = sorted(f"{path} {form.dtype} {form.shape} {form.hash}" for path, form in self.forms.items())
        return hashlib.sha256("\n".join([value_digest(self.plain), *lines]).encode()).hexdigest()

    def with_hashes(self, tensors: Mapping[Path, torch.Tensor]) -> Outline:
        """The same with the hashes of the tensors."""
        hashes = hash_tensors([tensors[path] for path in self.forms])
        pairs = zip(self.forms.items(), hashes, strict=True)
        return Outline(self.plain, {path: replace(form, hash=value) for (path, form), value in pairs})

    def difference(self, other: Outline) -> str:
        """The name of the first tensor that differs, or "a plain value"."""
        paths = (path for path in {**self.forms, **other.forms} if self.forms.get(path) != other.forms.get(path))
        return next((".".join(map(str, path)) for path in paths), "a plain value")


def broadcast_state(state: TrainState, group: Group, on_progress: Callable[[], None] = lambda: None) -> None:
    """Gives every rank the leader's state, and verifies that they are equal afterwards.

    Sends nothing if all ranks have the same state already, as after the loss of a peer. That ranks are at the same step does
    not mean it: one that was cut off, but alive, has taken its last step in another group. So each forming of a group costs
    the time of a hash, see `tensor_hash`.

    Args:
        on_progress: called again and again while a state is sent.

    Raises:
        StateMismatch: this rank's state differs from the leader's afterwards.
        PeerLost: another rank's state does; that rank will not train with the others.
        CheckpointError: the state holds an object that no checkpoint could hold.
    """
    if group.size == 1:
        return
    known = group.all_gather_object((state.step, state.evaluation))
    leader_step, evaluation = known[0]
    # Before the first step all states are equal; afterwards that of a newcomer is not, and is not hashed.
    may_be_equal = [step != NO_STATE or leader_step == 0 for step, _ in known]
    compares = may_be_equal[group.rank] and sum(may_be_equal) > 1
    mine, tensors = outline_of(state)
    if compares:
        mine = mine.with_hashes(tensors)
    digests = group.all_gather_object(mine.digest if compares else "")
    if not all(digest and digest == digests[0] for digest in digests):
        _send(state, group, mine, tensors, on_progress)
    state.evaluation = evaluation


def outline_of(state: TrainState) -> tuple[Outline, dict[Path, torch.Tensor]]:
    """The outline of a state, without hashes, and its live tensors."""
    tensors: dict[Path, torch.Tensor] = {}
    plain = _emptied(state.live(), (), tensors)
    return Outline(plain, {path: TensorForm(t.dtype, tuple(t.shape)) for path, t in tensors.items()}), tensors


def digest_of(state: TrainState) -> str:
    """Equal for states that are equal to the last bit."""
    outline, tensors = outline_of(state)
    return outline.with_hashes(tensors).digest


def _send(
    state: TrainState, group: Group, mine: Outline, own: Mapping[Path, torch.Tensor], on_progress: Callable[[], None]
) -> None:
    """Sends what some rank lacks, and verifies the result.

    Args:
        mine: of this rank; with hashes if it may be equal to that of another rank.
        own: its tensors.
    """
    if group.is_leader:
        refuse_objects(state.live(), "")
    theirs: Outline = group.broadcast_object(mine)
    is_hashed = all(form.hash is not None for form in theirs.forms.values())
    lacking = {path for path, form in theirs.forms.items() if form.hash is None or mine.forms.get(path) != form}
    state.is_partial = bool(lacking) and not group.is_leader
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as beside:  # the leader hashes while it sends
        hashing = beside.submit(mine.with_hashes, own) if group.is_leader and not is_hashed else None
        received = _send_tensors(group, theirs, set() if group.is_leader else lacking, own, on_progress)
        if not is_hashed:
            theirs = group.broadcast_object(hashing.result() if hashing else None)
    if not group.is_leader and (lacking or mine.plain != theirs.plain):
        state.load_live({key: _filled(value, received) for key, value in theirs.plain.items()})
        outline, tensors = outline_of(state)
        mine = outline.with_hashes(tensors)
        state.is_partial = False
    elif group.is_leader:
        mine = theirs
    _verify(group, mine, theirs, state.step)


def _send_tensors(
    group: Group,
    theirs: Outline,
    lacking: Set[Path],
    own: Mapping[Path, torch.Tensor],
    on_progress: Callable[[], None],
) -> dict[Path, torch.Tensor]:
    """Sends the tensors that some rank lacks; returns all that this rank needs.

    They arrive in this rank's own memory where it has a tensor of the same form, else in new memory on the host.
    """
    paths = list(theirs.forms)
    wanted = torch.tensor([path in lacking for path in paths], dtype=torch.float32, device=group.device)
    counts = group.all_reduce(wanted).tolist() if paths else []
    tensors: dict[Path, torch.Tensor] = {}
    lines: list[torch.Tensor | None] = []
    for path in paths:
        tensors[path] = _memory_for(theirs.forms[path], own.get(path)) if path in lacking else own[path]
        lines.append(tensors[path] if path in lacking or group.is_leader else None)
    sent = [number for number, count in enumerate(counts) if count]
    group.broadcast_tensors(
        [lines[number] for number in sent], [theirs.forms[paths[number]].num_bytes for number in sent], on_progress
    )
    return tensors


def _memory_for(form: TensorForm, own: torch.Tensor | None) -> torch.Tensor:
    """This rank's own tensor, if it can take the bytes as they come; else new memory on the host."""
    is_alike = own is not None and (own.dtype, tuple(own.shape)) == (form.dtype, form.shape)
    if own is not None and is_alike and own.is_contiguous() and not (own.is_conj() or own.is_neg()):
        return own
    return torch.empty(form.shape, dtype=form.dtype)


def _verify(group: Group, mine: Outline, theirs: Outline, step: int) -> None:
    digests = group.all_gather_object(mine.digest)
    if digests[group.rank] != digests[0]:
        difference = theirs.difference(mine)
        raise StateMismatch(f"after the broadcast of step {step}, this worker's state is not the leader's: {difference}")
    if any(other != digests[0] for other in digests):
        raise PeerLost(f"the state of another worker differs after the broadcast of step {step}")


def _emptied(value: Any, path: Path, tensors: dict[Path, torch.Tensor]) -> Any:
    """Nested plain values with slots instead of their tensors, which are put into `tensors`."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        tensors[path] = value
        return TensorSlot(path)
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _emptied(item, (*path, key), tensors) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_emptied(item, (*path, index), tensors) for index, item in enumerate(value))
    return value


def _filled(value: Any, tensors: Mapping[Path, torch.Tensor]) -> Any:
    """The reverse of `_emptied`."""
    if isinstance(value, TensorSlot):
        return tensors[value.path]
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _filled(item, tensors) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_filled(item, tensors) for item in value)
    return value
