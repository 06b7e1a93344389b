"""What is tried on the Attention page: a kernel's tile sizes, the attention that it computes, and the GPU that it is compiled for.

Shapes: N tokens, G query heads that share one KV head, D head size.
"""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from engine.hardware.gpus import Gpu, gpu
from explorer.i18n import _

TILES = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
HEAD_DIMS = (64, 80, 96, 128)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
WINDOWS = (0, 64, 128, 256, 512)
GROUPS = (1, 2, 3, 4, 8)
DTYPE, DTYPE_BYTES = "float16", 2  # of Q, K, V and the output; log-sum-exps are float32
SEED = 7


@dataclass(frozen=True)
class Shape:
    """``window`` 0: none. ``group``: query heads of the one KV head. ``block_size``: tokens of a KV block; 0: K and V lie in one piece.
    ``descriptors``: compiled with tensor descriptors (TMA)."""

    block_m: int = 64
    block_n: int = 64
    num_stages: int = 2
    num_warps: int = 4
    head_dim: int = 64
    seq_len: int = 512
    causal: bool = True
    window: int = 0
    group: int = 1
    gpu: str = "h100-sxm"
    block_size: int = 0
    descriptors: bool = False

    @property
    def chip(self) -> Gpu:
        return gpu(self.gpu)

    @property
    def target(self) -> str:
        return f"sm_{self.chip.arch}"

    @property
    def padded(self) -> int:
        """The head size as the kernel computes with it: the next power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def run(self) -> "Shape":
        """What a run depends on: neither the GPU, nor warps, nor stages change what is computed."""
        return replace(self, gpu="h100-sxm", num_warps=4, num_stages=2)

    @property
    def compiled(self) -> "Shape":
        """What the compiled code depends on: the number of tokens is told at the launch."""
        return replace(self, seq_len=512)

    @property
    def label(self) -> str:
        parts = [
            f"{self.block_m} × {self.block_n}", _("{n} stages").format(n=self.num_stages), _("{n} warps").format(n=self.num_warps),
            f"D {self.head_dim}",
        ]  # fmt: skip
        if self.window:
            parts.append(_("window {n}").format(n=self.window))
        elif not self.causal:
            parts.append(_("not causal"))
        if self.descriptors:
            parts.append("TMA")
        return ", ".join(parts)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(4)
def inputs(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [N, G, D], k and v [N, 1, D], float16, the same for the same shape; not to be changed. Some keys stand out, so that the running maximum moves."""
    rng = np.random.default_rng(SEED)
    n, d = shape.seq_len, shape.head_dim
    q = rng.standard_normal((n, shape.group, d))
    k = rng.standard_normal((n, 1, d)) * (1 + 1.5 * (rng.random((n, 1, 1)) < 0.04))
    v = rng.standard_normal((n, 1, d))
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


def row_scores(shape: Shape, head: int, row: int) -> np.ndarray:
    """float64 [N]: the scaled logits of one query row, -inf where it does not see the key."""
    q, k, _v = inputs(shape.run)
    scores = k[:, 0].astype(np.float64) @ q[row, head].astype(np.float64) / np.sqrt(shape.head_dim)
    keys = np.arange(shape.seq_len)
    hidden = np.zeros(shape.seq_len, bool)
    if shape.causal:
        hidden |= keys > row
    if shape.window:
        hidden |= keys <= row - shape.window
    scores[hidden] = -np.inf
    return scores
