"""KV in host memory: the same bits back in other blocks, bytes that are told before they are taken, a budget that holds."""

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.events.recorder import Recorder
from engine.kvcache.create import create_kv_cache
from engine.kvcache.pool import BlockPool
from engine.kvcache.swap import GIB, SwapSpace
from engine.loading import make_kv_cache
from engine.request import Request
from engine.runner import Runner, Scheduled
from tests.engine.engines import tiny_engine, tiny_parts

SIZE = 8
DTYPES = ("auto", "int8", "fp8", "int4")


class Holder:
    """A request as the runner reads it."""

    def __init__(self, name: str, token_ids: list[int], block_ids: list[int]) -> None:
        self.request_id, self.token_ids, self.block_ids = name, token_ids, block_ids


def swapped_request(name: str, num_tokens: int, block_ids: list[int]) -> Request:
    request = Request(name, [3] * (num_tokens + 1), SamplingParams(), 0)
    request.block_ids, request.num_computed_tokens = block_ids, num_tokens
    return request


@pytest.mark.parametrize("num_tokens", [5, 16, 21])
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_the_next_logits_are_the_same_bits_after_a_way_through_host_memory(kv_dtype, num_tokens):
    """Out of some blocks, everything overwritten, and back into others, of which the first was found elsewhere."""
    parts, _ = tiny_parts()
    kv = create_kv_cache(kv_dtype, parts.model_config, 16, SIZE, "cpu", torch.float32)
    runner = Runner(parts.model, kv)
    tokens = [(7 * i) % 200 + 3 for i in range(num_tokens + 1)]
    holder = Holder("a", tokens, [9, 4, 6, 7][: -(-(num_tokens + 1) // SIZE)])
    runner.run([Scheduled(holder, 0, 3, False)])
    runner.run([Scheduled(holder, 3, num_tokens - 3, False)])
    last = Scheduled(holder, num_tokens, 1, True)
    kept = kv.to_host(holder.block_ids[: -(-num_tokens // SIZE)])
    assert kept.nbytes == kv.host_bytes(holder.block_ids[: -(-num_tokens // SIZE)]) > 0
    want = runner.run([last])
    for first in range(kept.num_blocks + 1):
        found = kv.to_host(holder.block_ids[:first])
        kv.fill_blocks(list(range(10, 16)), float("nan"))
        fresh = [13, 10, 15, 11][: kept.num_blocks]
        if first:
            kv.from_host(found, 0, fresh[:first])
        kv.from_host(kept, first, fresh[first:])
        back = Holder(f"b{first}", tokens, fresh + [12][: len(holder.block_ids) - kept.num_blocks])
        if kv_dtype == "int4" and first == kept.num_blocks and num_tokens % SIZE:
            continue  # its last block was shared whole: then nothing would have been in host memory
        assert torch.equal(runner.run([Scheduled(back, num_tokens, 1, True)]), want)
    if kv_dtype == "int4":
        kv.tail.check_integrity()


def test_the_budget_holds_and_is_told():
    parts, made = tiny_parts()
    config = EngineConfig(model=str(made.path), block_size=SIZE, num_kv_blocks=16, dtype="float32", device="cpu")
    kv = make_kv_cache(parts, parts.resolve(config))
    swap = SwapSpace(kv, Recorder(), 3 * kv.bytes_per_block / GIB)
    a, b, c = (swapped_request(n, t, ids) for n, t, ids in (("a", 9, [0, 1]), ("b", 16, [2, 3]), ("c", 3, [4])))
    assert swap.why_not(a) == "" and "nothing is computed" in swap.why_not(swapped_request("d", 0, []))
    assert swap.swap_out(a) == ""
    assert (a.num_swapped_tokens, swap.used_bytes, len(swap)) == (9, 2 * kv.bytes_per_block, 1) and "a" in swap
    why = swap.why_not(b)
    assert why.startswith("swap_space is used up") and f"{kv.bytes_per_block:,} of {3 * kv.bytes_per_block:,} are left" in why
    assert swap.swap_out(b) == why and b.num_swapped_tokens == 0 and "b" not in swap
    with pytest.raises(RuntimeError, match="is swapped out already"):
        swap.swap_out(swapped_request("a", 3, [7]))
    assert swap.swap_out(c) == ""
    for request in (a, c):
        request.status = "preempted"
    swap.check_integrity([a, b, c])
    with pytest.raises(RuntimeError, match="say that they are swapped out"):
        swap.check_integrity([a])
    swap.set_budget(2 * kv.bytes_per_block / GIB)  # the last that came goes
    assert (a.num_swapped_tokens, c.num_swapped_tokens, len(swap)) == (9, 0, 1)
    returning = swap.take(a, 1, [5])
    assert (returning.num_tokens, returning.first, swap.used_bytes, a.num_swapped_tokens) == (9, 1, 0, 0)
    swap.drop(a, "finished")  # nothing there any more: fine
    swap.used_bytes = 5
    with pytest.raises(RuntimeError, match="0 bytes are swapped out, 5 are counted"):
        swap.check_integrity([])


def test_memory_that_is_not_there_is_a_reason_and_any_other_failure_a_failure(monkeypatch):
    swap = tiny_engine(swap_space=1).scheduler.swap
    request = swapped_request("a", 3, [1])
    for error, want in (
        (RuntimeError("not enough memory: 7 bytes"), "no memory"),
        (MemoryError(), "no memory"),
        (RuntimeError("x"), None),
    ):

        def fails(block_ids, error=error):
            raise error

        monkeypatch.setattr(swap.kv, "to_host", fails)
        if want is None:
            with pytest.raises(RuntimeError, match="x"):
                swap.swap_out(request)
        else:
            assert want in swap.swap_out(request)
        assert not len(swap) and request.num_swapped_tokens == 0
        swap.check_integrity([])


def test_only_a_cached_block_is_copied_in_part():
    pool = BlockPool(2, 4, Recorder())
    (block,) = pool.allocate("a", 0, 1)
    with pytest.raises(RuntimeError, match="is not cached"):
        pool.copy_part("b", 0, block, 2)
    pool.cache(block, 7, 0, (1, 2, 3, 4))
    pool.allocate("c", 0, 1)
    with pytest.raises(RuntimeError, match="no free block"):
        pool.copy_part("b", 0, block, 2)


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("policy", [{"batching": "static"}, {"batching": "dynamic"}, {"scheduling_policy": "priority"}])
def test_every_policy_gives_the_same_tokens(policy, index):
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = [[(5 * i + j) % 200 + 3 for j in range(6 + 5 * i)] for i in range(5)]
    want = [o.token_ids for o in tiny_engine().generate(prompts, params)]
    engine = tiny_engine(
        num_kv_blocks=13, prefix_index=index, preemption_mode="swap", swap_space=1, batching_timeout_ms=0.0, **policy
    )
    ids = [engine.add_request(p, params, priority=-i) for i, p in enumerate(prompts)]
    done = {}
    with engine.record() as log:
        while engine.has_unfinished():
            done |= {o.request_id: o.request for o in engine.step() if o.request is not None}
            engine.check_integrity()
    assert [done[i].token_ids for i in ids] == want
    assert any(type(e).__name__ == "BlockSwapped" for e in log)
    assert engine.pool.num_used == 0 and engine.scheduler.swap.used_bytes == 0
