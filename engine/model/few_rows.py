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

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Span, contiguous, first_key, hidden_keys
from engine.hardware.device import TORCH_DTYPES
from engine.kvcache.layout import KVCache
from engine.model.words import LANES, as_words, half
from engine.quantization.int8 import LARGEST

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # ``layer`` of some shape and number of rows

MIN_CONTEXT = 2  # a length of 0 or 1 would be compiled as a constant
ROWS = (1, 5, 8, 2, 3)  # that there is a function for, the most wanted first; 5: the last token and K = 4 drafted ones
LOW_BIT_ROWS = (1,)  # the same, for weights in few bits
PLAIN = ("plain",) * 4  # how qkv, o, gate_up, down are held; see ``weight_kind``


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
    weights: tuple[str, ...] = PLAIN

    overwritten: ClassVar[int | None] = 4  # which of the inputs

    @property
    def is_plain(self) -> bool:
        return self.weights == PLAIN

    @property
    def row_counts(self) -> tuple[int, ...]:
        return ROWS if self.is_plain else LOW_BIT_ROWS

    def run(self, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return layer(self, rows, *inputs)

    def lengths(self, rows: int) -> dict[int, int]:
        """The inputs that have the context's length, and in which dimension."""
        return {3: 0} if rows == 1 else {3: 0, 5: 1}

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
        if weight_kind(held)[0] == "plain":
            return [torch.randn(rows, columns).mul_(0.02).to(TORCH_DTYPES[self.dtype])]
        return low_bit_examples(held, rows, columns)


@dataclass(frozen=True)
class ProductShape:
    """A single row times one large matrix in few bits, the head: what ``RowShape`` is for a layer. Inputs: x float32 [1, in], then
    what ``weight_kind`` says; the output is float32 [1, out]."""

    out_features: int
    in_features: int
    held: str
    threads: int

    dtype: ClassVar[str] = "float16"  # results differ by no more than this one's
    is_plain: ClassVar[bool] = False
    row_counts: ClassVar[tuple[int, ...]] = (1,)
    overwritten: ClassVar[int | None] = None

    def run(self, rows: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *parts = inputs
        factors = factor(self.held, parts, x)
        return multiply(self.held, parts, factors, rows), *factors

    def lengths(self, rows: int) -> dict[int, int]:
        return {}

    def examples(self, rows: int, length: int) -> list[torch.Tensor]:
        return [torch.randn(rows, self.in_features), *low_bit_examples(self.held, self.out_features, self.in_features)]


def low_bit_examples(held: str, rows: int, columns: int) -> list[torch.Tensor]:
    kind, group, scaled = weight_kind(held)
    if kind == "int8":
        parts = [as_words(torch.randint(-127, 128, (rows, columns), dtype=torch.int8)), torch.rand(rows).mul_(4e-4)]
    else:
        scales = torch.rand(rows // LANES, columns // group, LANES, 1).mul_(5e-3).half()
        codes = torch.randint(0, 256, (*scales.shape[:2], group // 8, 4 * LANES), dtype=torch.uint8)
        parts = [as_words(codes), as_words(torch.cat((scales, scales * -8), -1)).squeeze(-1)]
    return [*parts, torch.rand(columns) + 0.5] if scaled else parts


def weight_kind(held: str) -> tuple[str, int, bool]:
    """("plain" | "int8" | "int4", group size or 0, whether the input is scaled first) of "int4:32+scaled" and the like.

    What the layer then takes of a matrix [N, K]: plain: the matrix. int8: words of its codes, scales float32 [N]. int4: words of its
    codes, words of its grids. Scaled: a factor for each column behind it, float32 [K]. For words see ``engine.model.words``. "plain+rounded":
    the input is rounded to 8 bits, a scale for each row.
    """
    name, *more = held.split("+")
    kind, _, group = name.partition(":")
    return kind, int(group or 0), "scaled" in more


def weight_inputs(held: str) -> int:
    """How many inputs a matrix takes that is held so."""
    kind, _, scaled = weight_kind(held)
    return {"plain": 1, "int8": 2, "int4": 2}[kind] + scaled


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
    middle, heads, kv_heads = shape.head_dim // 2, shape.num_heads, shape.num_kv_heads
    firsts = [sum(weight_inputs(held) for held in shape.weights[:which]) for which in range(4)]

    # What is given out is computed once; what is not, the compiler computes again for every row of the matrix that reads it.
    factors: list[list[torch.Tensor]] = []

    def product(which: int, of: torch.Tensor) -> torch.Tensor:
        held, parts = shape.weights[which], matrices[firsts[which] :]
        factors.append(factor(held, parts, of))
        out = multiply(held, parts, factors[-1], rows)
        return out + biases[which] if shape.biases[which] else out

    def norm(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + shape.eps) * weight

    projected = product(0, norm(x, attention_norm)).view(rows, heads + 2 * kv_heads, shape.head_dim)
    qk = projected[:, : heads + kv_heads]
    if shape.qk_norm:
        qk = norm(qk, qk_norm)
    qk = qk * cos.float() + torch.cat((qk[..., middle:], qk[..., :middle]), -1) * sin.float()
    q = (qk[:, :heads] * shape.head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, shape.head_dim)
    stored = torch.cat((qk[:, heads:], projected[:, heads + kv_heads :]), 1).to(fresh.dtype)
    fresh.copy_(stored)
    attended = attention(q, context.float(), stored.float(), masks).reshape(rows, heads * shape.head_dim)
    x = x + product(1, attended)
    gate, up = product(2, norm(x, mlp_norm)).chunk(2, -1)
    x = x + product(3, F.silu(gate) * up)
    return x, q, *itertools.chain.from_iterable(factors)


def factor(held: str, parts: Sequence[torch.Tensor], of: torch.Tensor) -> list[torch.Tensor]:
    """``of`` [R, in] as ``multiply`` takes it for this matrix: by the place of a column's code in its word. int8: [R, 4, in / 4];
    int4: [R, 8, in / 8], and the sum over a word's columns [R, in / 8]."""
    kind, group, scaled = weight_kind(held)
    if scaled:
        of = of * parts[weight_inputs(held) - 1]
    if held == "plain+rounded":
        steps = of.abs().amax(-1, keepdim=True) / LARGEST
        of = (of / steps.clamp_min(torch.finfo(torch.float32).tiny)).round() * steps
    if kind == "plain":
        return [of]
    if kind == "int8":
        return [of.unflatten(1, (-1, 4)).transpose(1, 2).contiguous()]
    # [R, G, half, word, byte]: a group's first half is in the low bits of its bytes
    places = of.unflatten(1, (-1, 2, group // 8, 4)).permute(0, 4, 2, 1, 3).reshape(len(of), 8, -1)
    # A code is not shifted down but left at its place, where it counts 16 times more than in the place before (the last one
    # would lie over the sign, and is shifted there). A power of two by its bits is exact.
    powers = (127 - 4 * torch.arange(8, dtype=torch.int32).clamp_max(6) << 23).view(torch.float32)
    return [places * powers[:, None], places.sum(1)]


def multiply(held: str, parts: Sequence[torch.Tensor], of: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """What ``factor`` gave times the matrix whose inputs ``parts`` begins with -> [R, out]."""
    kind, _, _ = weight_kind(held)
    # A sum for each row rather than one over all: they become one loop, which reads and widens a weight once for all rows.
    if kind == "plain":
        wide = parts[0].float()
        return torch.stack([(wide * of[0][i]).sum(-1) for i in range(rows)])
    words = parts[0].view(torch.int32)
    if kind == "int8":
        codes = [(words << 24 - 8 * place >> 24).float() for place in range(4)]  # shifting back spreads the sign
        return torch.stack([_times(codes, of[0][i]).sum(-1) for i in range(rows)]) * parts[1]
    grid = parts[1].view(torch.int32)[:, :, None]
    scales, minima = half(grid), half(grid >> 16)
    codes = [*((words & 15 << 4 * place).float() for place in range(7)), (words >> 4 & 15 << 24).float()]
    out = []
    for i in range(rows):
        columns, sums = (t[i].unflatten(-1, words.shape[1:3])[..., None] for t in of)
        out.append((_times(codes, columns[:, None]) * scales + minima * sums).sum((1, 2)).flatten())
    return torch.stack(out)


def _times(codes: Sequence[torch.Tensor], factors: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, (c * x for c, x in zip(codes, factors, strict=True)))


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
