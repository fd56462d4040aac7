"""How are row ids encoded in a line of the event log? Bit-packed, then base 85.

Random row ids do not compress, so each takes as many bits as the largest one needs: ids below a million take 2.5 bytes,
3.3 characters in base 85 (whose alphabet needs no escapes in JSON). The order is preserved. Workers pack, the audit
unpacks.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray


def pack(rows: NDArray[np.int64]) -> str:
    """Row ids (shape [rows], any int64) as text: `count.lowest.bits.payload`."""
    if len(rows) == 0:
        return "0.0.0."
    low = int(rows.min())
    above = rows.astype(np.uint64) - np.uint64(low % 2**64)  # modulo 2**64, so any int64 works
    width = int(above.max()).bit_length()
    bits = np.unpackbits(above.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    payload = np.packbits(bits[:, :width], bitorder="little").tobytes()
    return f"{len(rows)}.{low}.{width}.{base64.b85encode(payload).decode()}"


def unpack(text: str) -> NDArray[np.int64]:
    """The row ids that `pack` was given, in the same order. Shape [rows].

    Raises:
        ValueError: the text is not an output of `pack`.
    """
    count, low, width, payload = text.split(".", 3)
    shape = int(count), int(width)
    data = np.frombuffer(base64.b85decode(payload), dtype=np.uint8)
    if 8 * len(data) < shape[0] * shape[1]:
        raise ValueError(f"packed row ids are truncated: {len(data)} bytes for {count} rows of {width} bits")
    bits = np.zeros((shape[0], 64), dtype=np.uint8)
    bits[:, : shape[1]] = np.unpackbits(data, count=shape[0] * shape[1], bitorder="little").reshape(shape)
    above = np.packbits(bits, axis=1, bitorder="little").view("<u8").reshape(-1).astype(np.uint64)
    return (above + np.uint64(int(low) % 2**64)).astype(np.int64)
