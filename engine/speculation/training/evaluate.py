"""Stage 4: how many tokens of greedy drafts the target would accept, on text that it wrote greedily for held-out prompts.

Exactly: a sequence is a prompt and what the target wrote after it at temperature 0, so its tokens are the target's own choices.
For each position a whose token is written (known to the drafter, not yet computed by the target) the drafter proposes
K tokens greedily; hit (a, i) says that proposal i equals the token at a + i, all before being right. The walk starts at the first
written token and goes from a to a + (tokens accepted at a) + 1, as decoding does, while K tokens follow. ``per_position[i]``: share
of the walk's drafts whose tokens 1 .. i + 1 were all accepted; the mean accepted length is their sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.speculation.config import SpeculativeConfig
from engine.speculation.datastore import Datastore
from engine.speculation.ngram import NgramIndex, follow
from engine.speculation.training.features import Example, ExampleBatch, batches_by_length
from engine.speculation.training.modules import Drafter, Medusa
from engine.speculation.training.train import TargetEnds


@dataclass(frozen=True)
class Acceptance:
    """Of one drafter, over ``drafts`` drafts of K tokens."""

    per_position: list[float]
    drafts: int

    @classmethod
    def of(cls, counts: Sequence[int], k: int) -> "Acceptance":
        """``counts``: accepted of each draft."""
        return cls([sum(count > i for count in counts) / max(1, len(counts)) for i in range(k)], len(counts))

    @property
    def mean_accepted(self) -> float:
        return sum(self.per_position)

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:.3f}" for rate in self.per_position)
        return f"mean accepted {self.mean_accepted:.2f} of {len(self.per_position)} (accepted up to each position: {rates})"


def proposals(drafter: Drafter, ends: TargetEnds, batch: ExampleBatch, k: int) -> torch.Tensor:
    """int64 [k, B, T]: at [i - 1, :, a] the token that a greedy draft begun at position a proposes for position a + i, provided
    that its earlier tokens were right; -1: none (Medusa has fewer heads)."""
    predictions = drafter.predict(batch.features, ends.embedding[batch.token_ids], batch.left, k)
    tokens = [ends.vocab[(predicted @ ends.head.t()).argmax(-1)] for predicted in predictions]
    length = batch.token_ids.shape[1]
    out = torch.full((k, *batch.token_ids.shape), -1)
    for i in range(1, k + 1):
        if isinstance(drafter, Medusa):  # head i, at the feature of position a - 1
            if i <= len(tokens):
                out[i - 1, :, 1:] = tokens[i - 1][:, : length - 1]
        else:  # the prediction at position a + i - 1, where the draft has arrived
            step = tokens[min(i, len(tokens)) - 1]
            out[i - 1, :, : length - i + 1] = step[:, i - 1 :]
    return out


def acceptance(
    drafter: Drafter, ends: TargetEnds, examples: list[Example], k: int = 4, prompt_lookup: bool = False
) -> Acceptance:
    """See the top of this file. ``prompt_lookup``: a draft is made from the text so far where its last tokens came before."""
    counts: list[int] = []
    for rows in batches_by_length([len(example.token_ids) for example in examples], 4096):
        chosen = [examples[i] for i in rows]
        batch = ExampleBatch.of(chosen)
        with torch.inference_mode():
            proposed = proposals(drafter, ends, batch, k)
        for row, example in enumerate(chosen):
            own = proposed[:, row].t().tolist()
            propose = lambda seen, own=own: own[len(seen) - 1]
            counts += walk(looking_up(propose, k) if prompt_lookup else propose, example, k)
    return Acceptance.of(counts, k)


def datastore_acceptance(datastore: Datastore, examples: list[Example], k: int = 4, prompt_lookup: bool = False) -> Acceptance:
    """The same of a datastore, which proposes as many as it is asked for."""
    counts: list[int] = []
    for example in examples:
        propose = lambda seen: datastore.follow(seen, k)[0]
        counts += walk(looking_up(propose, k) if prompt_lookup else propose, example, k)
    return Acceptance.of(counts, k)


Propose = Callable[[list[int]], Sequence[int]]  # what has been written -> up to K tokens that may come next


def looking_up(other: Propose, k: int) -> Propose:
    """For one text: what followed its last tokens before, else what ``other`` proposes (``engine.speculation.lookup_first``)."""
    config = SpeculativeConfig("ngram")
    index = NgramIndex(config.prompt_lookup_max, config.prompt_lookup_min)

    def propose(seen: list[int]) -> Sequence[int]:
        at = index.find(seen)
        return other(seen) if at is None else follow(seen, at, k)

    return propose


def walk(propose: Propose, example: Example, k: int) -> list[int]:
    """Tokens accepted by each draft of the walk through one text."""
    tokens = example.token_ids.tolist()
    out, at = [], example.num_prompt_tokens
    while at + k < len(tokens):
        proposed = propose(tokens[: at + 1])[:k]
        wrong = (i for i, token in enumerate(proposed) if token != tokens[at + 1 + i])
        out.append(next(wrong, len(proposed)))
        at += out[-1] + 1
    return out


def loop_share(examples: list[Example], period: int = 32) -> float:
    """Share of the written tokens that repeat what stood at most ``period`` tokens before, eight tokens in a row: greedy loops,
    which flatter every drafter."""
    looping = total = 0
    for example in examples:
        tokens = example.token_ids[example.num_prompt_tokens :]
        repeats = torch.zeros(len(tokens), dtype=torch.bool)
        for by in range(1, period + 1):
            same = (tokens[by:] == tokens[:-by]).tolist()
            start = by
            for equal, run in groupby(same):
                length = len(list(run))
                if equal and length >= 8:
                    repeats[start : start + length] = True
                start += length
        looping += int(repeats.sum())
        total += len(tokens)
    return looping / max(1, total)
