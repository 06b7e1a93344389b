"""Attention by kernels of our own (``engine.kernels``): flash_attention for prompts and long chunks, paged_decode for decodes and
drafts, kv_write to rotate and store. On CUDA; on a CPU in a process whose kernels are interpreted ones (for tests: slow).

Every row reads K and V through its block table, from the pool in which the step has just stored its own. int8 and fp8 pools are
dequantised inside paged_decode; for flash_attention their keys are gathered and dequantised first. A pool in 4 bits, and a tree of
more than 64 nodes, are the torch backend's.

Shapes: T rows in the batch, B requests, H query heads, K KV heads, G = H / K, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention import launches
from engine.attention.base import Attention, Pool, Span, TensorPool
from engine.attention.launches import Launch
from engine.attention.torch import TorchAttention
from engine.kernels.flash_attention.schedule import HEAD_DIMS
from engine.kernels.lazy import load
from engine.kernels.paged_decode.splits import choose_splits
from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Decode:
    """A launch of paged_decode, planned. All tensors on the device."""

    rows: slice
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_tables: torch.Tensor  # int32 [B, most blocks]
    tree: torch.Tensor | None
    positions: torch.Tensor | None
    run_length: int  # tokens of a block
    max_seqlen_q: int
    max_seq_len: int
    splits: dict[int | None, int]  # by window

    def run(self, q: torch.Tensor, pool: Any, window: int | None) -> torch.Tensor:
        kernel = load("engine.kernels.paged_decode.triton").paged_decode
        numbers, scales = held(pool)
        return kernel(
            q[self.rows], numbers, self.block_tables, self.cu_seqlens_q, self.seq_lens,
            block_size=self.run_length, max_seqlen_q=self.max_seqlen_q, max_seq_len=self.max_seq_len,
            num_splits=self.splits[window], kv_scales=scales, window=window, tree=self.tree,
            positions=self.positions if window is not None else None,
        )[0]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunks:
    """A launch of flash_attention, planned."""

    rows: slice
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_tables: torch.Tensor  # int32 [B, most blocks]
    run_length: int
    max_seqlen_q: int
    index: Any  # where the pool's numbers are codes: all keys, one request after another; else None
    cu_seqlens_k: torch.Tensor | None  # int32 [B + 1], likewise

    def run(self, q: torch.Tensor, pool: Any, window: int | None) -> torch.Tensor:
        kernels = load("engine.kernels.flash_attention.triton")
        options: dict[str, Any] = {"max_seqlen_q": self.max_seqlen_q, "window": window}
        if self.cu_seqlens_k is not None:
            kv = pool.index_select(0, self.index).to(q.dtype)
            k, v = (part.contiguous() for part in kv.chunk(2, 1))
            return kernels.flash_attention_varlen(q[self.rows], k, v, self.cu_seqlens_q, self.cu_seqlens_k, **options)[0]
        where = (self.block_tables, self.cu_seqlens_q, self.seq_lens)
        return kernels.flash_attention(q[self.rows], pool, *where, block_size=self.run_length, **options)[0]


@dataclass(frozen=True, slots=True)
class _Delegated:
    """What the torch backend does in the kernels' place: a span that does not fit them, or all of a step."""

    rows: slice
    plan: Any

    def run(self, torch_backend: TorchAttention, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        return torch_backend.run(self.plan, layer, qkv[self.rows], stored[self.rows], pool)


class TritonAttention(Attention):
    name = "triton"
    takes_compiled = False

    def __init__(self, config: ModelConfig, num_sms: int | None = None) -> None:
        """``num_sms``: multiprocessors that a decode is split for; None: those of the device, 1 on a CPU.

        ValueError for a head size that the kernels do not have; RuntimeError where Triton is not installed.
        """
        super().__init__(config)
        why = unfit(config)
        if why:
            raise ValueError(f"attention_backend='triton': {why}")
        load("triton")
        self.group = config.num_attention_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.num_sms = num_sms
        self._torch = TorchAttention(config)

    def plan(self, spans: Sequence[Span], kv: Pool | torch.Tensor, dtype: torch.dtype) -> Any:
        """The launches of the step."""
        pool = kv if isinstance(kv, Pool) else TensorPool(kv)
        if pool.block_size is None:
            end = max(s.row + s.num_tokens for s in spans)
            return [_Delegated(slice(0, end), self._torch.plan(spans, pool, dtype))]
        most = launches.decode_rows(self.head_dim, dtype)
        return [self._planned(launch, pool, dtype) for launch in launches.split(spans, self.group, most)]

    def _planned(self, launch: Launch, pool: Pool, dtype: torch.dtype) -> Any:
        rows = launch.rows
        if not launch.kernel:
            (span,) = launch.spans
            moved = Span(0, span.start, span.num_tokens, span.slots, span.ancestors, span.positions, span.draft)
            return _Delegated(rows, self._torch.plan([moved], pool, dtype))
        assert pool.block_size is not None
        run = launches.run_of(pool.block_size)
        made = launches.tables(launch, run)
        cu, lens, blocks, tree, positions = (
            None if a is None else torch.from_numpy(a).to(pool.device)
            for a in (made.cu_seqlens_q, made.seq_lens, made.block_tables, made.tree, made.positions)
        )
        assert cu is not None and lens is not None and blocks is not None
        if launch.kernel == "paged_decode":
            count, longest, new = len(launch.spans), launch.max_seq_len, launch.max_seqlen_q
            splits = {window: self.splits(count, longest, new, pool.device, window) for window in self.windows}
            return Decode(rows, cu, lens, blocks, tree, positions, run, launch.max_seqlen_q, launch.max_seq_len, splits)
        index = cu_k = None
        if not isinstance(pool, TensorPool):
            index = pool.index(np.concatenate([s.slots[: s.end] for s in launch.spans]))
            cu_k = torch.from_numpy(np.cumsum([0, *made.seq_lens]).astype(np.int32)).to(pool.device)
        return Chunks(rows, cu, lens, blocks, run, launch.max_seqlen_q, index, cu_k)

    def splits(self, requests: int, longest: int, new: int, device: torch.device, window: int | None) -> int:
        """Parts that a decode of so many requests cuts its context into; ``longest``: most keys, ``new``: most rows of a request."""
        context = longest if window is None else min(longest, window + new)
        return choose_splits(requests, self.config.num_kv_heads, context, self.multiprocessors(device))

    def multiprocessors(self, device: torch.device) -> int:
        if self.num_sms is None:
            cuda = device.type == "cuda"
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        return self.num_sms

    def run(self, plan: Any, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        config, window = self.config, self.config.sliding_windows[layer]
        # Queries in the dtype of the pool's numbers, which the kernels want: only a CPU's arithmetic is wider.
        q = (stored if stored.dtype == pool.dtype else qkv)[:, : config.num_attention_heads]
        outs = []
        for item in plan:
            if isinstance(item, _Delegated):
                outs.append(item.run(self._torch, layer, qkv, stored, pool))
            else:
                outs.append(item.run(q, pool, window).flatten(1))
        out = outs[0] if len(outs) == 1 else torch.cat([o.to(qkv.dtype) for o in outs])
        return out if out.dtype == qkv.dtype else out.to(qkv.dtype)

    def stores(self, qkv: torch.Tensor, pool: Any) -> bool:
        numbers, scales = held(pool)
        return isinstance(numbers, torch.Tensor) and (scales is not None or numbers.dtype == qkv.dtype)

    def store(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, writes: Any, pool: Any) -> None:
        numbers, scales = held(pool)
        half = qkv.shape[2] // 2
        # The rotary tables hold each angle twice, the sine's first half negated (engine.model.llama.Rope).
        load("engine.kernels.kv_write.triton").kv_write(qkv, cos[:, 0, :half], sin[:, 0, half:], writes, numbers, scales)


def held(pool: Any) -> tuple[Any, torch.Tensor | None]:
    """A layer's numbers or codes [slots, 2 K, D], and the scales [slots, 2 K] of codes."""
    codes, scales = getattr(pool, "codes", None), getattr(pool, "scales", None)
    if codes is None:
        return pool, None
    return (codes, scales.flatten(1)) if scales is not None else (None, None)


def unfit(config: ModelConfig) -> str:
    """Why the kernels do not run this model; empty when they do."""
    if config.head_dim not in HEAD_DIMS:
        return f"the kernels have head sizes {HEAD_DIMS}, this model has {config.head_dim}"
    return ""
