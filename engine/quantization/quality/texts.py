"""The texts that quality is measured on, and others to calibrate with. Nothing is fetched: Python's own help, and prose of ours."""

import platform
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from engine.quantization.quality.rows import Tokenizing

HELP, PROSE = "python-help", "prose"
TOKENS = 4096  # of each text, at most
_EVALUATED = 0.25  # of the characters of Python's help; the rest is for calibration
_SHARED_WORDS = 12  # a paragraph that shares such a run of words with the evaluated ones is not calibrated on

_SUBJECTS = ("a rainbow", "bread that rises", "the tides", "a bicycle's gears", "a library card", "an echo", "soap", "a compass")
_READERS = ("a child of seven", "my grandmother", "a new colleague", "someone in a hurry", "a class of beginners")
_ASKED = (
    "Explain {subject} to {reader}, please.",
    "What would you tell {reader} about {subject}?",
    "I have to write a short note on {subject} for {reader}. How should it begin?",
    "Give me two questions that {reader} may have about {subject}.",
)
_ANSWERED = (
    "Gladly. The best way into {subject} is something that {reader} has already seen and can point at.",
    "I would start with one plain example of {subject}, and wait until {reader} asks why it is so.",
    "There is more than one answer, but for {reader} the simplest picture of {subject} will do at first.",
)


def facts() -> dict[str, str]:
    """What the texts are, for whoever compares numbers: Python's help differs from one version of Python to the next."""
    return {
        HELP: f"pydoc_data.topics of Python {platform.python_version()}: the first quarter of its paragraphs, repeated ones left out",
        PROSE: f"an essay of {len(prose().split()):,} words that comes with this package",
    }


@cache
def prose() -> str:
    """The prose."""
    return (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8").strip()


def python_help() -> str:
    """The part of Python's help that is evaluated."""
    return "\n\n".join(_help_parts()[0])


def calibration_help() -> str:
    """The part of Python's help to calibrate on: no paragraph of it is evaluated."""
    return "\n\n".join(_help_parts()[1])


def evaluation_tokens(tokenizer: Tokenizing, tokens: int = TOKENS) -> dict[str, list[int]]:
    """Name -> token ids of the evaluated texts, the first ``tokens`` of each. ValueError for fewer than 2."""
    if tokens < 2:
        raise ValueError(f"tokens must be at least 2 of each text, got {tokens}")
    return {name: tokenizer.encode(text)[:tokens] for name, text in ((HELP, python_help()), (PROSE, prose()))}


def calibration_tokens(tokenizer: Tokenizing, tokens: int = 4096, window: int = 256, seed: int = 0) -> list[list[int]]:
    """Sequences for GPTQ and AWQ, ``tokens`` in all, ``window`` each (the last may be shorter): one in four holds chats.

    The others are drawn without overlap from the part of Python's help that is not evaluated. The same for the same arguments.
    ValueError for sizes that are not possible, or more tokens than there are.
    """
    if window < 1 or tokens < 1:
        raise ValueError(f"tokens and window must be at least 1, got {tokens} and {window}")
    rng = random.Random(seed)
    count = -(-tokens // window)
    chats = count // 4
    ids = tokenizer.encode(calibration_help())
    starts = range(0, len(ids) - window + 1, window)
    if count - chats > len(starts):
        raise ValueError(f"{count - chats} windows of {window} tokens are wanted, the calibration text has {len(starts)}")
    drawn = [ids[start : start + window] for start in rng.sample(starts, count - chats)]
    drawn += [_chats(tokenizer, window, rng) for _ in range(chats)]
    rng.shuffle(drawn)
    drawn[-1] = drawn[-1][: tokens - (count - 1) * window]
    return drawn


def _chats(tokenizer: Tokenizing, tokens: int, rng: random.Random) -> list[int]:
    """Chats one after another, as the checkpoint's template writes them; plainly where it has none."""
    ids: list[int] = []
    while len(ids) < tokens:
        about = {"subject": rng.choice(_SUBJECTS), "reader": rng.choice(_READERS)}
        ids += _chat(tokenizer, rng.choice(_ASKED).format(**about), rng.choice(_ANSWERED).format(**about))
    return ids[:tokens]


def _chat(tokenizer: Any, asked: str, answered: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(f"User: {asked}\nAssistant: {answered}\n\n"))
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=False))


@cache
def _help_parts() -> tuple[list[str], list[str]]:
    """(evaluated, for calibration): paragraphs of the topics in sorted order, each once. The same passage is in several topics."""
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}  # by its words
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            if paragraph.strip():
                paragraphs.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    room = _EVALUATED * sum(map(len, paragraphs.values()))
    evaluated, rest, runs = [], [], set()
    for words, paragraph in paragraphs.items():
        if room > 0:
            room -= len(paragraph)
            evaluated.append(paragraph)
            runs |= word_runs(words)
        elif not word_runs(words) & runs:
            rest.append(paragraph)
    return evaluated, rest


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Every run of so many words in a row that two texts which share it are taken to share a passage."""
    words = text.split()
    return {tuple(words[i : i + _SHARED_WORDS]) for i in range(len(words) - _SHARED_WORDS + 1)}
