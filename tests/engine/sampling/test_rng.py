"""The generator against the published answers of Random123, its two forms against each other, and its statistics."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.rng import philox4x32, philox4x32_array, uniform, uniforms

# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
word = st.integers(0, 2**32 - 1)
seed64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_known_answers(counter, key, answer):
    assert philox4x32(counter, key) == answer
    assert philox4x32_array(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])[:, 0].tolist() == list(
        answer
    )


def test_known_answers_through_uniform():
    """The place becomes the counter in the documented order and the seed the key, 53 bits of words 0 and 1."""
    (c0, c1, c2, c3), (k0, k1), (a, b, _, _) = KNOWN[2]
    expected = ((a << 32 | b) >> 11) / 2**53  # the top bits only agree in part: 27 of the first word, 26 of the second
    got = uniform(k1 << 32 | k0, c1, c0, c2, c3)
    assert got == ((a >> 5) * 2**26 + (b >> 6)) / 2**53
    assert abs(got - expected) < 2**-26


@given(st.lists(st.tuples(seed64, word, word), min_size=1, max_size=20), word, word)
def test_vectorised_equals_scalar(places, stream, sibling):
    seeds, samples, positions = zip(*places, strict=True)
    many = uniforms(seeds, samples, positions, stream, sibling)
    assert many.tolist() == [uniform(s, i, p, stream, sibling) for s, i, p in places]
    assert ((many >= 0) & (many < 1)).all()
    assert (many * 2**53 == np.floor(many * 2**53)).all()


def test_every_word_of_the_place_matters():
    draws = {
        uniform(*place)
        for place in [(1, 0, 0, 0), (2, 0, 0, 0), (1 << 40, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (1, 0, 0, 0, 1)]
    }
    assert len(draws) == 7


def test_uniform_in_law():
    """Chi-square over 64 cells, and lag-1 correlation along positions, seeds and samples; thresholds at about 1 in 10^5."""
    n = 1 << 16
    along = np.arange(n)
    for u in (uniforms([7], 0, along), uniforms(along, 0, [3]), uniforms([7], along, [3])):
        counts = np.bincount((u * 64).astype(int), minlength=64)
        chi2 = float(((counts - n / 64) ** 2 / (n / 64)).sum())
        assert chi2 < 63 + 4.5 * math.sqrt(2 * 63) + 10
        assert abs(float(np.corrcoef(u[:-1], u[1:])[0, 1])) < 4.5 / math.sqrt(n)


@pytest.mark.parametrize(
    "place", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**32), (0, 0, 0, 2**32)]
)
def test_out_of_range(place):
    with pytest.raises(ValueError, match="must be"):
        uniform(*place)
    seed, sample, position, *rest = place
    with pytest.raises(ValueError, match="must be"):
        uniforms([seed], [sample], [position], *rest)
