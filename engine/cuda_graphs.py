"""Decode steps as CUDA graphs: a step of one token for each of a few requests is hundreds of small kernels, and launching them one
by one takes longer than running them. A graph is launched as one.

A graph is recorded for a number of requests (``bucket``) and a length of context, on buffers of its own, and replayed for any step
that fits: what the step reads is copied into the buffers, and rows that no request has are filled up with requests of no keys, which
write nothing (slot -1) and attend to nothing. The number of parts that attention splits the context into is fixed in a graph, the
context itself is not: it is read from the buffers.

A graph holds the addresses of weights, rotary tables and pool: with other weights all are recorded anew, and a new pool has a new
runner. What cannot be recorded (weights that are unpacked on the way, say) runs as before, and says so once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from engine.attention.triton import Decode, TritonAttention
from engine.kvcache.layout import KVCache
from engine.model.llama import Batch, Model

_log = logging.getLogger(__name__)

MOST_ROWS = 256  # requests of a step: beyond, the kernels are long enough
MOST_GRAPHS = 96
_WARM_UP = 2  # runs before a recording: kernels are compiled, libraries set up
_CONTEXT = 512  # the shortest context that is recorded for, and each next is four times as long

Outputs = tuple[torch.Tensor, torch.Tensor]  # logits and features of all rows


class Recorded(Protocol):
    """A function that was recorded: ``replay`` does it again on the same memory and leaves its results in ``outputs``."""

    outputs: Outputs

    def replay(self) -> None: ...


class CudaRecorded:
    """``Recorded`` by a CUDA graph."""

    def __init__(self, function: Callable[[], Outputs], device: torch.device, memory: Any, stream: Any) -> None:
        """Runs ``function`` a few times on ``stream``, then records it there. ``memory``: a pool that graphs share, all of this stream."""
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                function()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # Of this thread alone: a study beside the engine may allocate meanwhile.
        with torch.cuda.graph(self.graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            self.outputs = function()

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class _Buffers:
    """What a graph reads, for ``rows`` requests. A graph knows addresses: what is not held here is given to others under it."""

    cu_seqlens_q: torch.Tensor  # int32 [rows + 1]: a token each, in every step
    token_ids: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]; -1: nothing is written
    seq_lens: torch.Tensor  # int32 [rows]; 0: no request
    block_tables: torch.Tensor  # int32 [rows, most blocks]

    def take(self, batch: Batch, decode: Decode) -> None:
        """Copy a step in. What is left of an earlier one in rows that this has not is made harmless."""
        rows = len(batch.token_ids)
        self.token_ids[:rows].copy_(batch.token_ids)
        self.positions[:rows].copy_(batch.positions)
        self.slots[:rows].copy_(batch.slots)
        self.seq_lens[:rows].copy_(decode.seq_lens)
        self.block_tables[:rows, : decode.block_tables.shape[1]].copy_(decode.block_tables)
        self.slots[rows:].fill_(-1)
        self.seq_lens[rows:].zero_()


class DecodeGraphs:
    """The graphs of one runner. ``run`` any batch that it ``takes``, under ``torch.inference_mode``."""

    def __init__(
        self, model: Model, kv: KVCache, attention: TritonAttention, max_num_seqs: int, max_model_len: int,
        record: Callable[[Callable[[], Outputs]], Recorded] | None = None,
    ) -> None:  # fmt: skip
        """``record``: in place of a CUDA graph (tests)."""
        self.model, self.kv, self.attention = model, kv, attention
        self.most_rows, self.max_model_len = min(max_num_seqs, MOST_ROWS), max_model_len
        self.failed = ""  # why nothing is recorded any more
        self._record = record if record is not None else self._on_cuda
        self._graphs: dict[tuple[int, int], tuple[_Buffers, Recorded]] = {}
        self._memory: Any = None  # of the graphs and of their stream
        self._weights: tuple[Any, Any] = (model.layers, model.head)

    def __len__(self) -> int:
        return len(self._graphs)

    def takes(self, batch: Batch) -> bool:
        """Whether a graph runs this batch: one new token for each of a few requests, all by our kernel."""
        if self.failed or batch.attention is not self.attention or batch.sample_rows is not None or batch.plan is None:
            return False
        decode = batch.plan[0]
        if len(batch.plan) != 1 or not isinstance(decode, Decode) or decode.max_seqlen_q != 1 or decode.tree is not None:
            return False
        return len(batch.token_ids) <= MOST_ROWS and batch.end <= self.max_model_len

    def run(self, batch: Batch) -> Outputs | None:
        """Logits [T, vocab_size] and what the head reads [T, hidden_size]; None where it could not be recorded."""
        weights = (self.model.layers, self.model.head)
        if any(a is not b for a, b in zip(weights, self._weights, strict=True)):
            self._forget()
            self._weights = weights
        decode: Decode = batch.plan[0]
        rows = len(batch.token_ids)
        most = self.most_rows if rows <= self.most_rows else MOST_ROWS  # more may run by now than when the runner was made
        key = bucket(rows, most), context_bucket(batch.end, self.max_model_len)
        found = self._graphs.get(key)
        if found is None:
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            try:
                found = self._made(*key, batch, decode)
            except (
                RuntimeError,
                ValueError,
                AssertionError,
            ) as error:  # torch's and the kernels': as it is, it cannot be recorded
                self.failed = f"{type(error).__name__}: {error}"
                self._forget()
                _log.warning("decode steps run without CUDA graphs: %s", self.failed)
                return None
            self._graphs[key] = found
        buffers, recorded = found
        buffers.take(batch, decode)
        recorded.replay()
        logits, features = recorded.outputs
        return logits[:rows].clone(), features[:rows].clone()  # the next replay writes over them

    def _made(self, rows: int, context: int, batch: Batch, decode: Decode) -> tuple[_Buffers, Recorded]:
        device = self.model.device
        width = -(-self.max_model_len // decode.run_length)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)
        buffers = _Buffers(
            cu_seqlens_q, zeros(rows), zeros(rows), zeros(rows) - 1, zeros(rows, dtype=torch.int32), zeros(rows, width, dtype=torch.int32)
        )  # fmt: skip
        planned = replace(
            decode, rows=slice(0, rows), cu_seqlens_q=cu_seqlens_q,
            seq_lens=buffers.seq_lens, block_tables=buffers.block_tables, max_seq_len=context,
            splits={window: self.attention.splits(rows, context, 1, device, window) for window in decode.splits},
        )  # fmt: skip
        # The rotary tables are as long now as they will ever be, so that they are not replaced under a graph.
        static = replace(
            batch, token_ids=buffers.token_ids, positions=buffers.positions, slots=buffers.slots, end=self.max_model_len,
            plan=[planned],
        )  # fmt: skip
        return buffers, self._record(lambda: self.model.forward_with_features(static, self.kv))

    def _on_cuda(self, function: Callable[[], Outputs]) -> Recorded:
        with torch.cuda.device(self.model.device):
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.model.device)
            return CudaRecorded(function, self.model.device, *self._memory)

    def _forget(self) -> None:
        """Drop all graphs. A pool whose last graph is gone is not recorded into again."""
        self._graphs.clear()
        self._memory = None


def bucket(rows: int, most: int) -> int:
    """Requests that a graph for ``rows`` has room for: 1, 2, 4, then multiples of 8, from 64 on of 32; never more than ``most``."""
    if rows <= 4:
        size = 1 << (rows - 1).bit_length()
    else:
        step = 8 if rows <= 64 else 32
        size = -(-rows // step) * step
    return max(min(size, most), rows)


def context_bucket(length: int, most: int) -> int:
    """The context that the parts of attention are chosen for: 512, 2048, 8192, ...; never more than ``most``."""
    size = _CONTEXT
    while size < length:
        size *= 4
    return max(min(size, most), length)
