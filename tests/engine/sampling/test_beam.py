"""Beam search alone: transformers on random log-probabilities, every sequence there is, ties and edges."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.beams import assign
from engine.sampling.beam import BeamSearch, best, log_probabilities
from tests.engine.engines import tiny_parts

INF = math.inf
PROMPT = (11, 12, 13)


def random_logprobs(prefix: Sequence[int], vocab: int, spread: float, seed: int, favoured: Sequence[int] = ()) -> torch.Tensor:
    """float32 [vocab], a function of the tokens before; the ``favoured`` tokens are the likeliest by far."""
    digest = hashlib.blake2b(f"{seed}:{list(prefix)}".encode(), digest_size=8).digest()
    x = np.random.default_rng(int.from_bytes(digest, "little")).normal(0, spread, vocab)
    x[list(favoured)] += 9
    return torch.log_softmax(torch.from_numpy(x), -1).float()


def run(
    search: BeamSearch, logprobs: Callable[[tuple[int, ...]], torch.Tensor], ends: set[int]
) -> list[tuple[tuple[int, ...], float]]:
    """(output tokens, score), best first."""
    beams: list[tuple[int, ...]] = [()]
    while not search.done:
        ways = search.ways(torch.stack([logprobs((*PROMPT, *b)) for b in beams]))
        step = search.advance(ways, [w.token_id in ends for w in ways], beams)
        beams = [(*beams[ways[i].source], ways[i].token_id) for i in step.beams]
    return [(c.token_ids, c.score) for c in search.complete]


def theirs(
    width: int, length_penalty: float, early_stopping: Any, ends: list[int], max_length: int, spread: float, seed: int,
    favoured: Sequence[int] = (),
) -> tuple[list[tuple[tuple[int, ...], float]], int]:  # fmt: skip
    """(output tokens, score), best first, and how many steps transformers took."""
    _, made = tiny_parts()

    def replace(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.stack([random_logprobs(row, scores.shape[-1], spread, seed, favoured) for row in input_ids.tolist()])

    with torch.no_grad():
        out = made.model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, 3, dtype=torch.long), do_sample=False, num_beams=width,
            num_return_sequences=width, max_new_tokens=max_length, length_penalty=length_penalty, early_stopping=early_stopping,
            eos_token_id=ends or None, pad_token_id=0, logits_processor=[replace], output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[3:]
        end = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
        found.append((tuple(tokens[:end]), score))
    return found, len(out.scores)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 2.0])
@pytest.mark.parametrize(
    ("width", "num_ends", "spread"), [(2, 1, 3.0), (2, 80, 2.0), (3, 40, 1.0), (4, 80, 0.5), (9, 25, 2.0), (6, 0, 1.0)]
)
def test_random_logits_against_transformers(width, num_ends, spread, length_penalty, early_stopping):
    ends = list(range(20, 20 + num_ends))
    search = BeamSearch(width, length_penalty, early_stopping, num_end_tokens=num_ends, max_length=12)
    got = run(search, lambda p: random_logprobs(p, 320, spread, 1), set(ends))
    want, steps = theirs(width, length_penalty, early_stopping, ends, 12, spread, 1)
    assert search.length == steps
    assert [s for _, s in got] == pytest.approx([s for _, s in want], rel=3e-7, abs=1e-4)
    assert [t for t, _ in got] == [t for t, _ in want]


@pytest.mark.parametrize("seed", range(4))
def test_width_one_is_greedy(seed):
    ends = set(range(20, 60))

    def logprobs(p: Sequence[int]) -> torch.Tensor:
        return random_logprobs(p, 320, 1.0, seed)

    tokens: tuple[int, ...] = ()
    total = 0.0
    while len(tokens) < 7 and not (tokens and tokens[-1] in ends):
        x = logprobs((*PROMPT, *tokens))
        tokens, total = (*tokens, int(x.argmax())), total + float(x.max())
    got = run(BeamSearch(1, 0.8, True, num_end_tokens=len(ends), max_length=7), logprobs, ends)
    assert got == [(tokens, pytest.approx(total / len(tokens) ** 0.8))]


@pytest.mark.parametrize("early_stopping", [False, "never"])
@pytest.mark.parametrize(("width", "num_ends"), [(2, 1), (2, 3), (4, 5)])
def test_beams_go_on_though_all_the_best_ways_end(width, num_ends, early_stopping):
    """After every beam the end tokens are the likeliest: what goes on comes after all of those of all beams."""
    ends = list(range(20, 20 + num_ends))
    search = BeamSearch(width, 3.0, early_stopping, num_end_tokens=num_ends, max_length=5)
    got = run(search, lambda p: random_logprobs(p, 320, 1.0, 1, ends), set(ends))
    want, steps = theirs(width, 3.0, early_stopping, ends, 5, 1.0, 1, ends)
    assert [t for t, _ in got] == [t for t, _ in want]
    assert [s for _, s in got] == pytest.approx([s for _, s in want], rel=3e-7, abs=1e-4)
    assert search.length == steps


def test_the_searches_above_ended_in_different_ways():
    """What the comparison stands on: the three rules stop at different steps."""
    steps: dict[Any, int] = {}
    for early_stopping in (False, True, "never"):
        search = BeamSearch(2, 0.5, early_stopping, num_end_tokens=80, max_length=12)
        run(search, lambda p: random_logprobs(p, 320, 2.0, 1), set(range(20, 100)))
        steps[early_stopping] = search.length
    assert steps[True] < steps["never"] < 12 and steps[False] < steps["never"]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_width_that_covers_everything_is_exhaustive(seed, length_penalty):
    vocab, longest, end = 4, 4, 0

    def logprobs(p: Sequence[int]) -> torch.Tensor:
        return random_logprobs(p, vocab, 1.5, seed)

    everything = []
    for n in range(1, longest + 1):
        for tokens in itertools.product(range(vocab), repeat=n):
            if end in tokens[:-1] or (tokens[-1] != end and n < longest):
                continue
            total = sum(float(logprobs((*PROMPT, *tokens[:i]))[t]) for i, t in enumerate(tokens))
            everything.append((tokens, total / n**length_penalty))
    everything.sort(key=lambda s: -s[1])
    search = BeamSearch(300, length_penalty, "never", num_end_tokens=1, max_length=longest)
    got = run(search, logprobs, {end})
    assert [t for t, _ in got] == [t for t, _ in everything]
    assert [s for _, s in got] == pytest.approx([s for _, s in everything])


def test_a_wider_search_finds_what_a_narrow_one_misses():
    """The greedy way is not the best one: the reason for beams."""
    table = {(): [0.6, 0.4, 0.0], (0,): [0.4, 0.3, 0.3], (1,): [0.0, 0.05, 0.95]}

    def logprobs(p: Sequence[int]) -> torch.Tensor:
        return torch.tensor(table[tuple(p[3:])]).log()

    assert run(BeamSearch(1, num_end_tokens=0, max_length=2), logprobs, set())[0][0] == (0, 0)
    (tokens, score), *_ = run(BeamSearch(2, num_end_tokens=0, max_length=2), logprobs, set())
    assert tokens == (1, 2) and score == pytest.approx(math.log(0.4 * 0.95) / 2)


def test_ties_go_to_the_earlier_beam_and_the_lower_id():
    flat = torch.full((5000,), -math.log(5000))
    got = run(BeamSearch(3, num_end_tokens=1, max_length=2), lambda p: flat, {4999})
    assert [t for t, _ in got] == [(0, 0), (0, 1), (0, 2)]


def test_one_possible_token_gives_one_beam():
    only = torch.full((50,), -INF)
    only[7] = 0.0
    assert run(BeamSearch(4, num_end_tokens=0, max_length=3), lambda p: only, set()) == [((7, 7, 7), 0.0)]


def test_a_vocabulary_of_one():
    assert run(BeamSearch(3, num_end_tokens=1, max_length=2), lambda p: torch.zeros(1), set()) == [((0, 0), 0.0)]
    assert run(BeamSearch(3, num_end_tokens=1, max_length=9), lambda p: torch.zeros(1), {0}) == [((0,), 0.0)]


def test_more_beams_than_tokens():
    got = run(BeamSearch(8, num_end_tokens=0, max_length=3), lambda p: random_logprobs(p, 3, 1.0, 1), set())
    assert len(got) == 8 and len({t for t, _ in got}) == 8


def test_log_probabilities_at_the_edge():
    x = torch.tensor([[INF, 1.0, INF, -INF], [-INF] * 4, [1.0, math.nan, 0, 0], [0.0, 0.0, 0.0, 0.0]])
    p = log_probabilities(x)
    assert p[0].tolist() == [pytest.approx(math.log(0.5)), -INF, pytest.approx(math.log(0.5)), -INF]
    assert p[1].tolist() == [-INF] * 4 and p[2].isnan().all() and p[3].tolist() == [pytest.approx(-math.log(4))] * 4
    assert log_probabilities(torch.zeros(1, 8, dtype=torch.bfloat16)).dtype == torch.float32


@given(st.sampled_from([3, 1500, 5003]), st.sampled_from([1, 4, 24]), st.integers(2, 40), st.integers(0, 10**6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_best_is_the_beginning_of_the_order(vocab, k, values, seed, holes):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, values, (3, vocab), generator=g).float()
    if holes:
        x[torch.rand(x.shape, generator=g) < 0.99] = -INF
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    got_values, got_ids = best(x, k)
    n = min(k, vocab)
    assert torch.equal(got_values, order.values[:, :n])
    finite = got_values > -INF
    assert torch.equal(got_ids[finite], order.indices[:, :n][finite])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_slots(data):
    """Every next beam has a place of its own, the first to go on from a beam stays there, and the first place is never empty."""
    n = data.draw(st.integers(1, 6))
    others = data.draw(st.lists(st.integers(1, 9), unique=True, min_size=n - 1, max_size=n - 1))
    slots = data.draw(st.permutations([0, *others]))
    sources = data.draw(st.lists(st.integers(0, n - 1), max_size=8))
    got = assign(sources, slots)
    assert len(set(got)) == len(got) == len(sources)
    assert not sources or 0 in got
    moved = [s for s in set(sources) if slots[s] not in got]
    assert len(moved) <= 1  # the one that went to place 0
    used = {slots[s] for s in sources}
    new = [g for g in got if g not in slots]
    assert not new or len(got) > n
    assert all(g in used or g in slots or g in new for g in got)


@pytest.mark.parametrize(("kw", "message"), [
    ({"width": 0}, "at least 1"), ({"max_length": 0}, "at least 1"), ({"num_end_tokens": -1}, "at least 0"),
    ({"early_stopping": "maybe"}, "True, False or 'never', got 'maybe'"),
])  # fmt: skip
def test_values_out_of_range(kw, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(**{"width": 2, "num_end_tokens": 1, "max_length": 3, **kw})
