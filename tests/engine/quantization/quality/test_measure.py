"""The whole measurement: the same each time, worse on every measure for a damaged model, and equal through the engine's runner."""

import pytest
import torch

from engine import EngineConfig
from engine.loading import make_kv_cache, make_runner
from engine.quantization.quality import probes, texts
from engine.quantization.quality.forward import ModelLogits
from engine.quantization.quality.measure import Budget, measure_quality, measure_reference
from tests.engine.engines import tiny_parts
from tests.engine.quantization.quality.models import Bigrams, Bytes

SMALL = Budget(tokens=400, window=128, stride=64, positions=60, retrieval=(800, 1000), arithmetic=2)


class Copier(Bigrams):
    """Bigrams, and besides what followed the last time the latest seven bytes were there: enough for retrieval; and it can add."""

    def __call__(self, token_ids: list[int]) -> torch.Tensor:
        rows = super().__call__(token_ids).clone()
        seen: dict[tuple, int] = {}
        for t in range(6, len(token_ids)):
            key = tuple(token_ids[t - 6 : t + 1])
            if key in seen:
                rows[t, seen[key]] += 9
            if t + 1 < len(token_ids):
                seen[key] = token_ids[t + 1]
        text = Bytes().decode(token_ids)
        for prompt in self.sums:
            if prompt.token_ids == tuple(token_ids):
                for answer in prompt.answers:
                    for t in answer.positions:
                        rows[t - 1, token_ids[t]] += 9
        return rows + self.noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(len(text)))


def copier(noise: float = 0.0) -> Copier:
    model = Copier(texts.prose()[:400] + texts.python_help()[:400])
    model.noise = noise
    model.sums = [probes.arithmetic_prompt(Bytes(), 1 + i, f"0 {i}") for i in range(2)]
    return model


def numbers(quality) -> list:
    found = [(p.nll, p.tokens, p.perplexity) for p in quality.perplexities.values()]
    found += [(r.total, r.parts) for r in quality.probes.values()]
    return found + ([] if quality.divergence is None else [quality.divergence.kl.tolist(), quality.divergence.positions])


def test_a_damaged_model_is_worse_on_each_measure():
    good, reference = measure_reference(copier(), Bytes(), SMALL)
    assert good.divergence is None and reference.complete and len(reference) == 60
    assert good.probes["retrieval"].total.exact > 0.5 and good.probes["arithmetic"].total.exact > 0.5
    same, little, much = (measure_quality(copier(noise), Bytes(), reference, SMALL) for noise in (0.0, 0.7, 4.0))
    assert same.divergence.mean_kl < 1e-6 and same.divergence.top1_agreement == 1.0
    for a, b in ((same, little), (little, much)):
        for name in ("python-help", "prose"):
            assert b.perplexities[name].perplexity > 1.02 * a.perplexities[name].perplexity
        assert b.divergence.mean_kl > a.divergence.mean_kl + 0.01
        assert b.divergence.kl_quantile(0.9) > a.divergence.kl_quantile(0.9)
        assert b.divergence.mean_variation > a.divergence.mean_variation + 0.01
        assert b.divergence.top1_agreement < a.divergence.top1_agreement
        assert b.divergence.nucleus_overlap < a.divergence.nucleus_overlap
        for name in ("retrieval", "arithmetic"):
            assert b.probes[name].total.mean_nll > a.probes[name].total.mean_nll
            assert b.probes[name].total.mean_margin < a.probes[name].total.mean_margin
    for name in ("retrieval", "arithmetic"):
        assert much.probes[name].total.share < good.probes[name].total.share - 0.1


def test_deterministic_and_counted():
    told: list = []
    first, reference = measure_reference(copier(), Bytes(), SMALL, lambda *a: told.append(a))
    again = measure_quality(copier(), Bytes(), None, SMALL)
    assert numbers(first) == numbers(again)
    total = first.tokens_read
    assert told[-1] == (total, total) and [a for a, _ in told] == sorted({a for a, _ in told})
    assert list(first.seconds) == ["python-help", "prose", "retrieval", "arithmetic"] == [*first.perplexities, *first.probes]
    assert {name: len(at) for name, at in reference.positions.items()} == {"python-help": 30, "prose": 30}


def test_parts_can_be_left_out():
    got = measure_quality(copier(), Bytes(), None, Budget(tokens=100, window=64, stride=64, retrieval=(), arithmetic=0))
    assert got.probes == {} and set(got.perplexities) == {"python-help", "prose"}


def test_a_reference_of_another_measurement():
    _, reference = measure_reference(copier(), Bytes(), SMALL)
    other = Budget(tokens=300, window=128, stride=64, positions=60, retrieval=(), arithmetic=0)
    with pytest.raises(ValueError, match="made from other texts, tokens or windows"):
        measure_quality(copier(), Bytes(), reference, other)


def runner(**config):
    parts, made = tiny_parts()
    config = EngineConfig(model=str(made.path), dtype="float32", device="cpu", num_kv_blocks=32, block_size=4, **config)
    config = parts.resolve(config)
    return make_runner(parts, make_kv_cache(parts, config), config), made


@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
def test_the_runner_gives_every_row(chunk):
    made_runner, made = runner()
    logits = ModelLogits(made_runner, chunk)
    ids = [(5 * i * i + 3) % 320 for i in range(60)]
    want = made.logits(ids)
    assert logits.max_length == 128
    torch.testing.assert_close(logits(ids), want, atol=1e-4, rtol=0)
    for first in (1, 30, 59):
        torch.testing.assert_close(logits.rows_from(ids, first), want[first:], atol=1e-4, rtol=0)
    shorter = ids[20:40]  # what an earlier sequence left in the cache does not show
    torch.testing.assert_close(logits(shorter), made.logits(shorter), atol=1e-4, rtol=0)


def test_the_runner_refuses_what_does_not_fit():
    logits = ModelLogits(runner()[0])
    for ids, first in (([1] * 129, 0), ([], 0), ([1, 2], 2), ([1, 2], -1)):
        with pytest.raises(ValueError, match="the KV cache has room for 128"):
            logits.rows_from(ids, first)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        ModelLogits(runner()[0], 0)
