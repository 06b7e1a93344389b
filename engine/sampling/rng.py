"""Counter-based random numbers: a draw depends on what it is for, never on what was drawn before.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a 64-bit
key and a 128-bit counter into 128 random bits. The key is the request's seed; the counter says which draw it is:

    word 0   position of the token in its sequence (0: the first prompt token)
    word 1   sample index (0 .. n-1 of a request with n > 1)
    word 2   stream (0: the token itself; other uses get numbers of their own)
    word 3   sibling (which of several draws at the same place; 0 where there is one)

Speculation draws what it drafts, what it tests and what it puts in place of a rejected token each from a stream of its own. The
branches of a tree share the numbers of a position: no more than one of them is ever followed, so none is used twice.

So a token drawn in a batch of 32 gets the same u as the same token drawn alone, or replayed from a log.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

STREAM_TOKEN = 0
STREAM_DRAFT = 1  # the drafter's own draw
STREAM_ACCEPT = 2  # the test of a drafted token
STREAM_RESIDUAL = 3  # the token in place of a rejected one

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and key increments of the paper, table 2
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_TO_UNIT = 2.0**-53

Words: TypeAlias = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words for a counter of four 32-bit words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox4x32_array(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``philox4x32`` for many counters: [4, N] and [2, N] uint64 holding 32-bit words -> [4, N] uint64."""
    mask, shift = np.uint64(_MASK), np.uint64(32)
    m = np.array([[_M0], [_M1]], dtype=np.uint64)
    w = np.array([[_W1], [_W0]], dtype=np.uint64)
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    k = key[::-1]  # the key that meets the product of word 0 is the second
    for _ in range(_ROUNDS):
        product = m * even
        mixed = (product >> shift) ^ odd[::-1] ^ k
        even, odd = mixed[::-1], (product & mask)[::-1]
        k = (k + w) & mask
    out = np.empty_like(counter)
    out[0::2], out[1::2] = even, odd
    return out


def uniform(seed: int, sample_index: int, position: int, stream: int = STREAM_TOKEN, sibling: int = 0) -> float:
    """The draw u in [0, 1), a multiple of 2**-53, that belongs to this seed and place.

    ``seed``: [0, 2**64); the others: [0, 2**32). ValueError outside.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
    if not 0 <= (position | sample_index | stream | sibling) <= _MASK:
        raise ValueError(
            "sample_index, position, stream and sibling must be integers in [0, 2**32), got "
            f"{sample_index!r}, {position!r}, {stream!r}, {sibling!r}"
        )
    a, b, _, _ = philox4x32((position, sample_index, stream, sibling), (seed & _MASK, seed >> 32))
    return ((a >> 5) * 67108864 + (b >> 6)) * _TO_UNIT


def uniforms(
    seeds: Sequence[int] | npt.NDArray[np.uint64],
    sample_indices: Sequence[int] | npt.NDArray[np.uint64] | int,
    positions: Sequence[int] | npt.NDArray[np.uint64],
    stream: int = STREAM_TOKEN,
    sibling: int = 0,
) -> npt.NDArray[np.float64]:
    """``uniform`` for N places at once (sequences of N, or a scalar that they share): float64 [N], equal bit for bit."""
    try:
        seed = np.atleast_1d(np.asarray(seeds, dtype=np.uint64))
        words = np.broadcast_arrays(seed, *(np.asarray(x, dtype=np.uint64) for x in (positions, sample_indices, stream, sibling)))
    except OverflowError as error:
        raise ValueError(f"seeds, sample_indices, positions, stream and sibling must be integers in range: {error}") from None
    counter = np.stack(words[1:])
    if counter.size and int(counter.max()) > _MASK:
        raise ValueError(f"sample_index, position, stream and sibling must be integers in [0, 2**32), got {int(counter.max())}")
    key = np.stack([words[0] & np.uint64(_MASK), words[0] >> np.uint64(32)])
    out = philox4x32_array(counter, key)
    high, low = out[0] >> np.uint64(5), out[1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) * _TO_UNIT
