"""One decoder layer for a few rows of one request, attention included, written so that a compiler makes it one function.

A decode of one request multiplies vectors: it takes as long as reading the weights, plus the fixed cost of some forty operator
calls a layer, which is more than half of it. Verifying a draft multiplies a few rows at once: reading the weights is still the
larger part, as long as each is read once for all rows. Compiled ahead of time (``engine.model.compiled``), a layer is one C++
function with one parallel region, and reading the weights is nearly all that is left.

``FewRows`` runs all layers of a model so. It stands in for an attention backend and its plan, too: of a context that is
physically contiguous the layer reads a view of the pool, of any other a gathered copy. The rows' own K and V are written
beside the pool and put there in the end, by one copy for all layers.

Shapes: R rows, E hidden_size, H query heads, K KV heads, G = H / K, D head_dim, L tokens of context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Span, contiguous, first_key, hidden_keys
from engine.hardware.device import TORCH_DTYPES
from engine.kvcache.layout import KVCache

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # ``layer`` of some shape and number of rows

MIN_CONTEXT = 2  # a length of 0 or 1 would be compiled as a constant


@dataclass(frozen=True)
class RowShape:
    """All that the layer's code depends on, but for the number of rows. Dtypes by name."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    qk_norm: bool
    biases: tuple[bool, ...]  # whether qkv, o, gate_up, down have one
    dtype: str  # of the weights and of stored K and V
    compute_dtype: str  # of cos and sin
    threads: int  # that share the work; compiled for one it would never use more

    def examples(self, rows: int, length: int) -> list[torch.Tensor]:
        """Inputs of ``layer`` of the right shapes and dtypes for ``rows`` after a context of ``length``; a chain."""
        weight, compute = TORCH_DTYPES[self.dtype], TORCH_DTYPES[self.compute_dtype]
        angles = torch.outer(torch.arange(rows) + 1.0, torch.rand(self.head_dim))[:, None]
        stored = 2 * self.num_kv_heads, self.head_dim
        inputs = [torch.randn(rows, self.hidden_size), angles.cos().to(compute), angles.sin().to(compute)]
        inputs += [torch.randn(length, *stored).to(weight), torch.zeros(rows, *stored, dtype=weight)]
        if rows > 1:
            inputs += [torch.zeros(rows, length), torch.full((rows, rows), float("-inf")).triu_(1)]
        return inputs + self.example_weights()

    def example_weights(self) -> list[torch.Tensor]:
        """What stands for the layer's weights in ``examples``."""
        size, q = self.hidden_size, self.num_heads * self.head_dim
        qk_heads = self.num_heads + self.num_kv_heads
        shapes = [((qk_heads + self.num_kv_heads) * self.head_dim, size), (size, q)]
        shapes += [(2 * self.intermediate_size, size), (size, self.intermediate_size)]
        weights = [torch.randn(shape).mul_(0.02).to(TORCH_DTYPES[self.dtype]) for shape in shapes]
        biases = [torch.randn(shape[0]) if has else torch.zeros(0) for shape, has in zip(shapes, self.biases, strict=True)]
        qk = torch.rand(qk_heads, self.head_dim) + 0.5 if self.qk_norm else torch.zeros(0)
        return [*weights, torch.ones(size), torch.ones(size), qk, *biases]


def layer(shape: RowShape, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A whole layer for ``rows`` rows of one request, all of which see all of the context.

    ``inputs``: x [R, E] float32; cos and (signed) sin [R, 1, D] in compute_dtype; context [L, 2 K, D], K and V of the tokens
    before the rows, in dtype; fresh [R, 2 K, D] in dtype, **overwritten** with the rows' own K and V. For more than one row: what
    is added to the scores, 0 or -inf, float32, [R, L] for the context and [R, R] for the rows. Then the weights: qkv, o,
    gate_up, down [out, in] in dtype; attention norm, MLP norm, QK-norm [H + K, D] (empty: none), and four biases (empty:
    none), float32. The first output is x [R, E] float32 after the layer.
    """
    x, cos, sin, context, fresh, *masks = inputs[: 5 if rows == 1 else 7]
    qkv, o, gate_up, down, attention_norm, mlp_norm, qk_norm, *biases = inputs[-11:]
    half, heads, kv_heads = shape.head_dim // 2, shape.num_heads, shape.num_kv_heads

    def product(matrix: torch.Tensor, of: torch.Tensor, which: int) -> torch.Tensor:
        # A sum for each row rather than one over all: they become one loop, which reads and widens a weight once for all rows.
        wide = matrix.float()
        out = torch.stack([(wide * of[i]).sum(-1) for i in range(rows)])
        return out + biases[which] if shape.biases[which] else out

    def norm(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + shape.eps) * weight

    attention_in = norm(x, attention_norm)
    projected = product(qkv, attention_in, 0).view(rows, heads + 2 * kv_heads, shape.head_dim)
    qk = projected[:, : heads + kv_heads]
    if shape.qk_norm:
        qk = norm(qk, qk_norm)
    qk = qk * cos.float() + torch.cat((qk[..., half:], qk[..., :half]), -1) * sin.float()
    q = (qk[:, :heads] * shape.head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, shape.head_dim)
    stored = torch.cat((qk[:, heads:], projected[:, heads + kv_heads :]), 1).to(fresh.dtype)
    fresh.copy_(stored)
    attended = attention(q, context.float(), stored.float(), masks).reshape(rows, heads * shape.head_dim)
    x = x + product(o, attended, 1)
    mlp_in = norm(x, mlp_norm)
    gate, up = product(gate_up, mlp_in, 2).chunk(2, -1)
    mlp_out = F.silu(gate) * up
    # What is given out is computed once; what is not, the compiler computes again for every row of the matrix that reads it.
    return x + product(down, mlp_out, 3), attention_in, q, attended, mlp_in, mlp_out


def attention(q: torch.Tensor, context: torch.Tensor, fresh: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """Softmax over context and fresh rows as if they were one: ``q`` [R, K, G, D], scaled, the others [L or R, 2 K, D]."""

    def of(kv: torch.Tensor, mask: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [R, K, G, L] and values [1, K, 1, L, D]."""
        k, v = kv.transpose(0, 1)[None, :, None].chunk(2, 1)
        scores = (q[:, :, :, None] * k).sum(-1)
        return (scores + mask[0][:, None, None] if mask else scores), v

    (before, v_before), (own, v_own) = of(context, masks[:1]), of(fresh, masks[1:])
    top = torch.maximum(before.amax(-1, keepdim=True), own.amax(-1, keepdim=True))
    before, own = (before - top).exp(), (own - top).exp()
    out = (before[..., None] * v_before).sum(-2) + (own[..., None] * v_own).sum(-2)
    return out / (before.sum(-1, keepdim=True) + own.sum(-1, keepdim=True))


class FewRows:
    """All layers of a model, or its first ones, for the rows of one request."""

    def __init__(self, windows: Sequence[int | None], weights: Sequence[list[torch.Tensor]]) -> None:
        """``windows``: each layer's sliding window. ``weights``: of each layer, the last inputs of ``layer``."""
        self.windows = windows
        self.weights = weights
        self._shortest = min((window for window in windows if window is not None), default=None)
        self._fresh: dict[int, torch.Tensor] = {}  # by the number of rows: [num_layers, R, 2 K, D]

    def takes(self, span: Span) -> bool:
        """Whether there is context enough before ``span`` in every layer."""
        return span.start - first_key(span.start, self._shortest) >= MIN_CONTEXT

    def run(
        self, function: Function, rows: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, span: Span, kv: KVCache
    ) -> torch.Tensor:
        """``x`` [n, E], cos and sin [n, 1, D] of ``span`` -> [n, E] float32 after the last layer. ``function`` is for
        ``rows`` >= n rows: those that are missing see the context and are seen by none. K and V of the n go into ``kv``."""
        n = span.num_tokens
        x = F.pad(x.float(), (0, 0, 0, rows - n))
        if rows > n:
            cos, sin = (F.pad(t, (0, 0, 0, 0, 0, rows - n)) for t in (cos, sin))
        fresh = self._fresh.get(rows)
        if fresh is None:
            kv_heads, head_dim = kv.tensor.shape[-2:]
            shape = len(self.weights), rows, 2 * kv_heads, head_dim
            fresh = self._fresh[rows] = torch.zeros(shape, dtype=kv.tensor.dtype)
        slots = kv.tensor[: len(self.weights)].flatten(1, 2).flatten(2, 3)  # [num_layers, slots, 2 K, D]
        contexts = {window: _context(span, window, slots) for window in set(self.windows)}
        masks = {window: _masks(span, window, rows) if rows > 1 else [] for window in contexts}
        for i, (window, own, weights) in enumerate(zip(self.windows, fresh.unbind(), self.weights, strict=True)):
            x = function([x, cos, sin, contexts[window](i), own, *masks[window], *weights])[0]
        slots.index_copy_(1, torch.from_numpy(span.slots[span.start :]), fresh[:, :n])
        return x[:n]


def _context(span: Span, window: int | None, slots: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """K and V before ``span`` by layer, [L, 2 K, D]. ``slots``: the pool, [num_layers, slots, 2 K, D]."""
    before = span.slots[first_key(span.start, window) : span.start]
    run = contiguous(before)
    if run is not None:
        return slots[:, run].unbind().__getitem__
    index = torch.from_numpy(before)
    return lambda i: slots[i].index_select(0, index)


def _masks(span: Span, window: int | None, rows: int) -> list[torch.Tensor]:
    """What ``layer`` adds to the scores of ``rows`` rows, the first of which are those of ``span``."""
    hidden, n = hidden_keys(span, window), span.num_tokens
    length = hidden.shape[1] - n
    context, fresh = np.zeros((rows, length), dtype=np.float32), np.full((rows, rows), -np.inf, dtype=np.float32)
    context[:n][hidden[:, :length]] = -np.inf
    fresh[:n, :n][~hidden[:, length:]] = 0
    return [torch.from_numpy(context), torch.from_numpy(fresh)]
