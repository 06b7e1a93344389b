"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) on one packed batch of tokens.

Shapes: T tokens in the batch, H query heads, K KV heads, D head_dim, S sampled rows.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Span
from engine.kernels.lazy import run_on
from engine.kvcache.layout import KVCache
from engine.model import fused
from engine.model.compiled import CompiledLayer, Shape
from engine.model.config import ModelConfig, rope_frequencies
from engine.model.few_rows import PLAIN, FewRows, ProductShape, RowShape
from engine.model.linear import Linear, LinearBackend, create_linear_backend
from engine.model.low_bit import held_as, words_of
from engine.model.unpacking import Unpacking


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, of any mix of requests, one after another. All index tensors are int64 on the model's device."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T], where each token's K and V go
    sample_rows: torch.Tensor | None  # [S], rows whose logits are wanted; None: all
    end: int  # one more than the largest position
    attention: Attention
    plan: Any  # attention.plan of this step; None with a span
    span: Span | None = None  # the only request's, where ``Model.takes`` it


class Norm:
    """RMSNorm over the last dimension, computed in float32: x / sqrt(mean(x^2) + eps) * weight."""

    __slots__ = ("eps", "floor", "fused", "scaled", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """``weight`` [..., size]: a row for each head where heads differ."""
        size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self.fused = weight.device.type != "cpu" and weight.dim() == 1
        # The same in fewer operations: x / hypot(|x|, sqrt(size eps)) * (weight sqrt(size)).
        self.scaled = weight.float() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(eps * size), dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        y = (x / norm.hypot_(self.floor)).mul_(self.scaled)
        return y if y.dtype == x.dtype else y.to(x.dtype)


class Rope:
    """Rotary position embedding, halves paired as in Hugging Face checkpoints: (i, i + D / 2)."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.frequencies = rope_frequencies(config).to(device)
        self.dtype = dtype
        self.cos = self.sin = torch.empty(0, device=device)

    def at(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of each row, [T, 1, D]; the tables grow to ``end`` positions when they have to."""
        if end > self.cos.shape[0]:
            self._grow(max(256, 1 << (end - 1).bit_length()))
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def _grow(self, size: int) -> None:
        angles = torch.outer(torch.arange(size, device=self.frequencies.device).float(), self.frequencies)
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), -1).to(self.dtype)[:, None, :]
        self.sin = torch.cat((-sin, sin), -1).to(self.dtype)[:, None, :]


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``x`` [T, heads, D] in place by what ``Rope.at`` gave."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


class Layer:
    """One decoder layer."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], index: int, backend: LinearBackend, plain: bool = False
    ) -> None:
        """``plain``: keep the matrices as they are, too (``plain_weights``)."""
        self.index = index
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.kernels = run_on(backend.device)
        prefix = f"model.layers.{index}."

        self.plain_weights: dict[str, torch.Tensor] = {}  # by the first name; biases float32, empty where there is none

        def packed(*names: str) -> Linear:
            weight = _stacked([tensors[f"{prefix}{name}.weight"] for name in names])
            biases = [tensors[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in tensors]
            bias = _stacked(biases) if biases else None
            if plain:
                name = names[0].rpartition(".")[2]
                self.plain_weights[name] = weight.to(backend.dtype).contiguous()
                self.plain_weights[name + ".bias"] = torch.zeros(0) if bias is None else backend.tensor(bias).float()
            return backend.pack(weight, bias)

        def norm(weight: torch.Tensor) -> Norm:
            return Norm(backend.tensor(weight), config.rms_norm_eps)

        self.qkv = packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.o = packed("self_attn.o_proj")
        self.gate_up = packed("mlp.gate_proj", "mlp.up_proj")
        self.down = packed("mlp.down_proj")
        self.attention_norm = norm(tensors[f"{prefix}input_layernorm.weight"])
        self.mlp_norm = norm(tensors[f"{prefix}post_attention_layernorm.weight"])
        self.qk_norm = None
        if config.qk_norm:
            q_norm, k_norm = (tensors[f"{prefix}self_attn.{which}_norm.weight"] for which in "qk")
            self.qk_norm = norm(torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1))))

    def forward(
        self, x: torch.Tensor, batch: Batch, cos: torch.Tensor, sin: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """``x`` [T, hidden_size] -> the same, the layer's contribution added; K and V of the tokens go into ``pool``.

        ``rows``: the only rows that are wanted (after the last layer nobody needs the others); None: all.
        """
        qkv = self.unrotated(x)
        if batch.attention.stores(qkv, pool):
            batch.attention.store(qkv, cos, sin, batch.slots, pool)
            attended = batch.attention.run(batch.plan, self.index, qkv, qkv, pool)
        else:
            self.rotate_(qkv, cos, sin)
            attended = self.attend(qkv, qkv if qkv.dtype == pool.dtype else qkv.to(pool.dtype), batch, pool)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        return self.feed_forward(x, attended)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [T, H + 2 K, D], rotated."""
        qkv = self.unrotated(x)
        self.rotate_(qkv, cos, sin)
        return qkv

    def unrotated(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [T, H + 2 K, D] as they are before the rotary embedding."""
        qkv = self.qkv(self.attention_norm(x)).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.qk_norm is not None:
            qk = qkv.narrow(1, 0, self.heads + self.kv_heads)
            qk.copy_(self.qk_norm(qk))
        return qkv

    def rotate_(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rotate_(qkv.narrow(1, 0, self.heads + self.kv_heads), cos, sin)

    def attend(self, qkv: torch.Tensor, stored: torch.Tensor, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """What attention gives, [T, H * D]; ``stored`` is ``qkv`` in the pool's dtype, and its K and V go there."""
        pool.index_copy_(0, batch.slots, stored.narrow(1, self.heads, 2 * self.kv_heads))
        return batch.attention.run(batch.plan, self.index, qkv, stored, pool)

    def feed_forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, after attention."""
        if self.kernels:
            normed = fused.add_and_norm_(x, self.o(attended), self.mlp_norm.weight, self.mlp_norm.eps)
            return self.down.added_to(x, fused.gated(self.gate_up(normed)))
        x = self.o.added_to(x, attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return self.down.added_to(x, F.silu(gate, inplace=True).mul_(up))

    def with_linears(self, linears: Mapping[str, Linear], plain_weights: dict[str, torch.Tensor]) -> "Layer":
        """This layer with other linear layers: "qkv", "o", "gate_up", "down". ``plain_weights``: of those that stay plain, and the
        biases, as the compiled layer reads them; none: it is not to be compiled."""
        other = copy.copy(self)
        for name, linear in linears.items():
            setattr(other, name, linear)
        other.plain_weights = plain_weights
        return other

    def held(self) -> tuple[str, ...]:
        """How the four matrices are held, as ``few_rows.weight_kind`` has it; "" for one that the compiled layer does not read."""
        plain = self.plain_weights
        return tuple(held_as(getattr(self, name)) or ("plain" if first in plain else "") for name, first in _MATRICES.items())

    def compiled_inputs(self, held: Sequence[str] = PLAIN) -> list[torch.Tensor]:
        """The layer's weights as ``few_rows.layer`` takes them where its matrices are held so (``common``)."""
        plain = self.plain_weights
        norms = [self.attention_norm.weight.float(), self.mlp_norm.weight.float()]
        qk_norm = torch.zeros(0) if self.qk_norm is None else self.qk_norm.weight.float()
        matrices = []
        for (name, first), how in zip(_MATRICES.items(), held, strict=True):
            linear = getattr(self, name)
            matrices += words_of(linear, scaled=how.endswith("+scaled")) or [plain[first]]
        return [*matrices, *norms, qk_norm, *(plain[f"{first}.bias"] for first in _MATRICES.values())]


def common(layers: Sequence[Layer]) -> tuple[str, ...]:
    """How the matrices of all of them are held; () where they differ, or one is not read by the compiled layer. Some matrices may be
    scaled in some layers (AWQ scales only where that helps): then they count as scaled in all, by 1."""
    found = []
    for which in zip(*(layer.held() for layer in layers), strict=True):
        if len({how.removesuffix("+scaled") for how in which}) > 1 or "" in which:
            return ()
        found.append(max(which, key=len))
    return tuple(found)


# The linear layers of a decoder layer, and the first of the checkpoint's matrices that are stacked in each.
_MATRICES = {"qkv": "q_proj", "o": "o_proj", "gate_up": "gate_proj", "down": "down_proj"}


class Model:
    """A checkpoint's weights on a device, and its forward pass: whole, with what the head reads, or only its first layers."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device | str,
        dtype: torch.dtype,
        compiled: Callable[[Shape], CompiledLayer] | None = None,
    ) -> None:
        """``tensors``: by Hugging Face name; each is read once. ``dtype``: of the weights and the KV cache.

        ``compiled`` makes the compiled layer for few rows of one request (see ``engine.model.compiled``); None: not used.
        """
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        backend = create_linear_backend(self.device, dtype)
        self.linear_backend = backend.name
        self.compute_dtype = backend.compute_dtype  # of activations; wider than ``dtype`` where the device has no such arithmetic
        self.rope = Rope(config, self.device, self.compute_dtype)
        self.norm = Norm(backend.tensor(tensors["model.norm.weight"]), config.rms_norm_eps)
        # Reading, dequantising and packing weights is work for one core a tensor: several at a time.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            ends = pool.submit(self._load_ends, tensors, backend)
            plain = compiled is not None
            self.layers = list(pool.map(lambda i: Layer(config, tensors, i, backend, plain), range(config.num_layers)))
            self.embedding, self.head = ends.result()
        self.backend = backend
        self.unpacking: Unpacking | None = None  # of layers in few bits
        self.compiled: CompiledLayer | None = None  # for layers in the model's dtype: its own and a drafter's
        self._own_compiled: CompiledLayer | None = None  # for its own layers where they are in few bits
        self._compiled_head: CompiledLayer | None = None  # where it is in few bits
        self._few_rows: FewRows | None = None
        self._first_rows: dict[int, FewRows] = {}  # by how many layers
        self._make_compiled = compiled
        if compiled is not None:
            self.compiled = compiled(self._row_shape(PLAIN))
            self._few_rows = self._make_few_rows(PLAIN)

    def set_layers(self, layers: list[Layer], unpacking: Unpacking | None, head: Linear | None = None) -> None:
        """Other layers, in place of the model's own, from the next forward pass on. ``unpacking``: theirs where they are in few bits;
        ``head``: another head, None: it stays."""
        if head is not None:
            self.head, self._compiled_head = head, None
            held = held_as(head)
            if self._make_compiled is not None and words_of(head):
                self._compiled_head = self._make_compiled(
                    ProductShape(self.config.vocab_size, self.config.hidden_size, held, torch.get_num_threads())
                )
        self.layers, self.unpacking, self._first_rows = layers, unpacking, {}
        self._few_rows = self._own_compiled = None
        ways = common(layers)
        if self._make_compiled is not None and ways:
            shape = self._row_shape(ways)
            self._own_compiled = None if shape.is_plain else self._make_compiled(shape)
            self._few_rows = self._make_few_rows(ways)

    def apart(self) -> "Model":
        """The same weights for another thread: nothing that a forward pass writes is shared, and nothing is compiled."""
        other = copy.copy(self)
        other.rope = Rope(self.config, self.device, self.compute_dtype)
        other.unpacking = other.compiled = other._own_compiled = other._few_rows = other._compiled_head = None
        return other

    def wait_compiled(self, timeout: float) -> bool:
        """Wait for the compilers of what the model's own steps go through, ``timeout`` seconds each; whether all is there."""
        return all(c.wait(timeout) for c in (self.own_compiled, self._compiled_head) if c is not None)

    @property
    def own_compiled(self) -> CompiledLayer | None:
        """The compiled layer that the model's own layers go through."""
        return None if self._few_rows is None else self._own_compiled or self.compiled

    def _make_few_rows(self, held: Sequence[str]) -> FewRows:
        return FewRows(self.config.sliding_windows, [layer.compiled_inputs(held) for layer in self.layers])

    def _load_ends(self, tensors: Mapping[str, torch.Tensor], backend: LinearBackend) -> tuple[torch.Tensor, Linear]:
        """The embedding [vocab_size, hidden_size] and the head."""
        embedding = tensors["model.embed_tokens.weight"].to(self.dtype)
        head = embedding if self.config.tie_word_embeddings else tensors["lm_head.weight"]
        return embedding.to(self.device), backend.pack(head, None)

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Logits [S, vocab_size] in ``compute_dtype``. The tokens' K and V are written into ``kv`` at ``batch.slots``."""
        return self.logits(self._features(batch, kv, batch.sample_rows))

    def takes(self, spans: Sequence[Span], few_rows: FewRows | None = None) -> bool:
        """Whether the compiled layer runs a batch of these spans: its ``span`` is to be set then, and needs no plan.

        ``few_rows``: layers of the same shape that are not this model's own.
        """
        compiled, rows = (self.own_compiled, self._few_rows) if few_rows is None else (self.compiled, few_rows)
        if compiled is None or rows is None or len(spans) != 1 or not rows.takes(spans[0]):
            return False
        return compiled.function(spans[0].num_tokens) is not None

    def features(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """What the head reads (after the final norm) at the sampled rows, [S, hidden_size]."""
        return self._features(batch, kv, batch.sample_rows)

    def forward_with_features(self, batch: Batch, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward``, and what the head reads (after the final norm) at every row: logits [S, vocab_size], features [T, hidden_size]."""
        features = self._features(batch, kv, None)
        wanted = features if batch.sample_rows is None else features.index_select(0, batch.sample_rows)
        return self.logits(wanted), features

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The head of ``features`` [S, hidden_size]: [S, vocab_size] in ``compute_dtype``."""
        compiled = None if self._compiled_head is None else self._compiled_head.function(len(features))
        if compiled is None:
            return self.head(features)
        return compiled[1]([features.float(), *words_of(self.head)])[0].to(self.compute_dtype)

    def first_layers(self, batch: Batch, kv: KVCache, count: int) -> torch.Tensor:
        """What comes out of layer ``count - 1``, before any norm: [T, hidden_size]. Only the layers before ``count`` run, and
        only their K and V are written. ValueError unless ``count`` lies in [1, num_layers]."""
        if not 1 <= count <= len(self.layers):
            raise ValueError(f"the layers to run must lie in [1, {len(self.layers)}], got {count}")
        x, cos, sin = self._enter(batch)
        if batch.span is not None:
            few_rows = self._first_rows.get(count)
            if few_rows is None and self._few_rows is not None:
                few_rows = FewRows(self.config.sliding_windows[:count], self._few_rows.weights[:count])
                self._first_rows[count] = few_rows
            return self._run_compiled(self.own_compiled, few_rows, batch.span, x, cos, sin, kv)
        for layer, pool in zip(self.layers[:count], kv.layers):
            x = layer.forward(x, batch, cos, sin, pool, None)
        return x

    def _enter(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Embeddings [T, hidden_size], cos and sin."""
        if self.unpacking is not None:
            self.unpacking.step(len(batch.token_ids))
        x = self.embedding.index_select(0, batch.token_ids).to(self.compute_dtype)
        return x, *self.rope.at(batch.positions, batch.end)

    def _features(self, batch: Batch, kv: KVCache, rows: torch.Tensor | None) -> torch.Tensor:
        """What the head reads at ``rows`` (None: at all)."""
        x, cos, sin = self._enter(batch)
        if batch.span is not None:
            x = self._run_compiled(self.own_compiled, self._few_rows, batch.span, x, cos, sin, kv)
            return self.norm(x if rows is None else x.index_select(0, rows))
        last = len(self.layers) - 1
        for i, (layer, pool) in enumerate(zip(self.layers, kv.layers)):
            x = layer.forward(x, batch, cos, sin, pool, rows if i == last else None)
        return self.norm(x)

    def run_compiled(
        self, few_rows: FewRows, span: Span, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVCache
    ) -> torch.Tensor:
        """``x`` [T, hidden_size], the rows of a span that was taken, after these layers of another's, which are shaped like this model's."""
        return self._run_compiled(self.compiled, few_rows, span, x, cos, sin, kv)

    def _run_compiled(
        self, compiled: CompiledLayer | None, few_rows: FewRows | None, span: Span,
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVCache,
    ) -> torch.Tensor:  # fmt: skip
        found = None if compiled is None else compiled.function(span.num_tokens)
        if found is None or few_rows is None:
            raise RuntimeError(f"no layer was compiled for the {span.num_tokens} rows of a batch that was made for it")
        rows, function = found
        return few_rows.run(function, rows, x, cos, sin, span, kv).to(self.compute_dtype)

    def _row_shape(self, held: tuple[str, ...]) -> RowShape:
        weights, config = self.layers[0].plain_weights, self.config
        return RowShape(
            hidden_size=config.hidden_size, num_heads=config.num_attention_heads, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, intermediate_size=config.intermediate_size, eps=config.rms_norm_eps, qk_norm=config.qk_norm,
            biases=tuple(weights[f"{name}.bias"].numel() > 0 for name in ("q_proj", "o_proj", "gate_proj", "down_proj")),
            dtype=str(self.dtype).removeprefix("torch."), compute_dtype=str(self.compute_dtype).removeprefix("torch."),
            threads=torch.get_num_threads(), weights=held,
        )  # fmt: skip


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
