"""KV of preempted requests in host memory, within a budget of bytes: the alternative to computing it again.

What a request has computed is copied whole when it gives its blocks back, the blocks too that it shared or that can be found by
their prefix: by the time it returns they may be gone. When it returns, what the prefix index still has is shared, and the rest is
copied into fresh blocks before the step's forward pass. PagedAttention, arXiv 2309.06180, section 4.5.
"""

import math
import time
from dataclasses import dataclass

from engine.events.batching import BlockSwapped
from engine.events.recorder import Recorder
from engine.kvcache.layout import HostBlocks, KVCache
from engine.request import Request

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Entry:
    request: Request
    blocks: HostBlocks
    block_ids: list[int]  # where it was copied from
    copy_ms: float


@dataclass(frozen=True, slots=True)
class Return:
    """KV that goes back: the blocks ``first``.. of ``blocks`` into ``block_ids``."""

    request_id: str
    blocks: HostBlocks
    first: int
    block_ids: list[int]
    num_tokens: int


class SwapSpace:
    """The swapped requests of one pool. ``Request.num_swapped_tokens`` says of each how much lies here; it is set here alone."""

    def __init__(self, kv: KVCache, recorder: Recorder, gib: float = 0.0) -> None:
        """``gib``: EngineConfig.swap_space."""
        self.kv = kv
        self.recorder = recorder
        self.budget_bytes = int(gib * GIB)
        self.used_bytes = 0
        self._entries: dict[str, _Entry] = {}  # the longest there first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def set_budget(self, gib: float) -> None:
        """What lies here beyond a lower budget is given up, the last that came first."""
        self.budget_bytes = int(gib * GIB)
        while self.used_bytes > self.budget_bytes:
            self.drop(next(reversed(self._entries.values())).request, "budget lowered")

    def why_not(self, request: Request) -> str:
        """What keeps the KV of a running request from being copied here; "": nothing."""
        if not request.num_computed_tokens:
            return "nothing is computed yet"
        if request.beams is not None:
            return "beams share their blocks: they are computed again"
        need = self.kv.host_bytes(self._blocks_of(request))
        if self.used_bytes + need > self.budget_bytes:
            left = max(0, self.budget_bytes - self.used_bytes)
            return f"swap_space is used up: {need:,} bytes are needed, {left:,} of {self.budget_bytes:,} are left"
        return ""

    def _blocks_of(self, request: Request) -> list[int]:
        return request.block_ids[: math.ceil(request.num_computed_tokens / self.kv.block_size)]

    def swap_out(self, request: Request) -> str:
        """Copy what a request has computed, before its blocks are given back. Returns why it could not be; "": it was. ``record_out``
        tells of it. RuntimeError for one that is here."""
        if request.request_id in self._entries:
            raise RuntimeError(f"{request!r} is swapped out already")
        why = self.why_not(request)
        if why:
            return why
        start = time.perf_counter()
        block_ids = self._blocks_of(request)
        try:
            blocks = self.kv.to_host(block_ids)
        except (MemoryError, RuntimeError) as error:  # torch says the latter
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            return "there is no memory for it, though swap_space allows it"
        copy_ms = 1e3 * (time.perf_counter() - start)
        self._entries[request.request_id] = _Entry(request, blocks, block_ids, copy_ms)
        request.num_swapped_tokens = request.num_computed_tokens
        self.used_bytes += blocks.nbytes
        return ""

    def record_out(self, request: Request) -> None:
        """Tell of the copy that ``swap_out`` made; after the RequestPreempted that it belongs to."""
        entry = self._entries[request.request_id]
        num_bytes = entry.blocks.nbytes
        self._record(request.request_id, "out", entry.block_ids, request.num_swapped_tokens, num_bytes, entry.copy_ms)

    def take(self, request: Request, first: int, block_ids: list[int]) -> Return:
        """A swapped request is admitted: ``block_ids`` are its own for its blocks ``first``... ``bring_back`` copies; until then
        nothing of the step may run. The memory counts as given back."""
        entry = self._remove(request)
        num_tokens, request.num_swapped_tokens = request.num_swapped_tokens, 0
        return Return(request.request_id, entry.blocks, first, block_ids, num_tokens)

    def bring_back(self, returning: Return) -> None:
        start = time.perf_counter()
        self.kv.from_host(returning.blocks, returning.first, returning.block_ids)
        copy_ms = 1e3 * (time.perf_counter() - start)
        self._record(
            returning.request_id, "in", returning.block_ids, returning.num_tokens, returning.blocks.nbytes, copy_ms
        )  # fmt: skip

    def drop(self, request: Request, reason: str) -> None:
        """A request's KV is not wanted here any more. Fine for one that has none."""
        if request.request_id not in self._entries:
            return
        entry = self._remove(request)
        num_tokens, request.num_swapped_tokens = request.num_swapped_tokens, 0
        self._record(request.request_id, "dropped", [], num_tokens, entry.blocks.nbytes, 0.0, reason)

    def drop_all(self, reason: str) -> None:
        for entry in list(self._entries.values()):
            self.drop(entry.request, reason)

    def _remove(self, request: Request) -> _Entry:
        entry = self._entries.pop(request.request_id)
        self.used_bytes -= entry.blocks.nbytes
        return entry

    def _record(
        self, request_id: str, direction: str, block_ids: list[int], num_tokens: int, num_bytes: int, copy_ms: float,
        reason: str = "",
    ) -> None:  # fmt: skip
        if self.recorder.on:
            self.recorder.emit(
                BlockSwapped, request_id=request_id, direction=direction, block_ids=list(block_ids), num_tokens=num_tokens,
                num_bytes=num_bytes, used_bytes=self.used_bytes, budget_bytes=self.budget_bytes, copy_ms=copy_ms, reason=reason,
            )  # fmt: skip

    def check_integrity(self, waiting: list[Request]) -> None:
        """RuntimeError unless the bytes add up within the budget, and just those of ``waiting`` lie here that say so."""
        used = sum(entry.blocks.nbytes for entry in self._entries.values())
        if used != self.used_bytes or used > self.budget_bytes:
            raise RuntimeError(f"{used:,} bytes are swapped out, {self.used_bytes:,} are counted, {self.budget_bytes:,} allowed")
        said = {request.request_id for request in waiting if request.num_swapped_tokens}
        if said != set(self._entries):
            raise RuntimeError(f"{sorted(said)} say that they are swapped out, {sorted(self._entries)} are")
        for entry in self._entries.values():
            blocks = -(-entry.request.num_swapped_tokens // self.kv.block_size)
            if entry.request.status != "preempted" or blocks != entry.blocks.num_blocks:
                raise RuntimeError(f"{entry.request!r} has {entry.blocks.num_blocks} blocks in host memory, {blocks} expected")
