"""One attention call of the running engine as our kernel does it: what is told of it, against arithmetic of its own."""

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import launches, study, traced
from engine.attention.base import Span, tree_rows
from engine.attention.tap import Choice, Tap
from engine.attention.torch import TorchAttention
from engine.engine import Engine
from engine.events.attention import AttentionTraced, records_of, row_scores_of
from engine.events.codec import decode_chunk, encode_chunks
from engine.events.quantization import QuantizationProgress
from engine.kernels.lazy import triton_version
from engine.kernels.tracing import PROGRAM, TILE
from engine.request import SamplingParams
from tests.gpu.models import engine_config, random_parts

needs_triton = pytest.mark.skipif(triton_version() is None, reason="no Triton")
PROMPT = [7 * i % 290 + 3 for i in range(40)]


def made(shape: str = "tiny", **options: Any) -> tuple[Engine, list[Any]]:
    parts = random_parts(shape, "cpu", "float32", "torch")
    engine = Engine(engine_config(device="cpu", dtype="float32", **options), parts=parts)
    events: list[Any] = []
    engine.recorder.attach(events.append)
    return engine, events


def add(engine: Engine, prompt: list[int], **options: Any) -> str:
    return engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), **options)


@pytest.fixture(scope="module")
def mixed() -> tuple[Engine, list[AttentionTraced]]:
    """A step of a decode over an int8 cache and a prompt's second chunk, traced while the engine goes on."""
    engine, events = made(kv_cache_dtype="int8", max_num_batched_tokens=24, block_size=4)
    add(engine, PROMPT[20:29], request_id="short")
    engine.step()
    add(engine, PROMPT, request_id="long")
    engine.step()
    engine.trace_attention(1, request_id="long", row=3, head=2, num_splits=2, block_n=16, block_m=16, trace_id="t", wait=False)
    engine.step()
    assert isinstance(engine.runner.attention, Tap)
    while engine.has_unfinished() or engine.busy_beside_steps:
        engine.step() if engine.has_unfinished() else engine.poll()
        time.sleep(0.01)
    return engine, [e for e in events if isinstance(e, AttentionTraced)]


@needs_triton
def test_both_launches_of_the_step(mixed: Any) -> None:
    engine, (decode_, chunk) = mixed
    assert isinstance(engine.runner.attention, TorchAttention)  # nobody listens any more
    assert (decode_.kernel, chunk.kernel) == ("paged_decode", "flash_attention")
    assert [e.trace_id for e in (decode_, chunk)] == ["t", "t"] and decode_.step == chunk.step
    assert [(r.request_id, r.q_len, r.kv_len) for r in chunk.requests] == [("long", 17, 40)]
    assert [(r.request_id, r.q_len, r.kv_len, len(r.block_ids)) for r in decode_.requests] == [("short", 1, 11, 3)]
    assert (decode_.kv_dtype, chunk.kv_dtype, decode_.num_splits) == ("int8", "auto", 2)
    assert len(set(chunk.requests[0].block_ids)) == 10 and max(chunk.requests[0].block_ids) < chunk.num_blocks
    assert (chunk.row, chunk.row_head, chunk.where) == (3, 2, "interpreter")


@needs_triton
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_told_adds_up(mixed: Any, which: int) -> None:
    event = mixed[1][which]
    records = records_of(event)
    tile, program = records["kind"] == TILE, records["kind"] == PROGRAM
    assert event.num_records == len(tile) == tile.sum() + program.sum() and not event.dropped
    assert (event.bytes_loaded, event.bytes_stored) == (event.formula_loaded, event.formula_stored)
    assert event.max_error < 1e-5 * max(event.max_output, 1) and event.max_difference < 2e-5
    assert event.standard_loaded > event.bytes_loaded or which == 0
    # The chosen row, tile after tile, by the textbook's softmax of its scores.
    scores = row_scores_of(event).astype(np.float64)
    assert len(scores) == event.requests[event.row_request].kv_len
    seen = scores[np.isfinite(scores)]
    assert event.row_max == pytest.approx(seen.max()) and event.row_sum == pytest.approx(np.exp(seen - seen.max()).sum())
    assert event.row_lse == pytest.approx(event.row_max + math.log(event.row_sum), abs=1e-5)
    out, want = np.frombuffer(event.row_output, "<f4"), np.frombuffer(event.row_expected, "<f4")
    assert out.shape == want.shape == (64,) and np.abs(out - want).max() < 1e-5
    if which == 0:  # of a decode all heads of a group are rows of a tile
        assert set(records["program_y"]) == {0, 1} and set(records["program_x"]) == {0, 1}
        chosen = tile & (records["program_y"] == event.row_head // 2)
    else:
        q_tile = event.row // event.block_m * event.block_m
        chosen = tile & (records["program_y"] == event.row_head) & (records["q_start"] == q_tile)
    parts = {}
    for i in np.flatnonzero(chosen):
        part = records["program_x"][i] if which == 0 else 0
        parts.setdefault(part, []).append(i)
    total = 0.0
    for indices in parts.values():
        keys: list[int] = []
        for i in indices:
            keys += range(records["kv_start"][i], records["kv_start"][i] + records["kv_rows"][i])
            some = scores[keys]
            assert records["running_max"][i] == pytest.approx(some.max(), abs=1e-5)
            assert records["running_sum"][i] == pytest.approx(np.exp(some - some.max()).sum(), rel=1e-5)
        last = indices[-1]
        total += records["running_sum"][last] * math.exp(records["running_max"][last] - event.row_max)
    assert total == pytest.approx(event.row_sum, rel=1e-5)


@needs_triton
def test_the_event_survives_a_file(mixed: Any) -> None:
    for event in mixed[1]:
        (back,) = (e for chunk in encode_chunks([event]) for e in decode_chunk(chunk))
        assert repr(back) == repr(event)  # NaN among them


@needs_triton
def test_waiting_steps_the_engine_and_keeps_what_it_gave() -> None:
    engine, _ = made()
    add(engine, PROMPT[:6])
    event = engine.trace_attention(0, capacity=1)
    # A tile and a program's end for each KV head: the buffer is full after the first.
    assert (event.num_records, event.dropped) == (1, 2 * event.num_kv_heads - 1)
    tokens = [t for output in engine.step() for t in output.new_token_ids]
    assert len(tokens) == 2  # that of the traced step, and the next


@needs_triton
def test_what_cannot_be_traced_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = made()
    with pytest.raises(ValueError, match="nothing runs that could be traced"):
        engine.trace_attention(0)
    assert isinstance(engine.runner.attention, TorchAttention)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"layer": 2}, r"layer must be an integer in \[0, 1\], got 2"),
        ({"layer": 0, "head": 4}, r"head must be an integer in \[0, 3\]"),
        ({"layer": 0, "block_m": 48}, "block_m must be a power of two"),
        ({"layer": 0, "block_n": 512}, "block_n must be a power of two"),
        ({"layer": 0, "num_splits": 0}, "num_splits must be an integer"),
        ({"layer": 0, "capacity": 0}, "capacity must be an integer"),
        ({"layer": 0, "request_id": 3}, "request_id must be text"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.trace_attention(**options)
    monkeypatch.setattr(study, "triton_version", lambda: None)
    with pytest.raises(ValueError, match="attention cannot be traced: the kernels need Triton"):
        engine.trace_attention(0)
    int4, _ = made(kv_cache_dtype="int4")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no kernel reads it"):
        int4.trace_attention(0)
    # A failure in the child is told, and the engine goes on.
    monkeypatch.setattr(
        study, "run_apart", lambda job, cancelled: traced.run_apart(job, cancelled, ["-c", "raise SystemExit('no')"])
    )
    monkeypatch.setattr("traceback.print_exception", lambda error: None)
    add(engine, PROMPT[:5])
    engine.trace_attention(0, wait=False)
    engine.step()
    while engine.busy_beside_steps:
        engine.poll()
    (progress,) = [e for e in events if isinstance(e, QuantizationProgress)]
    assert progress.doing == "failed: tracing failed in its process: no"


def test_a_new_pool_is_listened_to_and_a_cancelled_trace_is_not() -> None:
    engine, _ = made()
    if triton_version() is None:
        pytest.skip("no Triton")
    engine.trace_attention(0, wait=False)
    engine.reconfigure(block_size=8)
    assert isinstance(engine.runner.attention, Tap) and engine.runner.attention.block_size == 8
    engine.cancel_quantization()
    assert isinstance(engine.runner.attention, TorchAttention)
    add(engine, PROMPT[:3])
    engine.step()
    assert not engine.busy_beside_steps


@needs_triton
def test_a_tree_of_drafts_in_a_child() -> None:
    torch.manual_seed(0)
    seen, depth = tree_rows([-1, 0, 0, -1])
    slots = np.arange(3, 25)
    span = Span(0, 17, 5, slots, seen, 17 + depth, draft=True, request_id="r")
    config = random_parts("tiny-window").model_config  # window 9
    backend = TorchAttention(config)
    kv = torch.randn(2, 32, 1, 2, 2, 64)
    qkv = torch.randn(5, 8, 64)
    qkv[:, 4:] = kv[0].view(32, 4, 64)[17 + 3 : 25]
    tap = Tap(backend, Choice(0, row=2, head=3), 1, 32, "auto")
    out = tap.run(tap.plan([span], kv, torch.float32), 0, qkv, qkv, kv[0].view(32, 4, 64))
    assert tap.taken is not None
    (taken,) = tap.taken
    fields = traced.run_apart(taken.job)
    assert fields is not None and fields["max_difference"] < 1e-5 and fields["max_error"] < 1e-5
    assert taken.fields["requests"][0].row_bits == launches.row_bits(span) == [1, 3, 7, 11, 17]
    scores = np.frombuffer(fields["row_scores"], "<f4")
    # Row 2 stands at 19: through the window of 9 it sees the keys from 11 on, of the tree its path alone.
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [*range(11, 17), 17, 18, 19]
    v = kv[0].view(32, 4, 64)[3:25, 3].double().numpy()
    weights = np.exp(scores.astype(np.float64) - scores.max())
    np.testing.assert_allclose((weights / weights.sum()) @ v, out.view(5, 4, 64)[2, 3].numpy(), atol=1e-5)


def test_what_is_left_out_for_the_bounds() -> None:
    config = random_parts("tiny").model_config
    tap = Tap(TorchAttention(config), Choice(0, request_id="b"), 1, 6000, "auto")
    kv = torch.zeros(2, 6000, 1, 2, 2, 64)
    ends = {"a": 2500, "b": 900, "c": 2200}
    spans, row, first = [], 0, 0
    for name, end in ends.items():
        spans.append(Span(row, 0, end, np.arange(first, first + end), request_id=name))
        row, first = row + end, first + end
    qkv = torch.zeros(row, 8, 64)
    tap.run(tap.plan(spans, kv, torch.float32), 0, qkv, qkv, kv[0].view(6000, 4, 64))
    assert tap.taken is not None
    fields = tap.taken[0].fields
    assert fields["traced_kv_heads"] == 1 and "b" in [r.request_id for r in fields["requests"]]
    assert fields["requests_left_out"] == 3 - len(fields["requests"]) > 0
    longest = [Span(0, 0, 6000, np.arange(6000), request_id="a")]
    tap = Tap(TorchAttention(config), Choice(0, block_m=16, block_n=16), 1, 6000, "auto")
    qkv = torch.zeros(6000, 8, 64)
    tap.run(tap.plan(longest, kv, torch.float32), 0, qkv, qkv, kv[0].view(6000, 4, 64))
    assert tap.error is not None and "the interpreter takes at most 12,000" in str(tap.error)
