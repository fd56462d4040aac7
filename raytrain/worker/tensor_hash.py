"""Do tensors on two machines have the same bytes? A 64-bit hash of each, computed where the tensor lies.

Each 64-bit word is multiplied, a key of its position is added, and the upper half is folded into the lower one; the results
are added up, and sums of integers do not depend on an order, so a GPU computes the same in any. Finds any change that is no
attack: exchanged elements, and errors that cancel in a sum. For digests that people compare, see `bitwise`.

Measured on one core of an AMD EPYC: 0.22 s per GiB, where zlib's CRC-32 takes 0.28 s and hashlib's SHA-256 0.60 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

WORD_BYTES = 8
WORDS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""On a CPU as many as its caches hold, with the results; on a GPU few kernels and little memory."""
_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # of SplitMix64 (Steele, Lea, Flood 2014), as signed words
_PIECES = 0xD6E8FEB86659FD93

Piece = tuple[int, torch.Tensor]
"""Words of one tensor, with its number."""


def hash_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One hash per tensor, of its bytes in row-major order; its type and shape do not count.

    All tensors lie on one device, which is waited for once, or some on the CPU.
    """
    numbers: list[int] = []
    sums: list[torch.Tensor] = []
    scratch: dict[torch.device, torch.Tensor] = {}
    for batch in _batches(tensors):
        device = batch[0][1].device
        if device not in scratch:
            scratch[device] = torch.empty((2, _words_at_once(device)), dtype=torch.int64, device=device)
        numbers += [number for number, _ in batch]
        sums.append(_mixed_sums([words for _, words in batch], scratch[device]))
    hashes = [0] * len(tensors)
    for number, value in zip(numbers, _to_host(sums), strict=True):
        hashes[number] = (hashes[number] * _PIECES + value) % (1 << 64)
    return hashes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any shape, in row-major order; without a copy if they lie so. Shape [bytes]."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1).view(torch.uint8)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[Piece]]:
    """Pieces of one device, `WORDS_AT_ONCE` words at most together: small tensors side by side, large ones cut."""
    batch: list[Piece] = []
    room, device = 0, None
    for number, tensor in enumerate(tensors):
        words = _words(tensor)
        limit = _words_at_once(words.device)
        for piece in [words] if words.numel() <= limit else torch.split(words, limit):
            size = piece.numel()
            if batch and (size > room or words.device != device):
                yield batch
                batch = []
            if not batch:
                device, room = words.device, limit
            if size:
                batch.append((number, piece))
                room -= size
    if batch:
        yield batch


def _words_at_once(device: torch.device) -> int:
    return WORDS_AT_ONCE.get(device.type, WORDS_AT_ONCE["cpu"])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    data = as_bytes(tensor)
    missing = -data.numel() % WORD_BYTES
    if missing or data.storage_offset() % WORD_BYTES:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


def _mixed_sums(pieces: list[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
    """The sum of the mixed words of each piece. Shape [pieces].

    Args:
        scratch: memory for the words of all pieces, twice. Shape [2, words].
    """
    keys = _keys(scratch.device, scratch.shape[1])
    sizes = [piece.numel() for piece in pieces]
    words, places = pieces[0], keys[: sizes[0]]
    if len(pieces) > 1:
        words, places = torch.cat(pieces), torch.cat([keys[:size] for size in sizes])
    mixed, upper = scratch[0, : words.numel()], scratch[1, : words.numel()]
    torch.add(places, words, alpha=_FIRST, out=mixed)
    torch.bitwise_right_shift(mixed, 32, out=upper)
    mixed.bitwise_xor_(upper)
    if len(pieces) == 1:
        return mixed.sum().reshape(1)
    ends = torch.tensor(sizes, device=scratch.device).cumsum(0) - 1
    return torch.diff(mixed.cumsum(0)[ends], prepend=mixed.new_zeros(1))


@cache
def _keys(device: torch.device, size: int) -> torch.Tensor:
    """The key of each position in a piece, as SplitMix64 draws them. Shape [size]."""
    keys = torch.arange(1, size + 1, device=device) * _GOLDEN
    for shift, factor in ((32, _FIRST), (29, _SECOND)):
        keys = (keys ^ (keys >> shift)) * factor
    return keys ^ (keys >> 32)


def _to_host(sums: list[torch.Tensor]) -> list[int]:
    """All values, in order, with one copy from each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in sums:
        by_device.setdefault(part.device, []).append(part)
    values = {device: iter(torch.cat(parts).tolist()) for device, parts in by_device.items()}
    return [next(values[part.device]) for part in sums for _ in range(part.numel())]
