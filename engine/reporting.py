"""What the engine tells about itself: the events that describe a whole step, a request, or everything."""

import time
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.config import DRAINING_KNOBS, LIVE_KNOBS, WEIGHT_KNOBS
from engine.events.batching import PrefixTree
from engine.events.recorder import Recorder
from engine.events.types import EngineStarted, RequestAdded, RequestState, Run, Snapshot, StepDone
from engine.hardware.cost import step_cost
from engine.knobs import plain
from engine.kvcache.tree import prefix_tree
from engine.request import Request
from engine.scheduler import Schedule

if TYPE_CHECKING:
    from engine.engine import Engine


def started(engine: "Engine") -> EngineStarted:
    return EngineStarted(
        step=engine.recorder.step, time_ns=time.monotonic_ns(), config=engine.config.as_dict(), model=engine.parts.model_facts,
        device=engine.parts.device_facts, versions=engine.parts.versions, kv_bytes_per_block=engine.kv.bytes_per_block,
        kv_pool_bytes=engine.kv.nbytes,
    )  # fmt: skip


def snapshot(engine: "Engine") -> Snapshot:
    pool, scheduler = engine.pool, engine.scheduler
    return Snapshot(
        step=engine.recorder.step, time_ns=time.monotonic_ns(), num_blocks=pool.num_blocks, block_size=pool.block_size,
        ref_counts=list(pool.ref_counts), cached=pool.index.hashes(), lru=pool.lru_order(),
        requests=[_request_state(r) for r in (*scheduler.running, *scheduler.waiting, *scheduler.batcher.ended)],
        knobs={name: plain(getattr(engine.config, name)) for name in LIVE_KNOBS + DRAINING_KNOBS + WEIGHT_KNOBS},
    )  # fmt: skip


def record_prefix_tree(engine: "Engine", num_nodes: int, num_tokens: int) -> PrefixTree:
    for name, value, most in (("num_nodes", num_nodes, 10_000), ("num_tokens", num_tokens, 1024)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"{name} must be an integer in [1, {most}], got {value!r}")
    pool, scheduler = engine.pool, engine.scheduler
    tables = {r.request_id: r.block_ids for r in (*scheduler.running, *scheduler.batcher.ended)}
    nodes, count = prefix_tree(pool.index, tables, engine.tokenizer.decode, num_nodes=num_nodes, num_tokens=num_tokens)
    event = PrefixTree(
        step=engine.recorder.step, time_ns=time.monotonic_ns(), index=pool.index.name, enabled=scheduler.enable_prefix_caching,
        block_size=pool.block_size, num_blocks=pool.num_blocks, num_cached_blocks=len(pool.index),
        num_evictable_blocks=pool.num_cached_free, num_nodes=count, nodes=nodes, num_lookups=scheduler.num_lookups,
        num_asked_tokens=scheduler.num_asked_tokens, num_hit_tokens=scheduler.num_hit_tokens,
    )  # fmt: skip
    if engine.recorder.on:
        fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in ("step", "time_ns")}
        engine.recorder.emit(PrefixTree, **fields)
    return event


def record_added(recorder: Recorder, request: Request) -> None:
    if recorder.on:
        recorder.emit(
            RequestAdded, request_id=request.request_id, owner=request.owner, prompt_token_ids=request.prompt_token_ids,
            prompt_text=request.prompt_text, sampling=sampling_facts(request), parent_id=request.parent_id,
            sample_index=request.sample_index, cache_salt=request.cache_salt, priority=request.priority,
        )  # fmt: skip


def record_step(engine: "Engine", schedule: Schedule, times: tuple[float, ...]) -> None:
    """``times`` (perf_counter, seconds): start, scheduled, drafted, forward pass done, sampled, committed."""
    recorder, pool, scheduler = engine.recorder, engine.pool, engine.scheduler
    runs = [_run(r) for r in (*schedule.runs, *schedule.padding)]
    token_layers = engine.model_config.num_layers * pool.block_size
    cost = step_cost(engine.parts.cost_facts.with_kv_layer_bytes(engine.kv.bytes_per_block / token_layers), runs)
    ms = [1e3 * (b - a) for a, b in pairwise(times)]
    record_ns, recorder.record_ns = recorder.record_ns, 0
    recorder.emit(
        StepDone, runs=runs, num_waiting=len(scheduler.waiting), num_running=len(scheduler.running),
        token_budget=scheduler.max_num_batched_tokens, max_num_seqs=scheduler.max_num_seqs, used_blocks=pool.num_used,
        cached_free_blocks=pool.num_cached_free, schedule_ms=ms[0], draft_ms=ms[1], forward_ms=ms[2], sample_ms=ms[3], commit_ms=ms[4],
        step_ms=sum(ms), record_ms=record_ns / 1e6, flops=cost.flops, weight_bytes=cost.weight_bytes,
        kv_read_bytes=cost.kv_read_bytes, kv_write_bytes=cost.kv_write_bytes,
    )  # fmt: skip


def _run(run: Any) -> Run:
    drafts = 0 if run.draft is None else len(run.draft)
    return Run(run.request.request_id, _phase(run), run.start, run.num_tokens, run.sample, drafts, len(run.accepted))


def _phase(run: Any) -> str:
    if run.is_padding:
        return "padding"
    one = run.num_tokens == 1 or run.draft is not None
    return "decode" if one and run.start >= run.request.num_prompt_tokens else "prefill"


def sampling_facts(request: Request) -> dict[str, Any]:
    """The request's sampling parameters in plain values, with the seed it really has."""
    facts = asdict(request.params)
    return {**facts, "seed": request.seed, "stop": list(facts["stop"]), "stop_token_ids": list(facts["stop_token_ids"])}


def _request_state(request: Request) -> RequestState:
    return RequestState(
        request_id=request.request_id, owner=request.owner, status=request.status, prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids, prompt_text=request.prompt_text, output_text=request.stream.text,
        sampling=sampling_facts(request), num_computed_tokens=request.num_computed_tokens, block_ids=list(request.block_ids),
        num_cached_tokens=request.num_cached_tokens, parent_id=request.parent_id, sample_index=request.sample_index,
        arrived_ns=request.arrived_ns, branched_from=request.branched_from, branched_at=request.branched_at,
        num_swapped_tokens=request.num_swapped_tokens,
    )  # fmt: skip
