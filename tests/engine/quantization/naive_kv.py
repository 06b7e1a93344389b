"""K and V in few bits, written out one group at a time: what a reader of the cache should get, in float64.

Only what decides on a code (scale and quotient) is in float32, so that a tie falls as it does there: to the even code.
"""

import numpy as np
import torch

E4M3 = np.array(
    [(2.0**-9 * m if not e else 2.0 ** (e - 7) * (1 + m / 8)) for e in range(16) for m in range(8) if (e, m) != (15, 7)]
)


def bf16(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32).to(torch.bfloat16))


def share(x: float, steps: float) -> float:
    """x / steps, as float32 has it."""
    return float(np.float32(x) * np.float32(1 / steps))


def quotients(row: np.ndarray, scale: float) -> np.ndarray:
    return (row.astype(np.float32) / np.float32(scale)).astype(np.float64)


def int8(row: np.ndarray) -> np.ndarray:
    """One vector [D]."""
    scale = bf16(max(share(np.abs(row).max(), 127), 1e-30))
    return np.clip(np.rint(quotients(row, scale)), -127, 127) * scale


def fp8(row: np.ndarray) -> np.ndarray:
    scale = bf16(min(max(share(np.abs(row).max(), 448), 1e-30), 128))
    distance = np.abs(np.abs(quotients(row, scale))[:, None] - E4M3)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(len(E4M3)) % 2 == 0)
    code = np.where(even.any(1), even.argmax(1), nearest.argmax(1))
    return np.sign(row) * E4M3[code] * scale


def int4(group: np.ndarray) -> np.ndarray:
    """One group [n], asymmetric."""
    low = bf16(group.min())
    above = (group.astype(np.float32) - np.float32(low)).astype(np.float64)
    scale = bf16(max(share(above.max(), 15), 1e-30))
    return np.clip(np.rint(quotients(above, scale)), 0, 15) * scale + low


def keys_int4(k: np.ndarray) -> np.ndarray:
    """Keys of a block [tokens, K, D]: each channel is a group."""
    out = np.empty_like(k)
    for head in range(k.shape[1]):
        for channel in range(k.shape[2]):
            out[:, head, channel] = int4(k[:, head, channel])
    return out


def values_int4(v: np.ndarray) -> np.ndarray:
    """Values [tokens, K, D]: groups of 32 channels of a token, where that divides the head; else the head."""
    size = 32 if v.shape[2] % 32 == 0 else v.shape[2]
    out = np.empty_like(v)
    for token in range(v.shape[0]):
        for head in range(v.shape[1]):
            for first in range(0, v.shape[2], size):
                out[token, head, first : first + size] = int4(v[token, head, first : first + size])
    return out
