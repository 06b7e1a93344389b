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


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="kind", kw_only=True, gc=False):
    step: int
    time_ns: int


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
    """The pool ran out: the request gives its blocks back and will be computed again from its tokens."""

    request_id: str
    num_computed_tokens: int  # what has to be recomputed (before prefix hits)
    for_request_id: str  # the one whose need of a block caused it


class RequestFinished(Event, frozen=True, kw_only=True):
    request_id: str
    reason: str  # "stop" | "length" | "abort" | "error"
    message: str = ""  # for "error": what went wrong; for "stop": what stopped it
    num_output_tokens: int = 0


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one request did in one step."""

    request_id: str
    phase: str  # "prefill" | "decode" (also with a draft to verify)
    start: int  # first position computed
    num_tokens: int
    sampled: bool  # whether this step produced a token for it
    num_drafts: int = 0  # of num_tokens, proposed by a drafter and computed to be verified
    num_accepted: int = 0  # of these, kept

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
    """Copy-on-write: the request wants to write into a block that others hold too."""

    request_id: str
    index: int  # logical
    src: int
    dst: int
    src_ref_count: int  # after


class BlockEvicted(Event, frozen=True, kw_only=True):
    """An unreferenced cached block was taken for new content: its prefix is forgotten."""

    block_id: int
    block_hash: int


class PrefixLookup(Event, frozen=True, kw_only=True):
    request_id: str
    num_tokens: int  # asked for
    num_hit_tokens: int
    block_ids: list[int]  # hit
    # "" when everything that could be hit was; else "disabled" | "no such prefix" | "shorter than a block" | "evicted" | "different salt" | "hash collision"
    miss_reason: str
    recompute: bool = False  # the lookup of a preempted request that comes back


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


class DraftNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One proposed token. A draft is a tree: ``parent`` is the node it follows, -1 the request's last token."""

    token_id: int
    text: str
    parent: int
    q: float  # the drafter's probability of it, after the request's processors; NaN: the drafter has none
    top_ids: list[
        int
    ] = []  # the drafter's likeliest tokens in its place, and their probabilities; what is missing to 1 is the rest
    top_texts: list[str] = []
    top_probs: list[float] = []


class DraftProposed(Event, frozen=True, kw_only=True):
    """A drafter proposed tokens to follow a request's last one. DraftVerified follows in the same step."""

    request_id: str
    method: str  # SpeculativeConfig.method
    position: int  # of the first proposed token
    num_wanted: int  # K of this step, after what pool, context and budget left of it
    nodes: list[DraftNode]  # parents before children; [] when there was nothing to propose
    sampled: bool  # drawn at random from the drafter's distribution
    draft_ms: float  # wall time of the whole batch's drafting in this step
    batch_size: int  # requests that were drafted for in that time
    failure: str = ""  # why there is no draft, where that is no matter of course
    found_at: int = -1  # n-gram: position in the sequence that was copied from; Lookahead: place in its pool


class VerifiedNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of one proposed token."""

    outcome: str  # "accepted" | "rejected" | "not reached"
    p: float  # the target's probability of it, after the processors (and after elder siblings were rejected); NaN: not looked at
    q: float  # the drafter's, as it was compared (renormalised over what elder siblings left); NaN: not compared
    u: float | None  # what the accept test drew (rejection: accepted when u < p / q); None: nothing was drawn for it
    accept: float  # probability with which it was to be accepted: min(1, p / q), or p where the target's own draw decides
    top_ids: list[int] = []  # the target's likeliest tokens in its place, after the processors
    top_texts: list[str] = []
    top_probs: list[float] = []


class DraftVerified(Event, frozen=True, kw_only=True):
    """The target computed a draft in one pass and kept ``path`` of it; then came one token of its own.

    TokenSampled is recorded for each token that the request gained, as in plain decoding.
    """

    request_id: str
    position: int  # of the first proposed token
    rule: str  # "rejection" | "draw" (the target's own draw decides: deterministic and coupled drafts) | "typical"
    nodes: list[VerifiedNode]  # as in DraftProposed
    path: list[int]  # accepted nodes, in order
    token_id: int  # the target's own token after them; -1: none (a stop token or a limit lay within the draft)
    text: str
    own: str  # "corrected" (a node stood in its place and was rejected) | "bonus" (nothing more was proposed) | ""
    own_u: float | None  # what it was drawn with; None: greedy, or none
    own_prob: float  # in the distribution that it was drawn from
    residual_ids: list[int] = []  # likeliest of the normalised positive part of p - q, where the token was drawn from that
    residual_texts: list[str] = []
    residual_probs: list[float] = []
    residual_mass: float = 0.0  # of that positive part before normalising: the probability of a rejection there
    verify_ms: float = 0.0  # wall time of the whole step's forward pass
    num_kept: int = 0  # tokens that the request gained


class BeamCandidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One way in which a beam could go on: one of the best of all ways of all beams of a request."""

    source: int  # sample_index of the beam that it goes on from
    token_id: int
    text: str
    logprob: float  # of the token, after the penalties (natural log)
    sum_logprob: float  # of the whole sequence so far
    beam: int  # sample_index of the beam that holds it from now on; -1: none
    score: float  # sum / length ** length_penalty when it ended here and was kept; NaN when it did not
    fate: str  # "kept" | "ended" (complete, and among the best complete ones) | "dropped"


class BeamsSelected(Event, frozen=True, kw_only=True):
    """One step of a beam search: which ways of going on were looked at, and which of them were taken.

    The beams are sequences of the request with a ``sample_index`` each, as the siblings of n > 1 are. From here on, beam
    ``c.beam`` of each kept candidate has the tokens of beam ``c.source`` before it, and its own token. A beam that no
    candidate names holds nothing any more: it ends, or takes over another one's tokens.
    """

    request_id: str
    position: int  # of the tokens chosen
    candidates: list[BeamCandidate]  # best first
    num_ended: int  # complete sequences kept so far
    worst_ended: float  # the lowest of their scores; NaN when there is none
    best_possible: (
        float  # the score that the best beam is taken to reach, as early stopping compares it; NaN when no beam is left
    )


class BeamSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token_ids: list[int]
    texts: list[str]  # one a token
    sum_logprob: float
    score: float
    reason: str  # "stop" | "length" | "abort"


class BeamsFinished(Event, frozen=True, kw_only=True):
    """The end of a beam search: its n best sequences, which its first n beams show from here on."""

    request_id: str
    why: str
    sequences: list[BeamSequence]  # best first


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
)  # fmt: skip
