"""The arithmetic of the KV cache, against figures that were published or allocated."""

import pytest
import torch

from engine.hardware.flops import forward_flops, linear_parameters
from engine.hardware.memory import KvShape, blocks_for, contiguous_slots, human_bytes, pool_bytes, utilisation

SMOLLM2 = {
    "num_layers": 30, "num_attention_heads": 9, "num_kv_heads": 3, "head_dim": 64,
    "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152,
}  # fmt: skip


def test_a_7b_model_with_mha_needs_512_kib_a_token_and_48_gib_for_100k():
    llama = KvShape(num_layers=32, num_attention_heads=32, num_kv_heads=32, head_dim=128, bytes_per_element=2)
    assert llama.bytes_per_token == 512 * 1024
    assert llama.bytes_per_token * 100_000 / 2**30 == pytest.approx(48.8, abs=0.05)
    assert llama.attention_name == "MHA"


def test_the_default_model():
    shape = KvShape.from_facts(SMOLLM2, "bfloat16")
    assert shape.bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23040
    assert shape.mha.bytes_per_token == 3 * shape.bytes_per_token
    assert shape.mqa.bytes_per_token * 3 == shape.bytes_per_token
    assert (shape.attention_name, shape.mha.attention_name, shape.mqa.attention_name) == ("GQA", "MHA", "MQA")
    assert KvShape.from_facts(SMOLLM2, "float32").bytes_per_token == 2 * shape.bytes_per_token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pool_bytes_are_those_of_tensors(dtype):
    shape = KvShape.from_facts(SMOLLM2, dtype)
    kv = [torch.empty(2, 7, 16, 3, 64, dtype=getattr(torch, dtype), device="meta") for _ in range(30)]
    assert pool_bytes(shape, 7, 16) == sum(t.numel() * t.element_size() for t in kv)


def test_blocks_and_reservation():
    assert [blocks_for(n, 16) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]
    assert blocks_for(5, 1) == 5
    assert contiguous_slots(3, 2048) == 6144
    assert utilisation(10, 40) == 0.25
    assert utilisation(0, 0) is None


def test_bad_input_says_what_was_got():
    with pytest.raises(ValueError, match="num_kv_heads must divide"):
        KvShape(num_layers=1, num_attention_heads=9, num_kv_heads=2, head_dim=64, bytes_per_element=2)
    with pytest.raises(ValueError, match="head_dim must be an integer >= 1, got 0"):
        KvShape(num_layers=1, num_attention_heads=9, num_kv_heads=3, head_dim=0, bytes_per_element=2)
    with pytest.raises(ValueError, match="dtype must be one of"):
        KvShape.from_facts(SMOLLM2, "int8")
    with pytest.raises(ValueError, match="lack num_layers"):
        KvShape.from_facts({"num_attention_heads": 1, "num_kv_heads": 1, "head_dim": 1}, "float32")
    for bad in (
        lambda: blocks_for(-1, 16),
        lambda: blocks_for(1, 0),
        lambda: contiguous_slots(1, 0),
        lambda: contiguous_slots(-1, 1),
    ):
        with pytest.raises(ValueError, match="must be"):
            bad()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (23040, "22.5 KiB"),
        (23040 * 100_000, "2.15 GiB"),
        (512 * 1024, "512 KiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_human_bytes(num_bytes, text):
    assert human_bytes(num_bytes) == text


def test_linear_parameters_are_the_checkpoints():
    # SmolLM2-135M: 134,515,008 parameters, of which the tied embedding 49152 x 576 and 61 norm vectors of 576.
    assert linear_parameters(SMOLLM2) * 30 == 134_515_008 - 49152 * 576 - 61 * 576


def test_flops_with_and_without_a_cache():
    t = 200
    with_cache = forward_flops(SMOLLM2, start=t - 1, num_tokens=1)
    without = forward_flops(SMOLLM2, start=0, num_tokens=t)
    assert without.linear == t * with_cache.linear
    assert without.head == with_cache.head
    # Token by token with the cache does the same attention as all at once without.
    assert without.attention == sum(forward_flops(SMOLLM2, start=i, num_tokens=1).attention for i in range(t))
    assert with_cache.attention == 4 * t * 9 * 64 * 30
    # At a moderate length the linear layers are where the time goes.
    assert without.linear > 10 * without.attention


def test_flops_of_a_chunk_split_anywhere():
    whole = forward_flops(SMOLLM2, start=5, num_tokens=30)
    parts = [forward_flops(SMOLLM2, start=5, num_tokens=11), forward_flops(SMOLLM2, start=16, num_tokens=19)]
    assert whole.linear == sum(p.linear for p in parts)
    assert whole.attention == sum(p.attention for p in parts)
    with pytest.raises(ValueError, match="num_tokens >= 1"):
        forward_flops(SMOLLM2, start=0, num_tokens=0)
    with pytest.raises(ValueError, match="lack hidden_size, intermediate_size"):
        forward_flops({"num_layers": 2}, start=0, num_tokens=1)
