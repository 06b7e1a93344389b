"""Counted operations and bytes against counting one by one."""

from types import SimpleNamespace

import pytest

from engine.hardware.cost import CostFacts, keys_seen, query_key_pairs, step_cost
from engine.hardware.flops import forward_flops
from engine.model.config import ModelConfig

RAW = {
    "model_type": "mistral", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": None,
}  # fmt: skip


def facts(dtype: str = "float32", **changes: object) -> tuple[dict, CostFacts]:
    model = ModelConfig.from_hf({**RAW, **changes}, "test").facts()
    return model, CostFacts.from_facts(model, dtype)


def run(start: int, num_tokens: int, sampled: bool = True, num_drafts: int = 0) -> SimpleNamespace:
    return SimpleNamespace(start=start, num_tokens=num_tokens, sampled=sampled, num_drafts=num_drafts)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 9), (3, 1), (3, 5), (20, 7), (4, 4)])
def test_pairs_and_keys_by_enumeration(start, n, window):
    seen = [set(range(0 if window is None else max(0, p + 1 - window), p + 1)) for p in range(start, start + n)]
    assert query_key_pairs(start, n, window) == sum(map(len, seen))
    assert keys_seen(start, n, window) == len(set().union(*seen))


@pytest.mark.parametrize("window", [None, 6])
def test_agrees_with_the_formula_for_one_request(window):
    model, cost = facts(sliding_window=window)
    for start, n in ((0, 1), (0, 30), (17, 1), (17, 5)):
        assert step_cost(cost, [run(start, n)]).flops == forward_flops(model, start=start, num_tokens=n).total


def test_a_mixed_step():
    model, cost = facts("bfloat16")
    got = step_cost(cost, [run(10, 1), run(0, 5, sampled=False), run(3, 4)])
    linear = 24 * 24 + 2 * 24 * 8 + 24 * 24 + 3 * 24 * 40  # weights of a layer's projections
    pairs = 11 + 15 + (4 + 5 + 6 + 7)
    assert got.flops == 2 * 3 * linear * 10 + 2 * 2 * 50 * 24 + 3 * pairs * 4 * 24
    assert got.kv_write_bytes == 10 * 3 * 2 * 8 * 2
    assert got.kv_read_bytes == (11 + 5 + 7) * 3 * 2 * 8 * 2
    # Every stored weight once, but of the embedding table (not tied here) only the ten rows.
    assert got.weight_bytes == 2 * (model["num_parameters"] - 50 * 24 + 10 * 24)


def test_weights_are_read_once_whatever_the_batch_and_the_head_only_to_sample():
    _, cost = facts(tie_word_embeddings=True)
    one, many = (step_cost(cost, [run(5, 1)] * count) for count in (1, 9))
    assert many.weight_bytes - one.weight_bytes == 8 * 24 * 4
    silent = step_cost(cost, [run(5, 1, sampled=False)])
    assert one.weight_bytes - silent.weight_bytes == 50 * 24 * 4
    assert one.flops - silent.flops == 2 * 50 * 24
    plain, draft = step_cost(cost, [run(5, 4)]), step_cost(cost, [run(5, 4, num_drafts=3)])  # the head for each of them
    assert draft.flops - plain.flops == 3 * 2 * 50 * 24
    assert step_cost(cost, []).flops == step_cost(cost, []).weight_bytes == 0


def test_sliding_windows_bound_what_is_read():
    _, cost = facts(sliding_window=4)
    assert step_cost(cost, [run(100, 1)]).kv_read_bytes == 4 * 3 * 2 * 8 * 4


def test_the_cache_may_have_its_own_dtype():
    model, _ = facts()
    narrow = CostFacts.from_facts(model, "float32", "bfloat16")
    assert step_cost(narrow, [run(0, 1)]).kv_write_bytes == 3 * 2 * 8 * 2
    with pytest.raises(ValueError, match="dtype must be one of"):
        CostFacts.from_facts(model, "int7")
