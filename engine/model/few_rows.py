"""One decoder layer for a few rows of one request, attention included, written so that a compiler makes it one function.

A decode of one request multiplies vectors: it takes as long as reading the weights, plus the fixed cost of some forty operator
calls a layer, which is more than half of it. Verifying a draft multiplies a few rows at once: reading the weights is still the
larger part, as long as each is read once for all rows. Compiled ahead of time (``engine.model.compiled``), a layer is one C++
function with one parallel region, and reading the weights is nearly all that is left.

``FewRows`` runs all layers of a model so. It stands in for an attention backend and its plan, too: of a context that is
physically contiguous the layer reads a view of the pool, of any other (or one in few bits) a gathered copy. The rows' own K and V are written
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
    weights: tuple[str, ...] = ("plain",) * 4  # how qkv, o, gate_up, down are held; see ``weight_inputs``

    @property
    def is_plain(self) -> bool:
        return self.weights == ("plain",) * 4

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
        weights = [t for held, shape in zip(self.weights, shapes, strict=True) for t in self._examples_of(held, *shape)]
        biases = [torch.randn(shape[0]) if has else torch.zeros(0) for shape, has in zip(shapes, self.biases, strict=True)]
        qk = torch.rand(qk_heads, self.head_dim) + 0.5 if self.qk_norm else torch.zeros(0)
        return [*weights, torch.ones(size), torch.ones(size), qk, *biases]

    def _examples_of(self, held: str, rows: int, columns: int) -> list[torch.Tensor]:
        kind, group, scaled = weight_kind(held)
        if kind == "plain":
            return [torch.randn(rows, columns).mul_(0.02).to(TORCH_DTYPES[self.dtype])]
        if kind == "int8":
            parts = [torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows).mul_(4e-4)]
        else:
            scales = torch.rand(rows, columns // group).mul_(5e-3).half()
            parts = [torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8), scales, scales * -8]
        return [*parts, torch.rand(columns) + 0.5] if scaled else parts


def weight_kind(held: str) -> tuple[str, int, bool]:
    """("plain" | "int8" | "int4", group size or 0, whether the input is scaled first) of "int4:32+scaled" and the like.

    What the layer then takes of a matrix [N, K]: plain: the matrix. int8: codes int8 [N, K], scales float32 [N]. int4: the halves
    uint8 [N, K / 2] (``engine.model.low_bit``), scales and minima float16 [N, G]. Scaled: a
    factor for each column behind it, float32 [K].
    """
    name, _, scaled = held.partition("+")
    kind, _, group = name.partition(":")
    return kind, int(group or 0), bool(scaled)


def weight_inputs(held: str) -> int:
    """How many inputs a matrix takes that is held so."""
    kind, _, scaled = weight_kind(held)
    return {"plain": 1, "int8": 2, "int4": 3}[kind] + scaled


def layer(shape: RowShape, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A whole layer for ``rows`` rows of one request, all of which see all of the context.

    ``inputs``: x [R, E] float32; cos and (signed) sin [R, 1, D] in compute_dtype; context [L, 2 K, D], K and V of the tokens
    before the rows, in dtype; fresh [R, 2 K, D] in dtype, **overwritten** with the rows' own K and V. For more than one row: what
    is added to the scores, 0 or -inf, float32, [R, L] for the context and [R, R] for the rows. Then the weights: qkv, o,
    gate_up, down [out, in] in dtype, or what ``weight_kind`` says of those in few bits; attention norm, MLP norm, QK-norm
    [H + K, D] (empty: none), and four biases (empty: none), float32. The first output is x [R, E] float32 after the layer.
    """
    count = 5 if rows == 1 else 7
    x, cos, sin, context, fresh, *masks = inputs[:count]
    matrices, (attention_norm, mlp_norm, qk_norm, *biases) = inputs[count:-7], inputs[-7:]
    half, heads, kv_heads = shape.head_dim // 2, shape.num_heads, shape.num_kv_heads
    firsts = [sum(weight_inputs(held) for held in shape.weights[:which]) for which in range(4)]

    def product(which: int, of: torch.Tensor) -> torch.Tensor:
        out = multiply(shape.weights[which], matrices[firsts[which] :], of, rows)
        return out + biases[which] if shape.biases[which] else out

    def norm(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + shape.eps) * weight

    attention_in = norm(x, attention_norm)
    projected = product(0, attention_in).view(rows, heads + 2 * kv_heads, shape.head_dim)
    qk = projected[:, : heads + kv_heads]
    if shape.qk_norm:
        qk = norm(qk, qk_norm)
    qk = qk * cos.float() + torch.cat((qk[..., half:], qk[..., :half]), -1) * sin.float()
    q = (qk[:, :heads] * shape.head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, shape.head_dim)
    stored = torch.cat((qk[:, heads:], projected[:, heads + kv_heads :]), 1).to(fresh.dtype)
    fresh.copy_(stored)
    attended = attention(q, context.float(), stored.float(), masks).reshape(rows, heads * shape.head_dim)
    x = x + product(1, attended)
    mlp_in = norm(x, mlp_norm)
    gate, up = product(2, mlp_in).chunk(2, -1)
    mlp_out = F.silu(gate) * up
    # What is given out is computed once; what is not, the compiler computes again for every row of the matrix that reads it.
    return x + product(3, mlp_out), attention_in, q, attended, mlp_in, mlp_out


def multiply(held: str, parts: Sequence[torch.Tensor], of: torch.Tensor, rows: int) -> torch.Tensor:
    """``of`` [R, in] times the matrix whose inputs ``parts`` begins with -> [R, out]."""
    kind, group, scaled = weight_kind(held)
    if scaled:
        of = of * parts[weight_inputs(held) - 1]
    # A sum for each row rather than one over all: they become one loop, which reads and widens a weight once for all rows.
    if kind != "int4":
        wide = parts[0].float()
        out = torch.stack([(wide * of[i]).sum(-1) for i in range(rows)])
        return out if kind == "plain" else out * parts[1]
    halves, scales, minima = parts[0].unflatten(1, (-1, group // 2)), parts[1].float(), parts[2].float()
    low, high = (halves & 15).float(), (halves >> 4).float()
    out_of_rows = []
    for i in range(rows):
        row = of[i].view(-1, 2, group // 2)
        codes = ((low * row[:, 0] + high * row[:, 1]) * scales[:, :, None]).sum((-1, -2))
        out_of_rows.append(codes + (minima * row.sum((-1, -2))).sum(-1))
    return torch.stack(out_of_rows)


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
            fresh = self._fresh[rows] = torch.zeros((len(self.weights), rows, *kv.row_shape), dtype=kv.dtype)
        contexts = {window: _context(span, window, kv) for window in set(self.windows)}
        masks = {window: _masks(span, window, rows) if rows > 1 else [] for window in contexts}
        for i, (window, own, weights) in enumerate(zip(self.windows, fresh.unbind(), self.weights, strict=True)):
            x = function([x, cos, sin, contexts[window](i), own, *masks[window], *weights])[0]
        kv.store(kv.writes([span], release=False), fresh[:, :n])
        return x[:n]


def _context(span: Span, window: int | None, kv: KVCache) -> Callable[[int], torch.Tensor]:
    """K and V before ``span`` by layer, [L, 2 K, D], dequantised where the pool holds them in few bits."""
    before = kv.pool.slots(span, window)[: -span.num_tokens]
    run = contiguous(before)
    views = None if run is None else kv.pool.views(run)
    if views is not None:
        return views.flatten(2, 3).unbind().__getitem__
    index = kv.pool.index(before)

    def gathered(layer: int) -> torch.Tensor:
        rows: torch.Tensor = kv.layers[layer].index_select(0, index)
        return rows

    return gathered


def _masks(span: Span, window: int | None, rows: int) -> list[torch.Tensor]:
    """What ``layer`` adds to the scores of ``rows`` rows, the first of which are those of ``span``."""
    hidden, n = hidden_keys(span, window), span.num_tokens
    length = hidden.shape[1] - n
    context, fresh = np.zeros((rows, length), dtype=np.float32), np.full((rows, rows), -np.inf, dtype=np.float32)
    context[:n][hidden[:, :length]] = -np.inf
    fresh[:n, :n][~hidden[:, length:]] = 0
    return [torch.from_numpy(context), torch.from_numpy(fresh)]
