"""The memory planner against numbers worked out by hand and the published sizes of models."""

from dataclasses import replace
from typing import Any

import pytest

from engine.hardware.cost import CostFacts, step_cost
from engine.hardware.gpus import gpu
from engine.hardware.planner import Workload, _Run, decode_cost, kv_bytes_per_token, moved, plan, weight_bytes
from engine.hardware.rules import rules_of_thumb
from tests.engine.hardware.facts import LLAMA2_7B, LLAMA3_8B, SMOL


def test_published_parameter_counts() -> None:
    assert LLAMA2_7B["num_parameters"] == 6_738_415_616 and LLAMA3_8B["num_parameters"] == 8_030_261_248
    assert weight_bytes(LLAMA2_7B, Workload()) == 2 * 6_738_415_616


def test_kv_of_a_7b_multi_head_model_is_512_kib_a_token() -> None:
    assert kv_bytes_per_token(LLAMA2_7B, Workload()) == 512 * 1024
    assert kv_bytes_per_token(LLAMA3_8B, Workload()) == 128 * 1024  # a quarter: 8 KV heads of 32
    assert kv_bytes_per_token(LLAMA3_8B, Workload(tensor_parallel=2)) == 64 * 1024
    assert kv_bytes_per_token(LLAMA3_8B, Workload(tensor_parallel=16)) == 16 * 1024  # one KV head at least on each


def test_group_overhead() -> None:
    assert Workload(weight_bits=4, group_size=32).bits_per_weight == 5
    linear = 32 * (4096 * 4096 * 4 + 3 * 4096 * 11008)
    rest = 6_738_415_616 - linear
    assert weight_bytes(LLAMA2_7B, Workload(weight_bits=4, group_size=128)) == pytest.approx(linear * 4.25 / 8 + rest * 2)


def test_float32_is_twice_as_wide() -> None:
    half, whole = Workload(context=100), Workload(context=100, dtype="float32", weight_bits=32)
    assert weight_bytes(SMOL, whole) == 4 * SMOL["num_parameters"] == 2 * weight_bytes(SMOL, half)
    assert kv_bytes_per_token(SMOL, whole) == 2 * kv_bytes_per_token(SMOL, half) == 46_080
    twice, once = (plan(SMOL, gpu("l4"), work) for work in (whole, half))
    assert twice.activations.value == 2 * once.activations.value and twice.logits.value == once.logits.value
    few = Workload(dtype="float32", weight_bits=4, group_size=32)
    linear = 30 * (576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert weight_bytes(SMOL, few) == linear * 5 / 8 + 4 * (SMOL["num_parameters"] - linear)


@pytest.mark.parametrize("model", [LLAMA3_8B, SMOL])
@pytest.mark.parametrize("work", [Workload(batch=3), Workload(weight_bits=4, context=1000), Workload(kv_dtype="int8", batch=2)])
def test_the_largest_are_the_largest(model: dict[str, Any], work: Workload) -> None:
    found = plan(model, gpu("rtx4090"), work)
    batch, context = int(found.largest_batch.value), int(found.largest_context.value)
    assert batch >= 1 and context >= 1
    for just, above in (
        (replace(work, batch=batch), replace(work, batch=batch + 1)),
        (replace(work, context=context), replace(work, context=context + 1)),
    ):
        assert plan(model, gpu("rtx4090"), just).fits and not plan(model, gpu("rtx4090"), above).fits


def test_what_does_not_fit_has_no_batch() -> None:
    found = plan(LLAMA2_7B, gpu("l4"), Workload(context=60_000))
    assert not found.fits and found.largest_batch.value == 0 and found.largest_context.value > 10_000


def test_decode_cost_of_a_batch_is_that_of_its_runs() -> None:
    work = Workload(batch=7, context=333)
    assert decode_cost(SMOL, work) == step_cost(CostFacts.from_facts(SMOL, "bfloat16"), [_Run(332, 1)] * 7)


def test_times_and_what_binds() -> None:
    found = plan(LLAMA3_8B, gpu("h100-sxm"), Workload(batch=1, context=2048))
    assert found.decode.by == "memory" and found.prefill.by == "compute"
    step = decode_cost(LLAMA3_8B, Workload(batch=1, context=2048))
    assert found.per_token.value == pytest.approx(moved(step) / 3.35e12)
    halved = plan(LLAMA3_8B, gpu("h100-sxm"), Workload(batch=1, context=2048, tensor_parallel=2))
    assert halved.per_token.value == pytest.approx(found.per_token.value / 2)
    assert all(item.formula for item in (*found.parts, found.ttft, found.per_token, found.budget))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch": 0}, "batch must be"), ({"weight_bits": 3}, "weight_bits must be"), ({"dtype": "int8"}, "dtype must be"), ({"weight_bits": 32}, "at most the 16"),
     ({"prompt": 5000}, "prompt must be"), ({"memory_share": 0.0}, "memory_share must be")],
)  # fmt: skip
def test_bad_workloads(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**change)


def test_heads_that_cannot_be_shared_and_facts_that_lack() -> None:
    with pytest.raises(ValueError, match="divide the 9 query heads, got 2"):
        plan(SMOL, gpu("l4"), Workload(tensor_parallel=2))
    with pytest.raises(ValueError, match="lack"):
        plan({"hidden_size": 5}, gpu("l4"), Workload())


def test_rules_of_thumb_beside_the_count() -> None:
    rules = {rule.name: rule for rule in rules_of_thumb(LLAMA2_7B, Workload(batch=1, context=4096))}
    assert len(rules) == 6
    assert rules["Parameters"].rule_value == 12 * 32 * 4096**2 == 6_442_450_944
    assert rules["KV cache of a token"].ratio == 1  # multi-head: the rule holds
    assert rules_of_thumb(LLAMA3_8B, Workload())[3].ratio == 4
    prefill = rules["Operations of a prefill"]
    linear = 2 * 4095 * 32 * (4096 * 4096 * 4 + 3 * 4096 * 11008)
    assert prefill.right_value == pytest.approx(linear + 4 * 32 * 4096 * 4095 * 4096 / 2 + 2 * 32000 * 4096)
    short = {rule.name: rule for rule in rules_of_thumb(LLAMA2_7B, Workload(context=16))}
    assert short["Intensity of decode"].right_value == pytest.approx(1, rel=0.01)  # and not 2
