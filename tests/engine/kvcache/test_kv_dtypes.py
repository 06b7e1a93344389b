"""The engine on a KV cache in few bits: close to full precision, and the same tokens however they are computed."""

import pytest
import torch

from engine import SamplingParams
from engine.events.types import EngineStarted, KnobChanged, PoolResized
from engine.kvcache.create import create_kv_cache
from engine.loading import make_kv_cache
from engine.runner import Runner, Scheduled
from tests.engine.engines import Checked, tiny_engine, tiny_parts

LOW = ("int8", "fp8", "int4")
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
SHARED = [(13 * j) % 200 + 5 for j in range(21)]
PROMPTS = [[(7 * i + 11 * j) % 250 + 3 for j in range(4 + 9 * i)] for i in range(4)] + [[*SHARED, 7], [*SHARED, 9, 8]]


def answers(params: SamplingParams = GREEDY, **config) -> list[list[list[int]]]:
    """The tokens of each output of each prompt, with everything checked after every step."""
    engine = tiny_engine(**config)
    checked = Checked(engine)
    ids = [engine.add_request(p, params) for p in PROMPTS]
    done = checked.run()
    assert engine.pool.num_used == 0
    if config["kv_cache_dtype"] == "int4":
        engine.kv.tail.check_integrity()
    if "num_kv_blocks" in config:
        assert any(type(e).__name__ == "RequestPreempted" for e in checked.events)
    return [[o.token_ids for o in done[i].outputs] for i in ids]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[list[int]]]]:
    """One at a time, prompts whole, nothing shared."""
    return {dt: answers(kv_cache_dtype=dt, max_num_seqs=1, enable_prefix_caching=False) for dt in LOW}


@pytest.mark.parametrize("kv_dtype", LOW)
@pytest.mark.parametrize("config", [
    {}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 33, "block_size": 4}, {"num_kv_blocks": 18},
    {"speculative": {"method": "ngram", "num_speculative_tokens": 6}, "max_num_seqs": 3},
    {"speculative": {"method": "lookahead"}}, {"speculative": {"method": "layer_skip", "trained_exit": False}},
], ids=["batch and prefixes", "chunks", "longer chunks", "preempted", "ngram", "trees", "drafts in the target's own pool"])  # fmt: skip
def test_equal_tokens_however_they_are_computed(alone, kv_dtype, config):
    assert answers(kv_cache_dtype=kv_dtype, **config) == alone[kv_dtype]


@pytest.mark.parametrize("kv_dtype", LOW)
def test_siblings_and_beams_copy_what_they_write(kv_dtype):
    for params in (
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, ignore_eos=True),
        SamplingParams(beam_width=3, n=3, max_tokens=9, ignore_eos=True),
    ):
        wide = answers(params, kv_cache_dtype=kv_dtype, max_num_seqs=8)
        assert wide == answers(
            params, kv_cache_dtype=kv_dtype, max_num_seqs=3, max_num_batched_tokens=9, enable_prefix_caching=False
        )
        assert len({tuple(tokens) for tokens in wide[0]}) == 3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_close_to_those_of_full_precision(family):
    parts, _ = tiny_parts(family)

    class Request:
        request_id = "r"
        token_ids = PROMPTS[3] + PROMPTS[2]
        block_ids = list(range(12))[::-1]

    off = {}
    for kv_dtype in ("auto", *LOW):
        runner = Runner(parts.model, create_kv_cache(kv_dtype, parts.model_config, 12, 8, "cpu", torch.float32))
        runner.run([Scheduled(Request, 0, 30, False)])
        off[kv_dtype] = torch.stack([runner.run([Scheduled(Request, i, 1, True)])[0] for i in range(30, len(Request.token_ids))])
    truth = off.pop("auto")
    off = {name: float((logits - truth).norm() / truth.norm()) for name, logits in off.items()}
    # Root mean square of the rounding error of normal numbers: about 0.4% (a step of absmax / 127), 3% (three bits of mantissa) and
    # 5% (a step of a block's range / 15). The logits' errors stand to each other as these do.
    assert 0 < off["int8"] < 0.03 and 3 < off["fp8"] / off["int8"] < 10 and 6 < off["int4"] / off["int8"] < 20, off


def test_bytes_are_told_and_the_arithmetic_follows():
    plain, low = tiny_engine(), tiny_engine(kv_cache_dtype="int8")
    seen = []
    for engine in (plain, low):
        started = engine.started_event()
        assert isinstance(started, EngineStarted)
        assert started.kv_bytes_per_block * 64 == started.kv_pool_bytes == engine.kv.nbytes
        with engine.record() as log:
            engine.generate([PROMPTS[0]], GREEDY)
        seen.append(next(e for e in log if type(e).__name__ == "StepDone").kv_write_bytes / started.kv_bytes_per_block)
    head = plain.model_config.head_dim
    assert low.kv.bytes_per_block * 4 * head == plain.kv.bytes_per_block * (head + 2) and seen[0] == pytest.approx(seen[1])


def test_another_kv_dtype_waits_until_the_running_have_finished():
    engine = tiny_engine()
    checked = Checked(engine)
    first = engine.add_request(PROMPTS[4], GREEDY)
    checked.step()
    engine.reconfigure(kv_cache_dtype="int8", by="me")
    second = engine.add_request(PROMPTS[5], GREEDY)
    checked.step()
    assert engine.config.kv_cache_dtype == engine.kv.kv_dtype == "auto" and checked.state.draining == {"kv_cache_dtype": "int8"}
    done = checked.run()
    assert engine.config.kv_cache_dtype == engine.kv.kv_dtype == "int8" and not checked.state.draining
    assert checked.state.knobs["kv_cache_dtype"] == "int8"
    plain, low = tiny_engine(), tiny_engine(kv_cache_dtype="int8")
    assert done[first].token_ids == plain.generate([PROMPTS[4]], GREEDY)[0].token_ids
    assert done[second].token_ids == low.generate([PROMPTS[5]], GREEDY)[0].token_ids
    assert done[second].num_cached_tokens == 0  # what the old pool had cached is of another form
    (resized,) = [e for e in checked.events if isinstance(e, PoolResized)]
    assert (resized.kv_bytes_per_block, resized.kv_pool_bytes) == (engine.kv.bytes_per_block, engine.kv.nbytes)
    told = [(e.old, e.new, e.draining) for e in checked.events if isinstance(e, KnobChanged)]
    assert told == [("auto", "int8", True), ("auto", "int8", False)]
    for wrong in ("int3", None, 8):
        with pytest.raises(ValueError, match="kv_cache_dtype must be one of"):
            engine.reconfigure(kv_cache_dtype=wrong)
    engine.reconfigure(kv_cache_dtype="int4", block_size=8)  # nothing runs: at once
    assert engine.kv.kv_dtype == "int4" and engine.kv.block_size == 8


@pytest.mark.parametrize("kv_dtype", LOW)
def test_the_cache_is_timed_as_it_is(kv_dtype):
    engine = tiny_engine(kv_cache_dtype=kv_dtype)
    with_ms, without_ms = engine.measure_cache([30, 7, 30, 1, 64])
    assert len(with_ms) == len(without_ms) == 5 and min(with_ms) > 0


def test_the_tail_begins_as_large_as_the_batch_asks():
    engine = tiny_engine(kv_cache_dtype="int4", max_num_seqs=3)
    assert engine.kv.tail.num_places == 6
    assert make_kv_cache(engine.parts, engine.config.changed(num_kv_blocks=2)).tail.num_places == 2
