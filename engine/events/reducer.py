"""What each kind of event does to a State. ``engine.events.state`` is the way in."""

import itertools
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.events.batching import BlockSwapped
from engine.events.request_view import UNSEEN, ReqView
from engine.events.types import (
    AnyEvent,
    BeamsFinished,
    BeamsSelected,
    BlockAllocated,
    BlockCached,
    BlockCopied,
    BlockEvicted,
    BlockFreed,
    BlockShared,
    EngineStarted,
    KnobChanged,
    PoolResized,
    PrefixLookup,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    Snapshot,
    StepDone,
    TokenSampled,
)

if TYPE_CHECKING:
    from engine.events.state import State

MAX_TOKENS = 1 << 26  # token ids that all requests of one state may hold
MAX_FINISHED = 128  # finished requests kept, the newest
MAX_FINISHED_TOKENS = 1 << 20  # and the token ids they may hold together

# One handler a kind. They run once for each event of a replay, so they are kept short.


def _tokens(count: int) -> int:
    """A number of tokens, checked: a log that claims more than a state may hold is refused before anything is allocated."""
    if not 0 <= count <= MAX_TOKENS:
        raise ValueError(f"{count} tokens of one request, at most {MAX_TOKENS} are allowed")
    return count


def _ignored(state: "State", e: Any) -> None:
    """An observation that changes nothing."""


def _engine_started(state: "State", e: EngineStarted) -> None:
    """A new run: nothing of an earlier one remains. The pool is as configured until a Snapshot says more."""
    state.__init__()  # type: ignore[misc]
    state.engine = e
    num_blocks, block_size = e.config.get("num_kv_blocks"), e.config.get("block_size")
    if isinstance(num_blocks, int) and isinstance(block_size, int):
        state._new_pool(num_blocks, block_size)


def _snapshot(state: "State", e: Snapshot) -> None:
    """Start again from a keyframe; finished requests stay known, and live ones that it lacks ended unseen."""
    if len(e.ref_counts) != e.num_blocks:
        raise ValueError(f"snapshot of {e.num_blocks} blocks has {len(e.ref_counts)} reference counts")
    state._new_pool(e.num_blocks, e.block_size)
    for b in itertools.chain(e.cached, e.lru, *(r.block_ids for r in e.requests)):
        if not 0 <= b < e.num_blocks:
            raise ValueError(f"snapshot names block {b} of a pool of {e.num_blocks}")
    for r in e.requests:
        _tokens(r.num_computed_tokens)
    try:
        state.ref_counts[:] = e.ref_counts
    except OverflowError:
        raise ValueError("snapshot has a reference count that does not fit 32 bits") from None
    state.cached, state.lru = e.cached.copy(), dict.fromkeys(e.lru)
    state.knobs = e.knobs.copy()
    before, state.requests = state.requests, {}
    there = {r.request_id for r in e.requests}
    for view in before.values():
        if view.request_id not in there:
            if view.status != "finished":
                view = view.own_copy()
                view.status, view.block_ids, view.finished_step = "finished", [], e.step
                view.num_swapped_tokens = 0
                view.message = "ended while events were dropped"
                state._finished[view.request_id] = view.num_prompt_tokens + len(view.output_token_ids)
            state.requests[view.request_id] = view
    for r in e.requests:
        old = before.get(r.request_id)
        state.requests[r.request_id] = ReqView.from_state(r, old)
        state._finished.pop(r.request_id, None)
        if r.status == "finished":
            state._finished[r.request_id] = len(r.prompt_token_ids) + len(r.output_token_ids)
    state._own = there
    state._num_tokens = 0
    state._hold(sum(v.num_prompt_tokens + len(v.output_token_ids) for v in state.requests.values()))
    state._drop_old()


def _request_added(state: "State", e: RequestAdded) -> None:
    old = state.requests.get(e.request_id)
    if old is not None:
        if old.status != "finished":
            raise ValueError(f"request {e.request_id!r} was added twice")
        state._num_tokens -= state._finished.pop(e.request_id)
        del state.requests[e.request_id]  # the name is used again: it takes its new place in the order
    state._hold(len(e.prompt_token_ids))
    state.requests[e.request_id] = ReqView(
        request_id=e.request_id,
        owner=e.owner,
        status="waiting",
        prompt_token_ids=e.prompt_token_ids,
        prompt_text=e.prompt_text,
        sampling=e.sampling,
        parent_id=e.parent_id,
        sample_index=e.sample_index,
        arrived_ns=e.time_ns,
        arrived_step=e.step,
    )
    state._own.add(e.request_id)


def _request_forked(state: "State", e: RequestForked) -> None:
    view = state._view(e.request_id)
    view.parent_id = e.parent_id
    parent = state.requests.get(e.parent_id)
    if parent is not None:  # it has what its parent had when it arrived
        view.num_cached_tokens, view.arrived_ns = parent.num_cached_tokens, parent.arrived_ns
    view.num_computed_tokens = e.num_computed_tokens
    view.num_output_tokens = (
        _tokens(e.num_computed_tokens) + 1 - len(view.prompt_token_ids)
    )  # its first token, from its parent's logits
    if view.status != "finished":
        view.status = "running"
    if view.block_ids[: len(e.block_ids)] != e.block_ids:  # the references are new unless BlockShared told of them already
        state._own_pool()
        for b in e.block_ids:
            if not 0 <= b < state.num_blocks:
                raise ValueError(f"block {b} does not fit a pool of {state.num_blocks} blocks")
            state._count(b, int(state.ref_counts[b]) + 1)
        view.block_ids = e.block_ids.copy()


def _request_preempted(state: "State", e: RequestPreempted) -> None:
    view = state._view(e.request_id)
    view.status = "preempted"
    view.num_computed_tokens = 0
    view.num_preemptions += 1


def _request_finished(state: "State", e: RequestFinished) -> None:
    view = state._view(e.request_id)
    view.status = "finished"
    view.num_swapped_tokens = 0
    view.finish_reason, view.message, view.finished_step = e.reason, e.message, e.step
    view.num_output_tokens = max(_tokens(e.num_output_tokens), len(view.output_token_ids))
    state._finished[e.request_id] = view.num_prompt_tokens + len(view.output_token_ids)


def _step_done(state: "State", e: StepDone) -> None:
    requests, own = state.requests, state._own
    for run in e.runs:
        request_id = run.request_id
        view = requests[request_id] if request_id in own else state._view(request_id)
        if view.status == "finished" or run.is_padding:
            continue
        view.status = "running"
        end = _tokens(run.end)
        view.num_computed_tokens = end
        if run.sampled:  # the token at position ``end`` now exists
            view.num_output_tokens = end + 1 - len(view.prompt_token_ids)
    if len(state._finished) > MAX_FINISHED or state._num_tokens > MAX_FINISHED_TOKENS:
        state._drop_old()


def _token_sampled(state: "State", e: TokenSampled) -> None:
    request_id = e.request_id
    view = state.requests[request_id] if request_id in state._own else state._view(request_id)
    tokens, index = view.output_token_ids, e.index
    if index == len(tokens):
        state._hold(1)
        tokens.append(e.token_id)
        view.output_texts.append(e.text)
    elif 0 <= index < len(tokens):
        tokens[index] = e.token_id
    elif len(tokens) < index < MAX_TOKENS:  # tokens before it were not watched
        state._hold(index + 1 - len(tokens))
        tokens.extend([UNSEEN] * (index - len(tokens)))
        tokens.append(e.token_id)
        view.output_texts.append(e.text)
    else:
        raise ValueError(f"token index {index} of request {request_id!r} is out of range")
    if index >= view.num_output_tokens:
        view.num_output_tokens = index + 1


def _set_output(state: "State", view: ReqView, token_ids: list[int], texts: list[str]) -> None:
    state._hold(len(token_ids) - len(view.output_token_ids))
    if view.status == "finished":
        state._finished[view.request_id] = view.num_prompt_tokens + len(token_ids)
    view.output_token_ids, view.output_texts = token_ids.copy(), texts.copy()


def _request_branched(state: "State", e: RequestBranched) -> None:
    view = state._view(e.request_id)
    view.branched_from, view.branched_at = e.source_id, e.position
    _set_output(state, view, e.output_token_ids, e.output_texts)
    view.num_output_tokens = len(e.output_token_ids)


def _beam_id(request_id: str, beam: int) -> str:
    return f"{request_id}#{beam}" if beam else request_id


def _beams_selected(state: "State", e: BeamsSelected) -> None:
    kept = [(c, state._view(_beam_id(e.request_id, c.source))) for c in e.candidates if c.beam >= 0]
    before = [(c, view.output_token_ids, view.output_texts) for c, view in kept]
    for c, token_ids, texts in before:
        view = state._view(_beam_id(e.request_id, c.beam))
        index = e.position - view.num_prompt_tokens
        if not len(token_ids) <= index < MAX_TOKENS:
            raise ValueError(f"a beam of {e.request_id!r} has {len(token_ids)} tokens before token {index}")
        more = index + 1 - len(view.output_token_ids)
        state._hold(more)  # checked before anything that long is made
        state._hold(-more)
        unseen = [UNSEEN] * (index - len(token_ids))  # of steps that were not recorded
        _set_output(state, view, [*token_ids, *unseen, c.token_id], [*texts, c.text])
        view.num_output_tokens = index + 1


def _beams_finished(state: "State", e: BeamsFinished) -> None:
    for beam, sequence in enumerate(e.sequences):
        if _beam_id(e.request_id, beam) in state.requests:
            view = state._view(_beam_id(e.request_id, beam))
            _set_output(state, view, sequence.token_ids, sequence.texts)
            view.num_output_tokens = len(sequence.token_ids)


def _table(state: "State", request_id: str, first_index: int, block_ids: list[int]) -> None:
    """Logical blocks from ``first_index`` on are ``block_ids``."""
    table = state._view(request_id).block_ids
    if not 0 <= first_index <= len(table):
        raise ValueError(f"logical block {first_index} of request {request_id!r}, whose table has {len(table)} blocks")
    _few(state, block_ids)
    table[first_index : first_index + len(block_ids)] = block_ids


def _few(state: "State", block_ids: list[int]) -> None:
    """No request holds more blocks than there are: a log that names millions is refused before they are walked."""
    if len(block_ids) > state.num_blocks:
        raise ValueError(f"{len(block_ids)} blocks of one request in a pool of {state.num_blocks}")


def _block_allocated(state: "State", e: BlockAllocated) -> None:
    _table(state, e.request_id, e.first_index, e.block_ids)
    state._own_pool()
    for b in e.block_ids:
        state._count(b, 1)


def _block_shared(state: "State", e: BlockShared) -> None:
    _table(state, e.request_id, e.first_index, e.block_ids)
    state._own_pool()
    for b, count in zip(e.block_ids, e.ref_counts, strict=True):
        state._count(b, count)


def _block_freed(state: "State", e: BlockFreed) -> None:
    _few(state, e.block_ids)
    state._own_pool()
    for b, count in zip(reversed(e.block_ids), reversed(e.ref_counts), strict=True):  # the pool gives a table's end back first
        state._count(b, count)
    view = state._view(e.request_id)
    gone = set(e.block_ids)
    view.block_ids = [b for b in view.block_ids if b not in gone]


def _block_cached(state: "State", e: BlockCached) -> None:
    state._own_pool()
    if not 0 <= e.block_id < state.num_blocks:
        raise ValueError(f"block {e.block_id} does not fit a pool of {state.num_blocks} blocks")
    state.cached[e.block_id] = e.block_hash


def _block_copied(state: "State", e: BlockCopied) -> None:
    _table(state, e.request_id, e.index, [e.dst])
    state._own_pool()
    state._count(e.src, e.src_ref_count)
    state._count(e.dst, 1)


def _block_evicted(state: "State", e: BlockEvicted) -> None:
    state._own_pool()
    state.cached.pop(e.block_id, None)
    state.lru.pop(e.block_id, None)


def _block_swapped(state: "State", e: BlockSwapped) -> None:
    state._view(e.request_id).num_swapped_tokens = _tokens(e.num_tokens) if e.direction == "out" else 0


def _prefix_lookup(state: "State", e: PrefixLookup) -> None:
    """It is asked when a request gets its place in the batch: from here on it runs, though its first tokens come with StepDone."""
    view = state._view(e.request_id)
    if view.status != "finished":
        view.status = "running"
    if not e.recompute:
        view.num_cached_tokens = e.num_hit_tokens


def _knob_changed(state: "State", e: KnobChanged) -> None:
    if e.request_id is not None:
        view = state._view(e.request_id)
        view.sampling = {**view.sampling, e.name: e.new}
    elif e.draining:
        state.draining[e.name] = e.new
    else:
        state.draining.pop(e.name, None)
        state.knobs[e.name] = e.new


def _pool_resized(state: "State", e: PoolResized) -> None:
    state._new_pool(e.num_blocks, e.block_size)
    state.knobs["num_kv_blocks"], state.knobs["block_size"] = e.num_blocks, e.block_size
    state.draining.pop("num_kv_blocks", None)
    state.draining.pop("block_size", None)
    for request_id, view in list(state.requests.items()):
        if view.block_ids:
            state._view(request_id).block_ids = []


HANDLERS: dict[Any, Callable[["State", Any], None]] = {
    **dict.fromkeys(typing.get_args(AnyEvent), _ignored),
    EngineStarted: _engine_started,
    Snapshot: _snapshot,
    RequestAdded: _request_added,
    RequestForked: _request_forked,
    RequestPreempted: _request_preempted,
    RequestFinished: _request_finished,
    StepDone: _step_done,
    BlockAllocated: _block_allocated,
    BlockShared: _block_shared,
    BlockFreed: _block_freed,
    BlockCached: _block_cached,
    BlockCopied: _block_copied,
    BlockEvicted: _block_evicted,
    BlockSwapped: _block_swapped,
    PrefixLookup: _prefix_lookup,
    TokenSampled: _token_sampled,
    RequestBranched: _request_branched,
    BeamsSelected: _beams_selected,
    BeamsFinished: _beams_finished,
    KnobChanged: _knob_changed,
    PoolResized: _pool_resized,
}
