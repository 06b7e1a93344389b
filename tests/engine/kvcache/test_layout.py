"""The tensors of the pool: bytes as allocated, slots, copies."""

import pytest
import torch

from engine.hardware.memory import KvShape, pool_bytes
from engine.kvcache.layout import KVCache, block_slots
from engine.model.config import ModelConfig

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 48, "intermediate_size": 8, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2,
    },
    "test",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (7, 16), (3, 1024)])
def test_bytes_are_those_of_the_tensors_and_of_the_formula(num_blocks, block_size, dtype):
    kv = KVCache(CONFIG, num_blocks, block_size, "cpu", dtype)
    assert kv.nbytes == kv.tensor.untyped_storage().nbytes() == sum(layer.nbytes for layer in kv.layers)
    assert kv.bytes_per_block * num_blocks == kv.nbytes
    assert KVCache.bytes_per_block_of(CONFIG, block_size, dtype) == kv.bytes_per_block
    shape = KvShape(num_layers=3, num_attention_heads=6, num_kv_heads=2, head_dim=8, bytes_per_element=dtype.itemsize)
    assert kv.nbytes == pool_bytes(shape, num_blocks, block_size)
    assert kv.num_slots == num_blocks * block_size


def test_slots_number_the_tokens_of_a_table():
    assert block_slots([2, 0, 5], 3).tolist() == [6, 7, 8, 0, 1, 2, 15, 16, 17]
    assert block_slots([], 3).tolist() == []
    assert block_slots([9], 1).tolist() == [9]


def test_a_slot_is_the_same_place_in_the_blocks():
    kv = KVCache(CONFIG, 4, 3, "cpu", torch.float32)
    kv.layers[1][2 * 3 + 1, :2] = 7.0  # block 2, offset 1, K of both heads
    kv.layers[1][2 * 3 + 1, 2:] = 9.0  # V
    assert (kv.tensor[1, 2, 1, 0] == 7).all()
    assert (kv.tensor[1, 2, 1, 1] == 9).all()
    assert kv.tensor.sum() == (7 + 9) * 2 * 8


def test_copies_and_fills_reach_all_layers_and_nothing_else():
    kv = KVCache(CONFIG, 6, 2, "cpu", torch.float32)
    kv.tensor.copy_(torch.randn_like(kv.tensor))
    before = kv.tensor.clone()
    kv.copy_blocks([0, 4], [4, 1])  # 4 is source and destination: read before it is written
    assert torch.equal(kv.tensor[:, 4], before[:, 0])
    assert torch.equal(kv.tensor[:, 1], before[:, 4])
    for untouched in (0, 2, 3, 5):
        assert torch.equal(kv.tensor[:, untouched], before[:, untouched])
    kv.fill_blocks([2, 5], float("nan"))
    assert kv.tensor[:, [2, 5]].isnan().all()
    assert not kv.tensor[:, [0, 1, 3, 4]].isnan().any()
    kv.copy_blocks([], [])
    kv.fill_blocks([], 1.0)


def test_an_accepted_path_moves_token_by_token():
    kv = KVCache(CONFIG, 4, 3, "cpu", torch.float32)
    kv.tensor.copy_(torch.randn_like(kv.tensor))
    before = [layer.clone() for layer in kv.layers]
    kv.move([7, 3, 4], [3, 4, 11])  # 3 and 4 are sources and destinations: read before they are written
    for layer, old in zip(kv.layers, before):
        assert torch.equal(layer[[3, 4, 11]], old[[7, 3, 4]])
        untouched = [slot for slot in range(12) if slot not in (3, 4, 11)]
        assert torch.equal(layer[untouched], old[untouched])
    kv.move([], [])
    for src, dst in (([0], []), ([0], [12]), ([-1], [0]), ([1, 2], [5, 5])):
        with pytest.raises(ValueError, match=r"got|named twice"):
            kv.move(src, dst)


def test_what_does_not_exist_is_refused():
    kv = KVCache(CONFIG, 4, 2, "cpu", torch.float32)
    for src, dst in (([0], []), ([0], [4]), ([-1], [0])):
        with pytest.raises(ValueError, match="got"):
            kv.copy_blocks(src, dst)
    with pytest.raises(ValueError, match="block ids must lie in"):
        kv.fill_blocks([4], 0.0)
    with pytest.raises(ValueError, match="num_blocks must be"):
        KVCache(CONFIG, 0, 2, "cpu", torch.float32)
