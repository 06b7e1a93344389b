"""TextStream against decoding everything at once and cutting at the stop string, for every way to split."""

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.output import TextStream

SPECIAL = 10**6


class Pieces:
    """A tokenizer whose token i is the i-th of these byte strings; SPECIAL and above are special."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return b"<special>" if token_id >= SPECIAL else self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= SPECIAL


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)] or [b""]


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The oracle: for each end, from the first, does a stop string (the longest first) end there?"""
    for end in range(len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end - len(s)], s
    return text, None


def stream(pieces: list[bytes], stop=(), **kw) -> tuple[list[str], TextStream]:
    s = TextStream(Pieces(pieces), tuple(stop), **kw)
    return [s.push(i) for i in range(len(pieces))] + [s.finish()], s


TEXT = st.one_of(
    st.text(max_size=30), st.text(alphabet="ab", max_size=30), st.text(alphabet="a\u0301👩\u200d🚀你é<", max_size=20)
)
CUTS = st.lists(st.integers(0, 200), max_size=40)


@given(TEXT, CUTS, st.lists(st.text(alphabet="ab👩<é", min_size=1, max_size=4), max_size=3))
@example("👩‍🚀 e\u0301", list(range(30)), [])
@example("xaab", [1, 2, 3], ["aab"])
@example("aabaabaac", list(range(9)), ["aabaac"])
@example("abcd", [1, 2, 3], ["abcd", "bc"])
@settings(max_examples=400, deadline=None)
def test_any_split_gives_the_same_text(text, cuts, stop):
    out, s = stream(split(text.encode(errors="surrogatepass"), cuts), stop)
    whole = text.encode(errors="surrogatepass").decode(errors="replace")
    expected, by = cut(whole, stop)
    assert "".join(out) == s.text == expected
    assert s.stopped_by == by


@given(TEXT, CUTS, st.lists(st.text(alphabet="ab👩<é", min_size=1, max_size=4), max_size=2), st.integers(0, 40), TEXT)
@settings(max_examples=200, deadline=None)
def test_a_copy_goes_on_alone(text, cuts, stop, at, other):
    """A beam splits in the middle of whatever: a character, a stop string. Neither notices the other."""
    pieces, more = split(text.encode(errors="ignore"), cuts), split(other.encode(errors="ignore"), cuts)
    at = min(at, len(pieces))
    s = TextStream(Pieces([*pieces, *more]), tuple(stop))
    for i in range(at):
        s.push(i)
    copy, before = s.copy(), s.text
    rest = "".join([copy.push(len(pieces) + i) for i in range(len(more))] + [copy.finish()])
    assert copy.text == before + rest == cut(b"".join([*pieces[:at], *more]).decode(errors="replace"), stop)[0]
    rest = "".join([s.push(i) for i in range(at, len(pieces))] + [s.finish()])
    assert s.text == before + rest == cut(text.encode(errors="ignore").decode(), stop)[0]


@given(st.binary(max_size=40), CUTS)
@settings(max_examples=400, deadline=None)
def test_any_bytes(data, cuts):
    out, s = stream(split(data, cuts))
    assert "".join(out) == s.text == data.decode(errors="replace")


@given(TEXT, CUTS)
@settings(max_examples=200, deadline=None)
def test_pieces_hold_only_whole_characters(text, cuts):
    out, _ = stream(split(text.encode(errors="ignore"), cuts))
    assert all("\ufffd" not in piece for piece in out)


@given(st.text(alphabet="abc", max_size=20), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_releases_all_that_is_certain_and_nothing_more(text, stop):
    """After each character, released is exactly what every continuation would have in its text."""
    s = TextStream(Pieces([c.encode() for c in text]), stop)
    for i in range(len(text)):
        s.push(i)
        if s.stopped_by is not None:
            break
        seen = text[: i + 1]
        held = max((n for p in stop for n in range(len(p)) if seen.endswith(p[:n])), default=0)
        assert s.text == seen[: len(seen) - held]


def test_special_tokens():
    def text(**kw):
        s = TextStream(Pieces(["é".encode()[:1], "é".encode()[1:], b"x"]), **kw)
        return "".join([s.push(0), s.push(SPECIAL), s.push(1), s.push(2), s.finish()])

    assert text() == "éx"  # left out, also from the middle of a character
    assert text(skip_special_tokens=False) == "\ufffd<special>\ufffdx"


def test_stop_is_not_shown_and_ends_the_text():
    s = TextStream(Pieces([b"one ", b"EN", b"D two", b"three"]), ("END",))
    assert [s.push(i) for i in range(4)] == ["one ", "", "", ""]
    assert (s.finish(), s.text, s.stopped_by) == ("", "one ", "END")


def test_what_looked_like_a_stop_is_released_at_the_end():
    s = TextStream(Pieces([b"one ", b"EN", "é".encode()[:1]]), ("END",))
    assert [s.push(i) for i in range(3)] == ["one ", "", ""]
    assert (s.finish(), s.finish(), s.text, s.stopped_by) == ("EN\ufffd", "", "one EN\ufffd", None)
    with pytest.raises(RuntimeError, match="after finish"):
        s.push(0)


def test_stop_completed_by_the_last_bytes():
    """The unfinished character at the end becomes U+FFFD, and that may complete a stop string."""
    s = TextStream(Pieces([b"ab", b"\xe2"]), ("b\ufffd",))
    assert [s.push(0), s.push(1), s.finish()] == ["a", "", ""]
    assert s.stopped_by == "b\ufffd"


@pytest.mark.parametrize("stop", ["END", ("",), ("a", ""), (1,)])
def test_bad_stop(stop):
    with pytest.raises(ValueError, match="stop must be"):
        TextStream(Pieces([]), stop)


def test_linear_time():
    """Eight times the tokens take about eight times as long, also where nearly everything looks like a stop string."""

    def seconds(n: int) -> float:
        s = TextStream(Pieces([b"a" * 4]), ("a" * 300 + "b",))
        start = time.process_time()
        for _ in range(n):
            s.push(0)
        return time.process_time() - start

    seconds(1000)
    short, long = min(seconds(3000) for _ in range(3)), seconds(24000)
    assert long < 8 * short * 3


@pytest.mark.model
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_equals_the_tokenizers_own_decode(default_tokenizer, token_ids, skip):
    s = TextStream(default_tokenizer, skip_special_tokens=skip)
    pieces = [s.push(i) for i in token_ids] + [s.finish()]
    assert "".join(pieces) == s.text == default_tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def default_tokenizer(model_path):
    from engine.model.checkpoint import load_checkpoint

    return load_checkpoint(model_path).tokenizer
