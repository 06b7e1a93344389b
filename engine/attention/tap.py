"""Takes one layer's attention call out of the running engine: its Q, K, V and block tables, and what the backend gave for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention import launches
from engine.attention.base import Attention, Pool, Span, TensorPool
from engine.attention.launches import Launch
from engine.attention.traced import Job
from engine.attention.triton import held, unfit
from engine.events.attention import TracedRequest
from engine.kernels.flash_attention import FlashConfig, default_config, tile_schedule
from engine.kernels.paged_decode import DecodeConfig, choose_splits
from engine.model.config import ModelConfig

CAPACITY = 1 << 16  # records of a trace
TILES_INTERPRETED = 3000  # what a child interprets: about 10 ms each on a slow core
MOST_TILES_INTERPRETED = 12_000  # of one request and KV head alone; beyond, it is refused
MOST_BYTES = 256 << 20  # of K and V that are copied


@dataclass(frozen=True)
class Choice:
    """What is to be traced, and how. ``row`` counts from the end where it is negative; ``request_id``: "" for the longest."""

    layer: int
    request_id: str = ""
    row: int = -1
    head: int = 0
    num_splits: int | None = None
    num_sms: int = 132
    block_m: int | None = None
    block_n: int | None = None
    capacity: int = CAPACITY

    def check(self, config: ModelConfig) -> "Choice":
        """Itself. ValueError for what the model does not have or the kernels do not take."""
        _in_range("layer", self.layer, 0, config.num_layers - 1)
        _in_range("head", self.head, 0, config.num_attention_heads - 1)
        _in_range("row", self.row, -(1 << 24), 1 << 24)
        _in_range("num_sms", self.num_sms, 1, 4096)
        _in_range("capacity", self.capacity, 1, 1 << 20)
        if self.num_splits is not None:
            _in_range("num_splits", self.num_splits, 1, 128)
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id must be text, got {self.request_id!r}")
        why = unfit(config)
        if why:
            raise ValueError(f"attention cannot be traced: {why}")
        base = FlashConfig()
        FlashConfig(self.block_m or base.block_m, self.block_n or base.block_n).check()
        return self


def _in_range(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


@dataclass(frozen=True)
class Taken:
    """A launch as it was taken: the job, and the fields of an AttentionTraced that are known already."""

    job: Job
    fields: dict[str, Any]


class Tap(Attention):
    """A backend with an ear at one layer: the first step that comes by is taken, and ``taken`` then says what it was."""

    takes_compiled = False

    def __init__(self, inner: Attention, choice: Choice, block_size: int, num_blocks: int, kv_dtype: str) -> None:
        super().__init__(inner.config)
        self.inner, self.choice, self.name = inner, choice, inner.name
        self.block_size, self.num_blocks, self.kv_dtype = block_size, num_blocks, kv_dtype
        self.taken: list[Taken] | None = None
        self.error: ValueError | None = None
        self._spans: Sequence[Span] = ()
        self._pool: Pool | None = None

    @property
    def done(self) -> bool:
        return self.taken is not None or self.error is not None

    def plan(self, spans: Sequence[Span], kv: Pool | torch.Tensor, dtype: torch.dtype) -> Any:
        self._spans = spans
        self._pool = kv if isinstance(kv, Pool) else TensorPool(kv)
        return self.inner.plan(spans, kv, dtype)

    def stores(self, qkv: torch.Tensor, pool: Any) -> bool:
        return self.inner.stores(qkv, pool)

    def store(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, writes: Any, pool: Any) -> None:
        self.inner.store(qkv, cos, sin, writes, pool)

    def run(self, plan: Any, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        out = self.inner.run(plan, layer, qkv, stored, pool)
        if layer == self.choice.layer and not self.done:
            try:
                self.taken = self._take(qkv, stored, pool, out)
            except ValueError as error:
                self.error = error
        return out

    def _take(self, qkv: torch.Tensor, stored: torch.Tensor, pool: Any, out: torch.Tensor) -> list[Taken]:
        assert self._pool is not None
        if self._pool.block_size is None:
            raise ValueError(f"attention over a KV cache in {self.kv_dtype} cannot be traced: no kernel reads it")
        config = self.config
        q = (stored if stored.dtype == pool.dtype else qkv)[:, : config.num_attention_heads]
        expected = out.view(len(out), config.num_attention_heads, config.head_dim)
        most = launches.decode_rows(config.head_dim, q.dtype)
        made = launches.split(self._spans, config.num_attention_heads // config.num_kv_heads, most)
        wanted = [launch for launch in made if launch.kernel]
        if not wanted:
            raise ValueError("the step has a tree that is too large for the kernels, and nothing else")
        return [_Taker(self, launch, q, pool, expected).take() for launch in wanted]


class _Taker:
    """One launch: what is kept of it, its tables and its options."""

    def __init__(self, tap: Tap, launch: Launch, q: torch.Tensor, pool: Any, expected: torch.Tensor) -> None:
        self.tap, self.q, self.pool, self.expected = tap, q, pool, expected
        self.choice, self.config = tap.choice, tap.config
        self.group = self.config.num_attention_heads // self.config.num_kv_heads
        self.window = self.config.sliding_windows[self.choice.layer]
        self.run = launches.run_of(tap.block_size)
        self.flash = launch.kernel == "flash_attention"
        self.tiles_of = self._tile_config(launch)
        self.kv_heads, self.kept = self._kept(launch)
        self.left_out = len(launch.spans) - len(self.kept.spans)

    def _tile_config(self, launch: Launch) -> FlashConfig | DecodeConfig:
        base: Any
        if self.flash:
            base = default_config(self.config.head_dim, self.pool.dtype, launch.max_seqlen_q)
            return FlashConfig(
                self.choice.block_m or base.block_m, self.choice.block_n or base.block_n, base.num_warps, base.num_stages
            )
        base = DecodeConfig()
        return DecodeConfig(self.choice.block_n or base.block_n, base.num_warps, base.num_stages)

    def _tiles(self, span: Span) -> int:
        """Tiles of one KV head, with all query heads of its group."""
        if isinstance(self.tiles_of, FlashConfig):
            ranges = tile_schedule(span.num_tokens, span.end, self.tiles_of, True, self.window)
            return self.group * sum(len(r.tiles(self.tiles_of.block_n)) + 1 for r in ranges)
        return -(-span.end // self.tiles_of.block_n) + 1

    def _kept(self, launch: Launch) -> tuple[int, Launch]:
        """How many KV heads and which requests stay within the bounds."""
        spans, kv_heads = list(launch.spans), self.config.num_kv_heads
        row_bytes = 2 * self.config.head_dim * self.pool.dtype.itemsize
        if self.q.is_cuda:
            most = self.choice.capacity
        else:
            most = TILES_INTERPRETED
            alone = min(self._tiles(s) for s in spans)
            if alone > MOST_TILES_INTERPRETED:
                raise ValueError(
                    f"this call has {alone:,} tiles in a single KV head, the interpreter takes at most {MOST_TILES_INTERPRETED:,}: "
                    "trace a shorter prompt, a smaller chunk (max_num_batched_tokens) or larger tiles"
                )
        # The chosen request first: what is left out is the end.
        spans.sort(key=lambda s: (s.request_id != self.choice.request_id, -s.end if not self.choice.request_id else 0, s.row))

        def fits(heads: int, some: list[Span]) -> bool:
            tiles = sum(map(self._tiles, some)) * heads
            return tiles <= most and sum(s.end for s in some) * heads * row_bytes <= MOST_BYTES

        least = self.choice.head // self.group + 1  # the chosen head must be among them
        while kv_heads > least and not fits(kv_heads, spans):
            kv_heads -= 1
        while len(spans) > 1 and not fits(kv_heads, spans):
            spans.pop()
        return kv_heads, Launch(launch.kernel, tuple(sorted(spans, key=lambda s: s.row)))

    def take(self) -> Taken:
        spans, device = self.kept.spans, self.q.device
        made = launches.tables(self.kept, self.run)
        used = sorted({int(b) for row, s in zip(made.block_tables, spans) for b in row[: -(-s.end // self.run)]})
        place = np.zeros(max(used) + 1, dtype=np.int32)
        place[used] = np.arange(len(used), dtype=np.int32)
        slots = (np.array(used, dtype=np.int64)[:, None] * self.run + np.arange(self.run)).ravel()
        # Entries beyond a request's length may be blocks that are not here: nobody reads them.
        blocks = place[np.where(made.block_tables < len(place), made.block_tables, 0)]
        pool, scales = self._gather(torch.from_numpy(slots).to(device))
        rows = torch.cat([torch.arange(s.row, s.row + s.num_tokens) for s in spans]).to(device)
        heads = self.kv_heads * self.group

        def tensor(a: Any) -> torch.Tensor | None:
            return None if a is None else torch.from_numpy(np.ascontiguousarray(a)).to(device)

        index = [tensor(a) for a in (blocks, made.cu_seqlens_q, made.seq_lens, made.tree, made.positions)]
        table, cu, lens, tree, positions = index
        assert table is not None and cu is not None and lens is not None
        options = self._options()
        job = Job(
            self.kept.kernel, self.q[rows, :heads].contiguous(), pool, scales, table, cu, lens, tree, positions,
            self.expected[rows, :heads].contiguous(), options,
        )  # fmt: skip
        return Taken(job, self._fields(options))

    def _gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The blocks' numbers, or codes and scales; of the kept KV heads. flash_attention has numbers only."""
        all_heads = self.config.num_kv_heads
        heads = torch.cat([torch.arange(self.kv_heads), all_heads + torch.arange(self.kv_heads)]).to(slots.device)
        numbers, scales = held(self.pool)
        if scales is None:
            return numbers[slots][:, heads].contiguous(), None
        if self.flash:
            return self.pool.index_select(0, slots)[:, heads].contiguous(), None
        return numbers[slots][:, heads].contiguous(), scales[slots][:, heads].contiguous()

    def _options(self) -> dict[str, Any]:
        spans, choice, tiles = self.kept.spans, self.choice, self.tiles_of
        chosen = max(range(len(spans)), key=lambda i: (spans[i].request_id == choice.request_id, spans[i].end))
        n = spans[chosen].num_tokens
        row = min(max(choice.row + n if choice.row < 0 else choice.row, 0), n - 1)
        if isinstance(tiles, FlashConfig):
            splits, block_m = 1, tiles.block_m
        else:
            context = self.kept.max_seq_len
            if self.window is not None:
                context = min(context, self.window + self.kept.max_seqlen_q)
            splits = choice.num_splits or choose_splits(len(spans), self.config.num_kv_heads, context, self._sms(), tiles.block_n)
            block_m = max(16, 1 << (self.kept.max_seqlen_q * self.group - 1).bit_length())
        return {
            "block_size": self.run, "window": self.window or 0, "num_splits": splits, "block_m": block_m, "block_n": tiles.block_n,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "capacity": choice.capacity,
            "row_request": chosen, "row": row, "row_head": choice.head,
        }  # fmt: skip

    def _sms(self) -> int:
        if self.q.is_cuda:
            return torch.cuda.get_device_properties(self.q.device).multi_processor_count
        return self.choice.num_sms

    def _fields(self, options: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        coded = not self.flash and self.tap.kv_dtype != "auto"
        shared = ("window", "num_splits", "block_m", "block_n", "num_warps", "num_stages", "row_request", "row", "row_head")
        return {
            "layer": self.choice.layer, "kernel": self.kept.kernel, "where": "cuda" if self.q.is_cuda else "interpreter",
            "backend": self.tap.name, "block_size": self.tap.block_size, "num_blocks": self.tap.num_blocks,
            "num_heads": config.num_attention_heads, "num_kv_heads": config.num_kv_heads, "traced_kv_heads": self.kv_heads,
            "head_dim": config.head_dim, "dtype": str(self.q.dtype).removeprefix("torch."),
            "kv_dtype": self.tap.kv_dtype if coded else "auto", "scale": config.head_dim**-0.5, "causal": True,
            "requests": [self._request(span) for span in self.kept.spans], "requests_left_out": self.left_out,
            "num_sms": self._sms(), **{name: options[name] for name in shared},
        }  # fmt: skip

    def _request(self, span: Span) -> TracedRequest:
        blocks = (span.slots[: span.end : self.tap.block_size] // self.tap.block_size).tolist()
        bits = [] if span.ancestors is None else launches.row_bits(span)
        return TracedRequest(span.request_id, span.num_tokens, span.end, blocks, bits)
