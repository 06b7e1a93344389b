"""The default model in float32 against what transformers gave for it (tests/data/greedy_float32.json)."""

import json
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.kvcache.layout import KVCache
from engine.loading import Parts, load_parts
from engine.request import Request
from engine.runner import Runner, Scheduled
from tests.engine.equal_tokens import assert_equal_tokens

pytestmark = [pytest.mark.model, pytest.mark.slow]
CASES = json.loads((Path(__file__).parents[1] / "data" / "greedy_float32.json").read_text())["cases"]


@pytest.fixture(scope="module")
def parts(model_path: Path) -> Parts:
    return load_parts(EngineConfig(model=str(model_path), dtype="float32"))


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        {"max_num_seqs": 4, "max_num_batched_tokens": 17, "block_size": 16},
        {"max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 8, "num_kv_blocks": 50},  # preempts
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


def test_compiled_for_one_request_it_is_as_exact(parts, model_path):
    """In bfloat16 two ways of rounding differ by a tenth of a logit. Neither may be further from float32 than the other."""
    half = load_parts(EngineConfig(model=str(model_path), dtype="bfloat16", device="cpu"))
    compiled = half.model.single_row
    if compiled is None or not compiled.wait(300):
        pytest.skip(f"not compiled here: {half.device_facts['single_row']}")
    exact = _one_by_one(parts, torch.float32)
    errors = []
    for half.model.single_row in (compiled, None):
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
