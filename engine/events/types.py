"""Every event the engine can record: frozen structs with a tag, the step, a monotonic time and plain CPU values.

Deltas, not snapshots: an event says what changed, and the object that changed it records it. ``Snapshot`` is the one
exception: it is the keyframe from which the deltas that follow are replayed (see ``engine.events.state``).

Units: ``time_ns`` is ``time.monotonic_ns()`` of the process that runs the engine; fields ending in ``_ms`` are
milliseconds, ``_bytes`` bytes. Token positions count from 0 at the first prompt token. A step is numbered from 1;
events recorded between steps (a request that arrives) carry the number of the last finished step.
"""

import math
from typing import Any, TypeAlias

import msgspec

from engine.events.attention import AttentionTraced
from engine.events.batching import BlockSwapped, PrefixTree
from engine.events.beams import BeamCandidate as BeamCandidate
from engine.events.beams import BeamSequence as BeamSequence
from engine.events.beams import BeamsFinished, BeamsSelected
from engine.events.event import Event
from engine.events.hardware import MemoryMeasured, RoofsMeasured
from engine.events.quantization import (
    KvObserved,
    LayerQuantized,
    MatrixObserved,
    QualityMeasured,
    QuantizationProbed,
    QuantizationProgress,
    WeightsChanged,
)
from engine.events.speculation import DraftNode as DraftNode
from engine.events.speculation import DraftProposed, DraftVerified
from engine.events.speculation import VerifiedNode as VerifiedNode


class EngineStarted(Event, frozen=True, kw_only=True):
    """What is running: first in every log, so that arithmetic on the log needs no engine."""

    config: dict[str, Any]  # the resolved EngineConfig, plain values
    model: dict[str, Any]  # see engine.model.config.ModelConfig.facts(): num_layers, num_attention_heads, num_kv_heads, ...
    device: dict[str, Any]  # device, dtype, attention_backend, linear_backend, threads, name, why (how "auto" was decided)
    versions: dict[str, str]  # cutaway, torch, python, ...
    kv_bytes_per_block: int  # bytes of all layers' K and V for one block, as allocated
    kv_pool_bytes: int  # bytes of the tensors that hold the pool


class RequestState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request inside a Snapshot. The engine's own snapshots hold live ones only; a log's keyframes also the last finished."""

    request_id: str
    owner: str
    status: str  # "waiting" | "running" | "preempted" | "finished"
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # -1 where a log did not see the token (tokens were not watched)
    prompt_text: str
    output_text: str
    sampling: dict[str, Any]
    num_computed_tokens: int
    block_ids: list[int]
    num_cached_tokens: int = 0
    parent_id: str | None = None
    sample_index: int = 0
    arrived_ns: int = 0
    finish_reason: str | None = None
    message: str = ""
    branched_from: str | None = None  # see RequestBranched
    branched_at: int = -1
    num_swapped_tokens: int = 0  # of a preempted request: those whose KV lies in host memory


class Snapshot(Event, frozen=True, kw_only=True):
    """Keyframe: the whole visible state at the end of ``step``."""

    num_blocks: int
    block_size: int
    ref_counts: list[int]  # [num_blocks]
    cached: dict[int, int]  # block id -> prefix hash, for blocks that the prefix index can find
    lru: list[int]  # cached blocks that nobody holds, next to be evicted first
    requests: list[RequestState]
    knobs: dict[str, Any]  # the live knobs' values


class RequestAdded(Event, frozen=True, kw_only=True):
    request_id: str
    owner: str  # who sent it (a browser session, "local")
    prompt_token_ids: list[int]
    prompt_text: str
    sampling: dict[str, Any]  # SamplingParams as given, seed filled in
    parent_id: str | None = None  # set for the siblings of n > 1
    sample_index: int = 0
    cache_salt: str | None = None  # cached prefixes are shared among requests of the same salt only
    priority: int = 0  # under scheduling_policy="priority": smaller is more urgent


class RequestForked(Event, frozen=True, kw_only=True):
    """A sibling (n > 1) leaves its parent after the prompt: it starts with the parent's block table."""

    request_id: str
    parent_id: str
    block_ids: list[int]
    num_computed_tokens: int


class RequestBranched(Event, frozen=True, kw_only=True):
    """A request that goes on from another one's tokens with one of them replaced. Follows its RequestAdded.

    Its tokens are those of ``source_id`` before ``position``, then ``token_id``; what of them lies behind its prompt is its
    output so far.
    """

    request_id: str
    source_id: str  # as the events name it ("req-0#1": a sibling)
    position: int  # of the forced token
    token_id: int  # the forced one
    text: str
    source_token_id: int  # what stands there in the source
    output_token_ids: list[int]  # the forced token last; [] when the position lies in the prompt
    output_texts: list[str]  # one each


class RequestPreempted(Event, frozen=True, kw_only=True):
    """The request gives its blocks back. Mode "recompute": its KV will be computed again from its tokens; "swap": it lies in host
    memory until the request is admitted again (BlockSwapped follows)."""

    request_id: str
    num_computed_tokens: int  # what has to be recomputed (before prefix hits), or was copied
    for_request_id: str  # the one whose need of a block caused it; "": nobody's, the weights changed
    mode: str = "recompute"
    why: str = ""  # of a recompute under preemption_mode="swap": what kept it from being swapped


class RequestFinished(Event, frozen=True, kw_only=True):
    request_id: str
    reason: str  # "stop" | "length" | "abort" | "error"
    message: str = ""  # for "error": what went wrong; for "stop": what stopped it
    num_output_tokens: int = 0


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one request did in one step."""

    request_id: str
    phase: str  # "prefill" | "decode" (also with a draft to verify) | "padding" (of a static batch: computed for nobody)
    start: int  # first position computed
    num_tokens: int
    sampled: bool  # whether this step produced a token for it
    num_drafts: int = 0  # of num_tokens, proposed by a drafter and computed to be verified
    num_accepted: int = 0  # of these, kept

    @property
    def is_padding(self) -> bool:
        """Computed for nobody, in the place of a member of a static batch: ``start`` is no position of the request."""
        return self.phase == "padding"

    @property
    def end(self) -> int:
        """One more than the last position that is computed afterwards."""
        return self.start + self.num_tokens - self.num_drafts + self.num_accepted


class StepDone(Event, frozen=True, kw_only=True):
    """One engine step. Its time is the end of the step."""

    runs: list[Run]
    num_waiting: int
    num_running: int
    token_budget: int
    max_num_seqs: int
    used_blocks: int  # referenced by a request
    cached_free_blocks: int  # unreferenced, still findable by prefix
    schedule_ms: float
    draft_ms: float = 0.0  # proposing tokens for all requests that speculate
    forward_ms: float  # building the tensors and the model, to logits
    sample_ms: float
    commit_ms: float
    step_ms: float  # whole step, wall time
    record_ms: float  # of step_ms, spent on recording and delivering events (cost of watching)
    flops: float  # counted: 2 per multiply-add, linear layers and attention
    weight_bytes: float  # weights read once in this step
    kv_read_bytes: float
    kv_write_bytes: float


class BlockAllocated(Event, frozen=True, kw_only=True):
    """A request's table grew: logical blocks first_index, first_index+1, ... are these physical blocks, fresh."""

    request_id: str
    first_index: int
    block_ids: list[int]


class BlockShared(Event, frozen=True, kw_only=True):
    """A request took another reference to blocks that exist (prefix hit)."""

    request_id: str
    first_index: int
    block_ids: list[int]
    ref_counts: list[int]  # after


class BlockFreed(Event, frozen=True, kw_only=True):
    """A request gave up its references. Count 0: free (or free but still cached)."""

    request_id: str
    block_ids: list[int]
    ref_counts: list[int]  # after


class BlockCached(Event, frozen=True, kw_only=True):
    """A block became full and can be found by its prefix from now on."""

    block_id: int
    block_hash: int  # 64 bits, chained over the parent
    parent_hash: int  # 0 for the first block of a prompt


class BlockCopied(Event, frozen=True, kw_only=True):
    """Copy-on-write: the request wants to write into a block that others hold too, or whose beginning alone is its own prefix."""

    request_id: str
    index: int  # logical
    src: int
    dst: int
    src_ref_count: int  # after
    num_tokens: int = 0  # of a partial prefix hit: how many of src's are its own; 0: all that were computed


class BlockEvicted(Event, frozen=True, kw_only=True):
    """An unreferenced cached block was taken for new content: its prefix is forgotten."""

    block_id: int
    block_hash: int


class PrefixLookup(Event, frozen=True, kw_only=True):
    request_id: str
    num_tokens: int  # asked for
    num_hit_tokens: int  # whose KV need not be computed: in whole blocks, part of the next, host memory
    block_ids: list[int]  # hit whole, and shared
    # "" when everything that could be hit was; else "disabled" | "no such prefix" | "shorter than a block" | "evicted" | "different salt" | "hash collision"
    miss_reason: str
    recompute: bool = False  # the lookup of a preempted request that comes back
    num_partial_tokens: int = 0  # of num_hit_tokens: in the block after the whole ones (radix index); BlockCopied follows
    num_swapped_tokens: int = 0  # of num_hit_tokens: they come back from host memory; BlockSwapped follows
    index: str = "hash"  # EngineConfig.prefix_index


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the likeliest tokens of the raw distribution; ``engine.sampling.candidates`` gives its share after each processor."""

    token_id: int
    text: str
    logprob: float  # of the raw distribution
    prob: float  # after all processors (0: filtered)
    penalised: float = math.nan  # log-probability after the penalties
    tempered: float = math.nan  # probability after penalties and temperature, before anything is filtered
    removed_by: str = ""  # "temperature" (0: greedy) | "min_p" | "top_k" | "top_p"; "": it was kept


class TokenSampled(Event, frozen=True, kw_only=True):
    """One token chosen. Recorded under ``watch("tokens", top=k)``."""

    request_id: str
    position: int  # of the token in the sequence
    index: int  # of the token in the output
    token_id: int
    text: str  # this token alone, invalid UTF-8 replaced
    logprob: float  # natural log, raw distribution (before processors)
    rank: int  # 1: the likeliest token of the raw distribution; 0 when it was not looked for
    u: float | None  # the draw in [0, 1); None when greedy
    prob: float  # after processors, what u was compared with
    nucleus_size: int  # tokens left after top-k, top-p and min-p; 0 when greedy
    nucleus_mass: float  # their mass before renormalising (at the request's temperature)
    entropy: float  # of the raw distribution, nats; NaN when it was not looked for
    top: list[Candidate] = []
    step_ms: float = 0.0  # wall time since the request's previous token (or since it arrived)
    kept_sizes: list[int] = []  # tokens that min_p, top_k and top_p left, one after the other; [] when not looked for
    kept_masses: list[float] = []  # and the mass of those, at the request's temperature, before renormalising


class LogitsRecorded(Event, frozen=True, kw_only=True):
    """All logits one token was chosen from. Recorded under ``watch("logits", request_id)``, bounded in number."""

    request_id: str
    position: int  # of the token that was chosen from them
    dtype: str  # "float16"
    logits: bytes  # [vocab_size], little-endian; minus the largest, so that 16 bits are finest where it matters
    max_logit: float  # what was taken off


class KnobChanged(Event, frozen=True, kw_only=True):
    name: str
    old: Any
    new: Any
    by: str = ""  # who moved it
    request_id: str | None = None  # update_sampling of one request
    draining: bool = False  # it waits for the running requests to finish


class PoolResized(Event, frozen=True, kw_only=True):
    """The pool was rebuilt empty (block size or pool size changed, after draining)."""

    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    kv_pool_bytes: int


class CacheTimed(Event, frozen=True, kw_only=True):
    """The next token of one short request, timed with its K and V in the cache and with everything computed again.

    Both were run: at context ``lengths[i]`` the step took ``with_ms[i]`` with the cache and ``without_ms[i]`` without.
    """

    lengths: list[int]  # tokens of context, the new one included
    with_ms: list[float]
    without_ms: list[float]


AnyEvent: TypeAlias = (
    EngineStarted | Snapshot | RequestAdded | RequestForked | RequestPreempted | RequestFinished | StepDone
    | BlockAllocated | BlockShared | BlockFreed | BlockCached | BlockCopied | BlockEvicted | PrefixLookup
    | TokenSampled | LogitsRecorded | KnobChanged | PoolResized | CacheTimed
    | RequestBranched | BeamsSelected | BeamsFinished | DraftProposed | DraftVerified
    | WeightsChanged | QuantizationProgress | LayerQuantized | MatrixObserved | QuantizationProbed | QualityMeasured | KvObserved
    | RoofsMeasured | MemoryMeasured
    | AttentionTraced | PrefixTree | BlockSwapped
)  # fmt: skip
