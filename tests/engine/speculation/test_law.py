"""Sampled drafts on the running engine: tokens come out as often as plain sampling gives them, however wrong the drafter is."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.sampling.sampled import SampleRow
from engine.sampling.sampler import Sampler
from engine.speculation.base import Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draw import DraftSampler
from tests.engine.engines import tiny_engine, tiny_parts
from tests.engine.speculation.guesses import use
from tests.engine.test_engine import prompt

PARAMS = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=3, ignore_eos=True)
PROMPT = prompt(3, 9)  # two full blocks and one token: with the blocks cached, the very first token is drafted
VOCAB = 320
RUNS = 2000


class Noise(Drafter):
    """Draws from distributions of its own: whatever comes before, those of a fixed table by the last token."""

    method = "noise"

    def __init__(self, acceptance: str, width: int) -> None:
        self.acceptance, self.width = acceptance, width
        _, made = tiny_parts()
        near = made.logits(PROMPT)[-1].clone().detach()
        generator = torch.Generator().manual_seed(1)
        # Somewhere near the target's own at the first place, so that both acceptance and rejection happen often.
        self.table = near + 2 * torch.randn(VOCAB, VOCAB, generator=generator)
        self.sampler = DraftSampler(VOCAB)

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [self._one(w) for w in wanted]

    def _one(self, w: Wanted) -> Draft:
        request = w.request
        row = SampleRow(request.params, request.seed, request.draw_index, request.num_tokens)
        draft = Draft([], [])
        rows = []
        parent, last = -1, request.token_ids[-1]
        while len(draft) + self.width <= w.count:
            drawn = self.sampler.draw(self.table[last][None], [row], self.width, self.acceptance)[0]
            for token in drawn.token_ids:
                draft.token_ids.append(token)
                draft.parents.append(parent)
                if drawn.q is not None:
                    rows.append(drawn.q)
            parent, last = len(draft) - len(drawn.token_ids), drawn.token_ids[0]  # on from the first of them
            row = row.after([last])
        draft.q = torch.stack(rows) if rows else None
        return draft


def law() -> tuple[np.ndarray, np.ndarray]:
    """What plain sampling gives: the first token's probabilities, and the second's over all firsts. float64 [V] each."""
    _, made = tiny_parts()
    sampler = Sampler(VOCAB)
    row = SampleRow(PARAMS, 0, 0, len(PROMPT))
    first = sampler.distributions(made.logits(PROMPT)[-1][None], [row]).p[0]
    second = torch.zeros(VOCAB, dtype=torch.float64)
    for token in torch.nonzero(first).flatten().tolist():
        logits = made.logits([*PROMPT, token])[-1][None]
        second += first[token] * sampler.distributions(logits, [row]).p[0]
    return first.numpy(), second.numpy()


def assert_follows(counts: Counter, p: np.ndarray) -> None:
    """Chi-square over the tokens that are expected often, and the rest together; the threshold is passed about once in 10^5."""
    seen = np.array([counts[i] for i in range(len(p))])
    assert not seen[p == 0].any(), "a token without probability came out"
    expected = p * seen.sum()
    often = expected >= 8
    have, want = np.append(seen[often], seen[~often].sum()), np.append(expected[often], expected[~often].sum())
    freedom = len(want) - 1
    chi2 = float(((have - want) ** 2 / np.maximum(want, 1)).sum())
    assert freedom > 20 and chi2 < freedom + 4.5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize(
    ("acceptance", "k", "width"),
    [("rejection", 2, 1), pytest.param("rejection", 6, 3, marks=pytest.mark.long), ("coupled", 2, 1)],
)
def test_tokens_come_out_as_often_as_in_plain_sampling(monkeypatch, acceptance, k, width):
    use(monkeypatch, Noise(acceptance, width))
    config = SpeculativeConfig("eagle", num_speculative_tokens=k // width, tree=None, acceptance=acceptance)
    engine = tiny_engine(num_kv_blocks=400, max_num_seqs=64, speculative=config)
    if width > 1:
        monkeypatch.setattr(engine.speculator, "num_wanted", lambda request: k)
    engine.generate([PROMPT], PARAMS)  # the prompt's blocks are cached from here on
    outputs = engine.generate([PROMPT] * RUNS, [PARAMS.changed(seed=seed) for seed in range(RUNS)])
    first, second = law()
    assert_follows(Counter(o.token_ids[0] for o in outputs), first)
    assert_follows(Counter(o.token_ids[1] for o in outputs), second)
    metrics = engine.metrics()
    share = metrics["vllm:spec_decode_num_accepted_tokens"] / metrics["vllm:spec_decode_num_draft_tokens"]
    assert (0.0 if acceptance == "coupled" else 0.02) < share < 0.98, "both acceptance and rejection were meant to happen"
