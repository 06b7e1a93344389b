"""A State in a form that a file can hold, so that a saved run can be entered anywhere without replaying what lies before."""

import zlib
from typing import Any

import msgspec

from engine.events.codec import MAX_CHUNK_BYTES, Chunk, decompress
from engine.events.columns import CodecError, Reader, StructColumn, Writer
from engine.events.reducer import MAX_TOKENS
from engine.events.state import ReqView, State
from engine.events.types import EngineStarted


class SavedState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that a State holds. ``requests`` in order of arrival; ``finished`` the ids of those that ended, oldest end first."""

    step: int
    time_ns: int
    num_blocks: int
    block_size: int
    ref_counts: list[int]  # [num_blocks]
    cached_blocks: list[int]
    cached_hashes: list[int]  # of cached_blocks
    lru: list[int]
    requests: list[ReqView]
    finished: list[str]
    knobs: dict[str, Any]
    draining: dict[str, Any]
    engine: EngineStarted | None


_COLUMN = StructColumn(SavedState)
SIGNATURE = _COLUMN.signature  # files carry it: keyframes of another layout are passed over, and the events replayed instead


def save_state(state: State) -> SavedState:
    return SavedState(
        step=state.step,
        time_ns=state.time_ns,
        num_blocks=state.num_blocks,
        block_size=state.block_size,
        ref_counts=state.ref_counts.tolist(),
        cached_blocks=list(state.cached),
        cached_hashes=list(state.cached.values()),
        lru=list(state.lru),
        requests=list(state.requests.values()),
        finished=list(state._finished),
        knobs=state.knobs,
        draining=state.draining,
        engine=state.engine,
    )


def restore_state(saved: SavedState) -> State:
    """The State that was saved. ValueError for one that no sequence of events could have led to."""
    state = State()
    state.engine = saved.engine
    state._new_pool(saved.num_blocks, saved.block_size)
    _check_pool(saved)
    state.ref_counts[:] = saved.ref_counts
    state.cached = dict(zip(saved.cached_blocks, saved.cached_hashes, strict=True))
    state.lru = dict.fromkeys(saved.lru)
    state.knobs, state.draining = saved.knobs, saved.draining
    state.requests = {view.request_id: view for view in saved.requests}
    ended = [view.request_id for view in saved.requests if view.status == "finished"]
    if len(state.requests) != len(saved.requests) or sorted(ended) != sorted(saved.finished):
        raise ValueError("a keyframe names a request twice, or other finished requests than it holds")
    sizes = {view.request_id: view.num_prompt_tokens + len(view.output_token_ids) for view in saved.requests}
    state._finished = {request_id: sizes[request_id] for request_id in saved.finished}
    state._hold(sum(sizes.values()))
    for view in saved.requests:
        for count in (view.num_output_tokens, view.num_computed_tokens):
            if not 0 <= count <= MAX_TOKENS:
                raise ValueError(f"a keyframe claims {count} tokens of one request, at most {MAX_TOKENS} are allowed")
    state._own = set(state.requests)
    state.step, state.time_ns = saved.step, saved.time_ns
    return state


def _check_pool(saved: SavedState) -> None:
    if len(saved.ref_counts) != saved.num_blocks or len(saved.cached_blocks) != len(saved.cached_hashes):
        raise ValueError(f"a keyframe of {saved.num_blocks} blocks has {len(saved.ref_counts)} reference counts")
    for what, blocks in (
        ("cached", saved.cached_blocks),
        ("evictable", saved.lru),
        *((view.request_id, view.block_ids) for view in saved.requests),
    ):
        if blocks and not (min(blocks) >= 0 and max(blocks) < saved.num_blocks):
            raise ValueError(f"a keyframe names a block ({what:.60}) outside of its pool of {saved.num_blocks}")
    if saved.ref_counts and not (min(saved.ref_counts) >= 0 and max(saved.ref_counts) < 1 << 31):
        raise ValueError("a keyframe has a reference count that does not fit 32 bits")


def encode_state(state: State) -> Chunk:
    """CodecError for a state that is larger than a chunk may be."""
    w = Writer()
    _COLUMN.write(w, [save_state(state)])
    raw = b"".join(w.parts)
    if len(raw) > MAX_CHUNK_BYTES:
        raise CodecError(f"a keyframe takes {len(raw)} bytes, at most {MAX_CHUNK_BYTES} are allowed")
    return Chunk(zlib.compress(raw, 1), len(raw), 0, state.step, state.step)


def decode_state(chunk: Chunk) -> State:
    """CodecError for anything that ``encode_state`` would not have written."""
    r = Reader(decompress(chunk.data, chunk.raw_size))
    try:
        (saved,) = _COLUMN.read(r, 1)
        if r.pos != len(r.data):
            raise ValueError(f"{len(r.data) - r.pos} bytes too many in a keyframe")
        state = restore_state(saved)
    except ValueError as error:
        raise CodecError(f"keyframe: {error}") from None
    if state.step != chunk.last_step:
        raise CodecError(f"a keyframe of step {state.step} where {chunk.last_step} was announced")
    return state


class StoredKeyframe:
    """A keyframe as a file holds it; decoded when it is needed. Stands where a ``Keyframe`` does."""

    __slots__ = ("chunk", "nbytes")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.nbytes = len(chunk.data)

    def state(self) -> State:
        return decode_state(self.chunk)
