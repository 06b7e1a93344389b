"""Scenes that a button stages with real requests: acts, each with its knobs, and what to look at once they run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.request import SamplingParams
from explorer.i18n import _

SEED = 11  # one seed: what differs is the drafter, not the draws
CODE = """def area_of_square(side):
    result = side * side
    print("area of square:", result)
    return result

def area_of_rectangle(width, height):
    result = width * height
    print("area of rectangle:", result)
    return result

def area_of_circle(radius):
    result = 3.14159 * radius * radius
    print("area of circle:", result)
    return result

def area_of_triangle(base, height):
    result ="""
STORY = "The lighthouse keeper had not spoken to anybody for years, until one night"
MANY = 16
TOPICS = (
    "the sea", "an old clock", "a stolen painting", "winter bread", "two rivers", "a quiet robot", "the last train", "honey",
    "a borrowed coat", "the moon", "a wooden horse", "thunder", "a lost letter", "the baker", "glass", "an island",
)  # fmt: skip

Ask = tuple[Any, SamplingParams]  # prompt (text or token ids) and how


@dataclass(frozen=True)
class Act:
    """Knobs first, then requests, together; the next act begins when they have ended."""

    knobs: dict[str, Any]
    asks: list[Ask]
    words: str = ""  # said while it runs
    follow: bool = True  # whether the page turns to its first request


@dataclass(frozen=True)
class Scene:
    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at
    acts: Callable[[dict[str, Any], str], list[Act]] = field(
        repr=False
    )  # from the engine's knobs and the best drafter that it has


PLAINLY = _("The same once more with K = 0, for the clock…")
SPECULATING = _("With drafts…")


def both_ways(spec: dict[str, Any], asks: list[Ask], **knobs: Any) -> list[Act]:
    """With drafts, then the same requests without; the drafts stay on."""
    return [
        Act({"speculative": spec, **knobs}, asks, SPECULATING),
        Act({"speculative": {**spec, "num_speculative_tokens": 0}}, asks, PLAINLY, follow=False),
        Act({"speculative": spec}, []),
    ]


def _spec(method: str, k: int = 4) -> dict[str, Any]:
    made: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
    return made


def _copy(_now: dict[str, Any], _best: str) -> list[Act]:
    return both_ways(_spec("ngram", 6), [(CODE, SamplingParams(temperature=0, max_tokens=72, ignore_eos=True))])


def _creative(_now: dict[str, Any], best: str) -> list[Act]:
    params = SamplingParams(temperature=1.2, max_tokens=64, seed=SEED, ignore_eos=True)
    cool = Act({"speculative": _spec(best)}, [(STORY, params.changed(temperature=0))], _("First greedily…"))
    return [cool, *both_ways(_spec(best), [(STORY, params)])]


def _batch(now: dict[str, Any], best: str) -> list[Act]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asks: list[Ask] = [(f"A short story about {topic}. Once", params) for topic in TOPICS]
    room = {"max_num_seqs": MANY} if (now.get("max_num_seqs") or 0) < MANY else {}
    return [*both_ways(_spec(best), asks[:1]), *both_ways(_spec(best), asks, **room)]


SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "copy", _("Text that repeats itself"), _("Code whose functions are all alike, drafted by n-gram lookup, then without."),
            _("The n-gram drafter is free of any model: it looks where the last tokens stood before, and proposes what followed. In code that repeats "
              "itself that is often right for many tokens in a row: long green ribbons, several tokens a pass. Below, the clock says what that is worth."),
            _copy,
        ),
        Scene(
            "creative", _("Creative, temperature 1.2"), _("One story greedily, then at temperature 1.2, with the best drafter that this model has."),
            _("At temperature 1.2 fewer drafts are accepted than greedily: see Acceptance, by temperature. Not because of a rule against it: what counts is how "
              "far the two distributions overlap there (1 minus their total variation), and that depends on the pair. Measure it, do not guess."),
            _creative,
        ),
        Scene(
            "batch", _("Batch 1 against batch 16"), _("One request, then sixteen at once; each with drafts and without."),
            _("As many drafts are accepted in a batch of sixteen, and still it gains less, or loses: the pass over five tokens of each request is no longer "
              "nearly free once the arithmetic counts. In the clock, look at the cost of verifying, and at the best K."),
            _batch,
        ),
    )
}  # fmt: skip
