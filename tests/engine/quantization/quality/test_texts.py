"""What is evaluated and what is calibrated on have nothing in common, and are the same each time."""

import pytest

from engine.quantization.quality import texts
from tests.engine.engines import tiny_parts
from tests.engine.quantization.quality.models import Bytes


def test_prose_is_there_and_plain():
    prose = texts.prose()
    words = prose.split()
    assert 2500 <= len(words) <= 3500 and len({w.lower().strip(".,;:") for w in words}) > 950
    assert all(len(p.split()) > 25 for p in prose.split("\n\n"))  # no lists, no headings
    assert f"{len(words):,} words" in texts.facts()["prose"]


def test_python_help():
    whole = texts.python_help()
    assert 60_000 < len(whole) < 200_000 and "assert" in whole[:200]
    paragraphs = [" ".join(p.split()) for p in whole.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert "Python 3." in texts.facts()["python-help"]


def test_calibration_shares_no_passage_with_what_is_evaluated():
    evaluated = texts.word_runs(texts.python_help()) | texts.word_runs(texts.prose())
    for seed in (0, 1):
        for window in texts.calibration_tokens(Bytes(), tokens=16_384, window=1024, seed=seed):
            assert not texts.word_runs(Bytes().decode(window)) & evaluated
    assert len(texts.calibration_help()) > 150_000


def test_word_runs_would_find_a_shared_passage():
    """The test above can fail: a passage put into a calibration text is found."""
    stolen = "x y z " + " ".join(texts.prose().split()[50:70]) + " a b"
    assert texts.word_runs(stolen) & texts.word_runs(texts.prose())


def test_calibration_windows():
    tokenizer = tiny_parts()[0].tokenizer
    drawn = texts.calibration_tokens(tokenizer, tokens=1000, window=128, seed=3)
    assert [len(w) for w in drawn] == [128] * 7 + [104]
    assert drawn == texts.calibration_tokens(tokenizer, tokens=1000, window=128, seed=3)
    assert drawn != texts.calibration_tokens(tokenizer, tokens=1000, window=128, seed=4)
    chats = [w for w in drawn if "Assistant:" in tokenizer.decode(w)]
    assert len(chats) == 2
    assert len({tuple(w) for w in drawn}) == 8


def test_chats_are_written_by_the_template():
    class Chatty(Bytes):
        chat_template = "yes"

        def apply_chat_template(self, messages, add_generation_prompt):
            assert not add_generation_prompt and [m["role"] for m in messages] == ["user", "assistant"]
            return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    drawn = texts.calibration_tokens(Chatty(), tokens=1024, window=256)
    assert sum(Bytes().decode(w).startswith("<user>") for w in drawn) == 1


def test_evaluation_tokens():
    got = texts.evaluation_tokens(Bytes(), 300)
    assert {name: len(ids) for name, ids in got.items()} == {"python-help": 300, "prose": 300}
    assert Bytes().decode(got["prose"]) == texts.prose()[:300]
    with pytest.raises(ValueError, match="at least 2 of each text, got 1"):
        texts.evaluation_tokens(Bytes(), 1)


@pytest.mark.parametrize("tokens, window", [(0, 256), (100, 0), (10**8, 256)])
def test_impossible_sizes(tokens, window):
    with pytest.raises(ValueError, match=r"at least 1|the calibration text has"):
        texts.calibration_tokens(Bytes(), tokens, window)
