"""Loads: the same from the same seed, with the distributions and shares that were asked for."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from engine.load.arrivals import Burst, Constant, Poisson
from engine.load.generate import Load, as_words, conversations, make_load
from engine.load.lengths import Drawer, Equal, Exponential, Recorded, Uniform, parse_lengths


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_the_same_seed_gives_the_same_requests() -> None:
    load = Load(
        num_requests=40,
        prompt=Uniform(1, 30),
        output=Exponential(8),
        prefix_share=0.5,
        num_prefixes=3,
        turns=Uniform(1, 3),
        think_s=1,
    )
    assert make_load(load) == make_load(load)
    assert make_load(load) != make_load(load.changed(seed=1))


def test_what_is_changed_leaves_the_rest() -> None:
    load = Load(num_requests=30, prompt=Uniform(1, 30), output=Uniform(1, 9), prefix_share=0.5)
    one = make_load(load)
    faster, longer = make_load(load.changed(arrivals=Poisson(2.0))), make_load(load.changed(output=Equal(50)))
    assert [a.token_ids for a in faster] == [a.token_ids for a in one]
    assert [a.time_s for a in faster] == pytest.approx([a.time_s / 2 for a in one])
    assert [(a.token_ids, a.time_s) for a in longer] == [(a.token_ids, a.time_s) for a in one]


def test_a_long_load_is_made_as_it_is_read() -> None:
    endless = conversations(Load(arrivals=Poisson(100), duration_s=1e9))
    assert [c.turns[0].index for c in itertools.islice(endless, 5)] == [0, 1, 2, 3, 4]


def test_poisson_arrivals() -> None:
    times = np.array(list(itertools.islice(Poisson(4.0).times(rng()), 20000)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03) and gaps.std() == pytest.approx(0.25, rel=0.04)
    counts = np.bincount(times.astype(int))[:-1]  # a second each: as large a variance as mean
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.06)


def test_constant_and_burst_arrivals() -> None:
    assert list(itertools.islice(Constant(4.0).times(rng()), 4)) == [0, 0.25, 0.5, 0.75]
    assert list(itertools.islice(Burst(rate=6.0, size=3).times(rng()), 7)) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]
    assert set(itertools.islice(Burst().times(rng()), 9)) == {0.0}


def test_a_load_ends_by_number_or_time() -> None:
    assert len(make_load(Load(arrivals=Constant(10), duration_s=2))) == 20
    assert len(make_load(Load(arrivals=Constant(10), duration_s=2, num_requests=5))) == 5
    assert max(a.time_s for a in make_load(Load(arrivals=Poisson(10), duration_s=3))) < 3


@pytest.mark.parametrize(
    "lengths",
    [Equal(7), Uniform(3, 11), Exponential(9.5), Exponential(20, most=25), Recorded((2, 5, 11)), Recorded((2, 5, 11), True)],
)
def test_lengths_have_the_mean_they_say(lengths) -> None:
    draw = Drawer(lengths, rng())
    got = np.array([draw() for _ in range(30000)])
    assert got.min() >= 1 and got.mean() == pytest.approx(lengths.mean, rel=0.02)


def test_exponential_lengths_forget() -> None:
    draw = Drawer(Exponential(10), rng())
    got = np.array([draw() for _ in range(60000)])
    for k in (1, 5, 20):
        assert (got > k).mean() == pytest.approx(0.9**k, abs=0.01)
    assert max(Drawer(Exponential(50, most=8), rng())() for _ in range(100)) <= 8


def test_recorded_lengths_in_their_order() -> None:
    load = Load(num_requests=5, prompt=Recorded((3, 1, 2)), output=Recorded((4, 6)))
    assert [(len(a.token_ids), a.max_tokens) for a in make_load(load)] == [(3, 4), (1, 6), (2, 4), (3, 6), (1, 4)]


def test_shared_prefixes() -> None:
    load = Load(num_requests=2000, prompt=Equal(4), prefix_share=0.3, num_prefixes=4, prefix_length=6)
    made = make_load(load)
    shared = [a for a in made if a.prefix >= 0]
    assert len(shared) / len(made) == pytest.approx(0.3, abs=0.04)
    assert {len(a.token_ids) for a in shared} == {10} and {len(a.token_ids) for a in made if a.prefix < 0} == {4}
    begins = {(a.prefix, a.token_ids[:6]) for a in shared}
    assert len(begins) == 4 == len({tokens for _, tokens in begins})
    assert min(Counter(a.prefix for a in shared).values()) > 100
    assert len({a.token_ids[6:] for a in shared}) == len(shared)


def test_conversations_priorities_and_what_is_told_of_each() -> None:
    load = Load(
        num_requests=400,
        turns=Uniform(1, 3),
        think_s=2.0,
        priorities={0: 3, 5: 1},
        prefix_share=1.0,
        prompt=Equal(3),
        prefix_length=2,
    )
    made = make_load(load)
    assert [a.index for a in made] == list(range(len(made)))
    for c in conversations(load):
        assert [a.turn for a in c.turns] == list(range(len(c.turns)))
        assert all((a.time_s is None) == (a.turn > 0) for a in c.turns) and len({a.priority for a in c.turns}) == 1
        assert [len(a.token_ids) for a in c.turns] == [5, 3, 3][: len(c.turns)]  # the prefix comes once
        assert c.turns[0].think_s == 0
    assert sum(a.priority == 5 for a in made) / len(made) == pytest.approx(0.25, abs=0.06)
    assert np.mean([a.think_s for a in made if a.turn]) == pytest.approx(2.0, rel=0.15)


def test_a_conversation_ends_before_the_context_does() -> None:
    load = Load(num_requests=3, turns=Equal(9), prompt=Equal(10), output=Equal(5), max_model_len=50)
    assert [len(c.turns) for c in conversations(load)] == [3, 3, 3]
    with pytest.raises(ValueError, match="max_model_len = 14"):
        make_load(load.changed(max_model_len=14))


def test_tokens_lie_where_they_should_and_words_are_words() -> None:
    made = make_load(Load(num_requests=50, prompt=Equal(50), first_token=3, vocab_size=9))
    assert {t for a in made for t in a.token_ids} == set(range(3, 9))
    assert len(as_words(tuple(range(300))).split()) == 300 and as_words((1, 1)).split()[0] == as_words((1,))
    assert made[0].params.ignore_eos and made[0].params.temperature == 0


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "must be given"),
        ({"arrivals": Burst(), "duration_s": 3}, "num_requests"),
        ({"num_requests": 0}, "num_requests must be"),
        ({"num_requests": 1, "prefix_share": 1.5}, "prefix_share must be"),
        ({"num_requests": 1, "num_prefixes": 0}, "num_prefixes"),
        ({"num_requests": 1, "think_s": math.inf}, "think_s"),
        ({"num_requests": 1, "priorities": {}}, "priorities"),
        ({"num_requests": 1, "priorities": {0: 0}}, "priorities"),
        ({"num_requests": 1, "sampling": {"max_tokens": 3}}, "drawn from output"),
        ({"num_requests": 1, "sampling": {"n": 2}}, "one sequence"),
        ({"num_requests": 1, "sampling": {"warmth": 2}}, "warmth"),
        ({"num_requests": 1, "vocab_size": 100}, "first_token"),
    ],
)
def test_a_load_that_makes_no_sense(fields: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Load(**fields)


@pytest.mark.parametrize(
    "make", [lambda: Poisson(0), lambda: Constant(-1), lambda: Poisson(math.inf), lambda: Burst(1, 0), lambda: Poisson(True)]
)
def test_arrivals_are_checked(make) -> None:
    with pytest.raises(ValueError, match=r"rate|size"):
        make()


def test_short_forms(tmp_path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3, 4\n5")
    assert parse_lengths("16") == parse_lengths("equal:16") == Equal(16)
    assert parse_lengths("uniform:4:28") == Uniform(4, 28)
    assert (parse_lengths("exponential:16"), parse_lengths("exponential:2.5:64")) == (Exponential(16.0), Exponential(2.5, 64))
    assert parse_lengths("recorded:3,4,5") == parse_lengths(f"recorded:@{path}") == Recorded((3, 4, 5))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-3",
        "normal:3",
        "uniform:4",
        "uniform:5:4",
        "exponential:0.5",
        "exponential:nan",
        "recorded:",
        "recorded:@/nowhere/x",
        "recorded:1,0",
        "a",
    ],
)
def test_short_forms_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="distribution of lengths"):
        parse_lengths(text)
