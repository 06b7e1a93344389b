"""Two small probes of what averages hide: finding a number far back in the context, and adding two numbers.

Nothing is generated: the right continuation is given (teacher forcing), and a digit counts as right when its logit is the largest.
So a digit is judged with those before it right, which is kinder than generation, and the same for every model that is compared.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.quantization.quality.perplexity import token_nlls
from engine.quantization.quality.rows import Logits, Tokenizing, check_finite, rows_from

KEYS = 8  # in each retrieval prompt; of one alone a small model misses nothing, of these it misses a third
ADDITIONS = 24  # scored in each arithmetic prompt
EXAMPLES = 8  # shown before them
_QUARTERS = ("1st quarter", "2nd quarter", "3rd quarter", "4th quarter")  # of the filler, where a key was planted

_PLACES = (
    "mill",
    "ferry",
    "chapel",
    "orchard",
    "quarry",
    "bakery",
    "lighthouse",
    "stable",
    "forge",
    "brewery",
    "granary",
    "tannery",
)
_WHO = (
    "The baker",
    "A tall stranger",
    "The ferryman's aunt",
    "Every second neighbour",
    "The clerk",
    "A boy with a drum",
    "The widow",
)
_DID = (
    "walked past",
    "spoke at length about",
    "painted a picture of",
    "forgot",
    "complained about",
    "counted",
    "swept",
    "admired",
)
_WHAT = (
    "the wet cobbles",
    "an old grey cart",
    "the geese",
    "the broken fence",
    "a row of lanterns",
    "the market stalls",
    "the north wind",
)
_WHEN = ("before breakfast", "on Tuesday", "without a word", "as the rain began", "until the bell rang", "in the usual manner")


@dataclass(frozen=True, slots=True)
class Answer:
    """One thing asked in a prompt: the scored tokens ``positions``, and the parts of the probe that it belongs to.

    The name of a part begins with a number, by which they are listed ("512 tokens", "1st quarter", "2-digit addend").
    """

    positions: tuple[int, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with the right answers in them."""

    token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """What a model made of one probe, or of one part of it (a length, a depth, a size).

    ``mean_margin``: the right token's logit minus the largest other one, mean over tokens; ``mean_nll``: of the right tokens, nats.
    """

    name: str
    answers: int
    right: int  # answers with every token right
    tokens: int
    right_tokens: int
    chance: float  # that a token is right when any digit (for tokens of several digits: any number) is as good as another
    mean_margin: float
    mean_nll: float

    @property
    def share(self) -> float:
        """Of tokens that are right."""
        return self.right_tokens / self.tokens

    @property
    def exact(self) -> float:
        """Of answers that are right as a whole."""
        return self.right / self.answers

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of ``exact`` over other prompts of the kind (Wilson, 1927): two models on the same prompts differ by less chance."""
        return wilson(self.right, self.answers)


def wilson(right: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share. ValueError without trials."""
    if not 0 <= right <= of or of < 1:
        raise ValueError(f"a share needs 0 <= right <= trials and a trial, got {right} of {of}")
    share, n = right / of, of
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


class _Writer:
    """Token ids piece by piece, so that it is known which are answers."""

    def __init__(self, tokenizer: Tokenizing) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []

    def text(self, text: str) -> None:
        self.ids += self.tokenizer.encode(text)

    def answer(self, text: str) -> tuple[int, ...]:
        """Write it and give the positions of the tokens that have digits in them (a space alone is no achievement)."""
        start = len(self.ids)
        self.ids += self.tokenizer.encode(text)
        found = (i for i in range(start, len(self.ids)) if any(c.isdigit() for c in self.tokenizer.decode([self.ids[i]])))
        positions = tuple(found)
        if not positions:
            raise ValueError(f"the tokenizer has no tokens with digits for {text!r}")
        return positions


def retrieval_prompt(tokenizer: Tokenizing, length: int, seed: int | str, keys: int = KEYS) -> Prompt:
    """Filler with ``keys`` numbers planted evenly in it, and all asked for at the end in another order; at most ``length`` tokens.

    ValueError where so many keys do not fit, or there are more than there are places.
    """
    if not 1 <= keys <= len(_PLACES):
        raise ValueError(f"keys must lie in [1, {len(_PLACES)}], got {keys}")
    rng = random.Random(f"retrieval {length} {seed}")
    places = rng.sample(_PLACES, keys)
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in places]
    depths = [(i + 0.5) / keys for i in range(keys)]
    planted = [tokenizer.encode(f" The number of the {place} is {number}.") for place, number in zip(places, numbers)]
    ending = _Writer(tokenizer)
    ending.text("\n\nWhat are the numbers?\n")
    asked = rng.sample(range(keys), keys)
    answers = []
    for i in asked:
        ending.text(f"The number of the {places[i]} is")
        answers.append((i, ending.answer(f" {numbers[i]}")))
        ending.text(".\n")
    room = length - len(ending.ids) - sum(map(len, planted))
    filler = _filler(tokenizer, room, rng)
    if not filler:
        raise ValueError(f"{keys} keys and a sentence of filler need more than {length} tokens")
    at = [round(depth * len(filler)) for depth in depths]
    before: list[int] = []
    for i, sentence in enumerate([*filler, []]):
        for key in (k for k in range(keys) if at[k] == i):
            before += planted[key]
        before += sentence

    def answer(key: int, there: tuple[int, ...]) -> Answer:
        return Answer(tuple(len(before) + t for t in there), (f"{length} tokens", _QUARTERS[int(4 * depths[key])]))

    return Prompt(tuple(before + ending.ids), tuple(answer(key, there) for key, there in answers))


def _filler(tokenizer: Tokenizing, room: int, rng: random.Random) -> list[list[int]]:
    sentences: list[list[int]] = []
    while True:
        text = " ".join(map(rng.choice, (_WHO, _DID, _WHAT, _WHEN)))
        sentence = list(tokenizer.encode(f" {text}."))
        room -= len(sentence)
        if room < 0:
            return sentences
        sentences.append(sentence)


def arithmetic_prompt(
    tokenizer: Tokenizing, digits: int, seed: int | str, scored: int = ADDITIONS, examples: int = EXAMPLES
) -> Prompt:
    """Additions, a line each: to a number of two digits one of ``digits`` (1 or 2). No line is there twice.

    The first ``examples`` only show how it goes. One kind a prompt: mixed, a small model fails at both. ValueError for another
    number of digits, or numbers of lines that are not possible.
    """
    if digits not in (1, 2):
        raise ValueError(f"digits of the second number must be 1 or 2, got {digits}")
    low, high = 10 ** (digits - 1), 10**digits
    span = high - low
    if scored < 1 or examples < 0 or scored + examples > 90 * span:
        raise ValueError(f"scored must be at least 1 and {90 * span} lines at most, got {scored} and {examples} examples")
    rng = random.Random(f"arithmetic {digits} {seed}")
    writer, answers = _Writer(tokenizer), []
    for line, pair in enumerate(rng.sample(range(90 * span), scored + examples)):
        a, b = 10 + pair // span, low + pair % span
        writer.text(f"{a} + {b} =")
        positions = writer.answer(f" {a + b}")
        if line >= examples:
            answers.append(Answer(positions, (f"{digits}-digit addend",)))
        writer.text("\n")
    return Prompt(tuple(writer.ids), tuple(answers))


@dataclass(frozen=True, slots=True)
class _Scored:
    answer: Answer
    right: tuple[bool, ...]
    margins: tuple[float, ...]
    nlls: tuple[float, ...]
    chances: tuple[float, ...]


def _run(logits: Logits, tokenizer: Tokenizing, prompt: Prompt, what: str) -> list[_Scored]:
    ids = list(prompt.token_ids)
    positions = [t for answer in prompt.answers for t in answer.positions]
    first = min(positions) - 1
    rows = rows_from(logits, ids, first)[[t - 1 - first for t in positions]]
    check_finite(rows, positions, what)
    targets = [ids[t] for t in positions]
    index = torch.tensor(targets, device=rows.device)[:, None]
    own = rows.double().gather(-1, index)[:, 0]
    margins = (own - rows.double().scatter(-1, index, float("-inf")).amax(-1)).tolist()
    right = (rows.argmax(-1) == index[:, 0]).tolist()
    nlls = token_nlls(rows, targets).tolist()
    chances = [0.1 ** sum(c.isdigit() for c in tokenizer.decode([t])) for t in targets]
    scored, at = [], 0
    for answer in prompt.answers:
        end = at + len(answer.positions)
        parts = (tuple(x[at:end]) for x in (right, margins, nlls, chances))
        scored.append(_Scored(answer, *parts))
        at = end
    return scored


def _score(name: str, scored: Sequence[_Scored]) -> Score:
    tokens = sum(len(s.right) for s in scored)

    def mean(of: Callable[[_Scored], tuple[float, ...]]) -> float:
        return math.fsum(x for s in scored for x in of(s)) / tokens

    return Score(
        name, len(scored), sum(all(s.right) for s in scored), tokens, sum(sum(s.right) for s in scored),
        mean(lambda s: s.chances), mean(lambda s: s.margins), mean(lambda s: s.nlls),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The whole, and the same answers by part: retrieval by length and by depth, additions by size."""

    total: Score
    parts: tuple[Score, ...]


def run_probe(
    logits: Logits,
    tokenizer: Tokenizing,
    name: str,
    prompts: Sequence[Prompt],
    progress: Callable[[int, int], None] | None = None,
) -> ProbeResult:
    """Score the answers in ``prompts``. ``progress(done, total)`` counts tokens that the model has read, after each prompt.

    ValueError: no prompts, or logits that are inf or NaN.
    """
    if not prompts:
        raise ValueError(f"{name}: there are no prompts to score")
    total, done = sum(len(prompt.token_ids) for prompt in prompts), 0
    scored = []
    for prompt in prompts:
        scored += _run(logits, tokenizer, prompt, name)
        done += len(prompt.token_ids)
        if progress is not None:
            progress(done, total)
    parts = {part: (i, int(re.findall(r"\d+", part)[0])) for s in scored for i, part in enumerate(s.answer.parts)}
    found = (_score(part, [s for s in scored if part in s.answer.parts]) for part in sorted(parts, key=lambda part: parts[part]))
    return ProbeResult(_score(name, scored), tuple(found))
