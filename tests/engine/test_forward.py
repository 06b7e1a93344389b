"""The forward pass through the Runner against transformers in float32: any mix of chunks and decodes, any block table."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kvcache.layout import KVCache
from engine.model.checkpoint import load_checkpoint
from engine.model.llama import Model
from engine.runner import Runner, Scheduled
from tests.engine.model import tiny

TOLERANCE = 1e-4  # float32 logits, absolute


@dataclass
class FakeRequest:
    request_id: str
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0


class World:
    """A tiny model on a pool full of NaN, its oracle, and an allocator that hands out blocks in random order."""

    def __init__(
        self, made: tiny.Tiny, block_size: int, seed: int = 0, slots: int = 512, dtype: torch.dtype = torch.float32
    ) -> None:
        self.rng = random.Random(seed)
        self.oracle = made
        checkpoint = load_checkpoint(made.path)
        self.model = Model(checkpoint.config, checkpoint.tensors, "cpu", dtype)
        self.kv = KVCache(checkpoint.config, max(8, slots // block_size), block_size, "cpu", dtype)
        self.kv.fill_blocks(range(self.kv.num_blocks), float("nan"))
        self.runner = Runner(self.model, self.kv)
        self.free = list(range(self.kv.num_blocks))
        self.rng.shuffle(self.free)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 320) for _ in range(count)]

    def item(self, request: FakeRequest, count: int, sample: bool = True) -> Scheduled:
        while len(request.block_ids) * self.kv.block_size < request.computed + count:
            request.block_ids.append(self.free.pop())
        made = Scheduled(request, request.computed, count, sample)
        request.computed += count
        return made

    def release(self, request: FakeRequest) -> None:
        """Its blocks come back, poisoned."""
        self.kv.fill_blocks(request.block_ids, float("nan"))
        self.free += request.block_ids
        request.block_ids, request.computed = [], 0

    def check(self, items: list[Scheduled], tolerance: float = TOLERANCE) -> None:
        got = self.runner.run(items)
        want = [self.oracle.logits(i.request.token_ids)[i.start + i.num_tokens - 1] for i in items if i.sample]
        assert got.shape == (len(want), self.model.config.vocab_size)
        if want:
            torch.testing.assert_close(got.float(), torch.stack(want), atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    family = getattr(request, "param", "llama")
    return tiny.make(family, Path(tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
@pytest.mark.parametrize("made", tiny.FAMILIES, indirect=True)
def test_random_mixes_of_chunks_and_decodes(made, block_size):
    world = World(made, block_size, seed=block_size, slots=8 * 1024 if block_size == 1024 else 512)
    requests = [FakeRequest(f"r{i}", world.tokens(world.rng.choice((1, 2, 17, 40)))) for i in range(5)]
    waiting = list(requests)
    while waiting:
        items = []
        for request in world.rng.sample(waiting, world.rng.randint(1, len(waiting))):
            left = len(request.token_ids) - request.computed
            count = min(left, world.rng.choice((1, 1, 2, block_size, 9)))
            items.append(world.item(request, count, sample=world.rng.random() < 0.8))
        world.check(items)
        for request in [r for r in waiting if r.computed == len(r.token_ids)]:
            waiting.remove(request)
            world.release(request)  # the others run on beside NaN


def test_all_chunk_sizes_give_the_same_logits(made):
    tokens = World(made, 4).tokens(33)
    for chunk in (1, 3, 4, 5, 33):
        world = World(made, 4)
        request = FakeRequest("r", tokens)
        while request.computed < len(tokens):
            world.check([world.item(request, min(chunk, len(tokens) - request.computed))])


def test_requests_that_share_blocks(made):
    world = World(made, 4)
    prefix = world.tokens(8)
    first, second = FakeRequest("a", prefix + world.tokens(5)), FakeRequest("b", prefix + world.tokens(7))
    world.check([world.item(first, 13)])
    second.block_ids, second.computed = first.block_ids[:2], 8
    world.check([world.item(second, 7)])
    world.check([world.item(FakeRequest("c", prefix), 8)])


def test_a_table_that_changes_under_a_request(made):
    """Preempted and back on other blocks, and a block replaced by its copy: the runner's cached slots must follow."""
    world = World(made, 4)
    request = FakeRequest("r", world.tokens(20))
    world.check([world.item(request, 10)])
    world.release(request)
    world.rng.shuffle(world.free)
    world.check([world.item(request, 11)])
    old, new = request.block_ids[1], world.free.pop()
    world.kv.copy_blocks([old], [new])
    world.kv.fill_blocks([old], float("nan"))
    request.block_ids[1] = new  # in place, same length
    world.check([world.item(request, 1)])
    world.runner.forget("r")
    world.check([world.item(request, 8)])
    world.runner.forget("never seen")


def test_rows_that_nobody_samples_are_computed_and_not_returned(made):
    world = World(made, 4)
    a, b = FakeRequest("a", world.tokens(9)), FakeRequest("b", world.tokens(6))
    assert world.runner.run([world.item(a, 5, sample=False)]).shape == (0, 320)
    world.check([world.item(a, 4), world.item(b, 6, sample=False)])
    world.check([world.item(FakeRequest("c", b.token_ids), 6)])


def test_more_positions_than_the_rope_tables_had(made):
    world = World(made, 16)
    request = FakeRequest("r", world.tokens(256))
    world.check([world.item(request, 1)])
    world.check([world.item(request, 255)])


def test_what_cannot_run_is_refused(made):
    world = World(made, 4)
    request = FakeRequest("r", world.tokens(9), block_ids=[0, 1])
    for item, message in (
        (None, "nothing is scheduled"),
        (Scheduled(request, 0, 9, True), "9 tokens need more than its 2 blocks"),
        (Scheduled(request, 4, 6, True), "it has 9 tokens"),
        (Scheduled(request, 0, 0, True), "positions"),
        (Scheduled(request, -1, 2, True), "positions"),
    ):
        with pytest.raises(ValueError, match=message):
            world.runner.run([] if item is None else [item])


def _transformers_in(dtype: torch.dtype, made: tiny.Tiny, tokens: list[int]) -> Any:
    import copy

    model = copy.deepcopy(made.model).to(dtype)
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3"])
def test_sixteen_bit_logits_are_as_close_to_float32_as_transformers(family, dtype, tmp_path):
    """The oracle is the float32 model with the same rounded weights; transformers in 16 bit is the yardstick."""
    made = tiny.make(family, tmp_path, dtype=dtype)
    world = World(made, 4, dtype=dtype)
    request = FakeRequest("r", world.tokens(40))
    rows = [world.runner.run([world.item(request, 30)])] + [world.runner.run([world.item(request, 1)]) for _ in range(10)]
    got = torch.cat(rows).float()
    exact = made.logits(request.token_ids)[29:]
    theirs = _transformers_in(dtype, made, request.token_ids)[29:]
    assert (got - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()
    assert (got - exact).abs().max() < 0.1 * exact.std()
