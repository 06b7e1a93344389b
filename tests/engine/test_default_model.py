"""The default model in float32 against what transformers gave for it (tests/data/greedy_float32.json, beams_float32.json)."""

import json
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.events.types import RequestPreempted, TokenSampled
from engine.kvcache.layout import KVCache
from engine.loading import Parts, load_parts
from engine.request import Request
from engine.runner import Runner, Scheduled
from engine.sampling.processors import TRANSFORMERS_ORDER, TokenCounts, process
from tests.engine.equal_tokens import assert_equal_tokens

pytestmark = [pytest.mark.model, pytest.mark.slow]
DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "greedy_float32.json").read_text())["cases"]
BEAMS = json.loads((DATA / "beams_float32.json").read_text())["cases"]


@pytest.fixture(scope="module")
def parts(model_path: Path) -> Parts:
    return load_parts(EngineConfig(model=str(model_path), dtype="float32"))


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        pytest.param({"max_num_seqs": 4, "max_num_batched_tokens": 17, "block_size": 16}, marks=pytest.mark.long),
        pytest.param(
            {"max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 8, "num_kv_blocks": 50}, marks=pytest.mark.long
        ),  # preempts
    ],
    ids=["alone", "batch", "small chunks", "small pool"],
)
def test_greedy_tokens(parts, model_path, config):
    engine = Engine(EngineConfig(model=str(model_path), dtype="float32", **config), parts=parts)
    cases = CASES if engine.config.max_num_seqs > 1 else CASES[:2]
    params = SamplingParams(temperature=0, max_tokens=len(cases[0]["output_ids"]), ignore_eos=True)
    outputs = engine.generate([case["prompt"] for case in cases], params)
    for output, case in zip(outputs, cases, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert_equal_tokens(output.token_ids, case["output_ids"], case["margins"], case["prompt"][:40])
        assert output.text == engine.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    engine.check_integrity()


def test_chat_ends_with_eos_and_a_shared_system_prompt_is_found(parts, model_path):
    engine = Engine(EngineConfig(model=str(model_path), dtype="float32"), parts=parts)
    system = {"role": "system", "content": "You are a patient teacher who answers in one short sentence. " * 4}
    params = SamplingParams(temperature=0, max_tokens=48)
    first = engine.chat([system, {"role": "user", "content": "What is the capital of France?"}], params)
    second = engine.chat([system, {"role": "user", "content": "How many legs has a spider?"}], params)
    assert "Paris" in first.text
    assert first.finish_reason == "stop" and first.token_ids[-1] in engine.model_config.eos_token_ids
    assert "<|im_end|>" not in first.text
    assert first.num_cached_tokens == 0 and second.num_cached_tokens >= 48


@pytest.mark.long
def test_compiled_for_one_request_it_is_as_exact(parts, model_path):
    """In bfloat16 two ways of rounding differ by a tenth of a logit. Neither may be further from float32 than the other."""
    half = load_parts(EngineConfig(model=str(model_path), dtype="bfloat16", device="cpu"))
    compiled = half.model.compiled
    if compiled is None or not compiled.wait(300):
        pytest.skip(f"not compiled here: {half.device_facts['single_row']}")
    exact = _one_by_one(parts, torch.float32)
    errors = []
    for half.model.compiled in (compiled, None):
        errors.append((_one_by_one(half, torch.bfloat16) - exact).square().mean().sqrt().item())
    assert errors[0] != errors[1]  # it was used
    assert errors[0] < 1.1 * errors[1] < 0.2


def _one_by_one(parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Logits [output tokens, vocab_size] of the first case, its recorded output fed token by token."""
    request = Request("r", CASES[0]["prompt_ids"] + CASES[0]["output_ids"], SamplingParams(), 0)
    request.block_ids = list(range(-(-len(request.token_ids) // 16)))
    runner = Runner(parts.model, KVCache(parts.model_config, len(request.block_ids), 16, "cpu", dtype))
    start = len(CASES[0]["prompt_ids"])
    runner.run([Scheduled(request, 0, start, False)])
    return torch.cat([runner.run([Scheduled(request, i, 1, True)]) for i in range(start, len(request.token_ids))]).float()


@pytest.mark.parametrize(
    "config", [{}, {"num_kv_blocks": 60, "block_size": 4, "max_num_batched_tokens": 32}], ids=["roomy", "small pool"]
)
def test_beams(parts, model_path, config):
    """All searches at once: the sequences and scores of transformers, to 1e-4; in the small pool they preempt each other."""
    engine = Engine(EngineConfig(model=str(model_path), dtype="float32", max_num_seqs=12, **config), parts=parts)
    with engine.record() as log:
        for case in CASES[:2] if config else ():
            engine.add_request(case["prompt"], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        outputs = engine.generate(
            [case["prompt_ids"] for case in BEAMS], [SamplingParams(temperature=0, **case["params"]) for case in BEAMS]
        )
    for output, case in zip(outputs, BEAMS, strict=True):
        want = case["sequences"]
        penalty = case["params"].get("length_penalty", 1.0)
        # To 1e-4, and where a sum of tens of log-probabilities is large to 2e-5 of it: float32 logits of another CPU differ by so much.
        close = {"abs": 1e-4, "rel": 2e-5}
        assert [o.score for o in output.outputs] == pytest.approx([s["score"] for s in want], **close)
        sums = [s["score"] * len(s["token_ids"]) ** penalty for s in want]
        assert [o.cumulative_logprob for o in output.outputs] == pytest.approx(sums, **close)
        assert [o.token_ids for o in output.outputs] == [s["token_ids"] for s in want], case["prompt"]
    if config:
        preempted = {e.request_id for e in log.since(0).events if isinstance(e, RequestPreempted)}
        assert any("#" in name for name in preempted), "meant to preempt beams"
        while engine.has_unfinished():
            engine.step()
    engine.check_integrity()
    assert engine.pool.num_used == 0


def test_kept_tokens_are_those_of_the_processors_and_of_transformers(parts, model_path):
    """On real logits: what the engine kept is what its processors keep, and in transformers' order what transformers keeps."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    engine = Engine(EngineConfig(model=str(model_path), dtype="float32"), parts=parts)
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.92, min_p=0.03, repetition_penalty=1.15, seed=5, max_tokens=24, ignore_eos=True
    )
    logits: list[torch.Tensor] = []
    sample = engine.committer.sampler.sample
    engine.committer.sampler.sample = lambda x, rows, top: (logits.append(x.clone()), sample(x, rows, top))[1]  # type: ignore[method-assign]
    with engine.record() as log:
        engine.watch("tokens", top=50)
        output = engine.generate([CASES[0]["prompt"]], params)[0]
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.15), TemperatureLogitsWarper(0.9), TopKLogitsWarper(40),
                                 TopPLogitsWarper(0.92), MinPLogitsWarper(0.03)])  # fmt: skip
    events = [e for e in log.since(0).events if isinstance(e, TokenSampled)]
    assert len(events) == len(logits) == 24
    for i, (e, x) in enumerate(zip(events, logits, strict=True)):
        history = [*output.prompt_token_ids, *output.token_ids[:i]]
        counts = TokenCounts(output.prompt_token_ids, output.token_ids[:i])
        kept = {name: set(torch.nonzero(y[0] > -torch.inf).flatten().tolist()) for name, y in process(x, params, counts)}
        assert {c.token_id for c in e.top if not c.removed_by} <= kept["top_p"] and e.token_id in kept["top_p"]
        assert e.kept_sizes == [len(kept["min_p"]), len(kept["top_k"]), len(kept["top_p"])]
        *_, (_, theirs) = process(x, params, counts, TRANSFORMERS_ORDER)
        assert torch.equal(theirs > -torch.inf, chain(torch.tensor([history]), x) > -torch.inf)
