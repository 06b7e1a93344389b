"""Scenes that a button stages with real requests: what is sent, and what to look at once it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import SamplingParams
from explorer.i18n import _

LOOPING = "We walked and walked, and"
SHARP = "The capital of France is"
FLAT = "My favourite"
DARTS = "Once upon a time there was"
BEAMS = "The scientist opened the door and"
SEED = 7  # one seed: the same darts for every request of a scene
LOGITS = 96  # tokens of which the full logits are kept, for exact what-ifs


@dataclass(frozen=True)
class Scene:
    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at
    requests: Callable[[], list[tuple[str, SamplingParams]]]
    far: bool = False  # what to look at is the card of the beams, far below the button


def _loop() -> list[tuple[str, SamplingParams]]:
    greedy = SamplingParams(temperature=0, max_tokens=72, ignore_eos=True)
    return [(LOOPING, greedy), (LOOPING, greedy.changed(repetition_penalty=1.3))]


def _top_k() -> list[tuple[str, SamplingParams]]:
    params = SamplingParams(temperature=1, top_k=10, max_tokens=24, seed=SEED, ignore_eos=True)
    return [(SHARP, params), (FLAT, params)]


def _darts() -> list[tuple[str, SamplingParams]]:
    return [
        (DARTS, SamplingParams(temperature=t, max_tokens=32, seed=SEED, ignore_eos=True)) for t in (0.2, 1.0, 2.0)
    ]  # fmt: skip


def _beams() -> list[tuple[str, SamplingParams]]:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    return [(BEAMS, greedy), (BEAMS, greedy.changed(beam_width=4))]


SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "loop", _("A loop, and a penalty"), _("The same prompt greedily, without and with a repetition penalty of 1.3."),
            _("Without a penalty the text soon goes round and round, ever surer of itself: entropy falls, the shades fade. With it, every token that was "
              "there is pushed down. Move the repetition penalty on a token of the first text: a positive logit is divided, a negative one multiplied, so "
              "both become less likely. Had both been divided, the negative ones would gain."),
            _loop,
        ),
        Scene(
            "top-k", _("Top-k 10, sharp and flat"), _("Top-k 10 after a prompt with one answer, and after one with hundreds."),
            _("Ten is too many where one token holds nearly everything: nine are let in that have no business there. It is too few where hundreds are as "
              "good: below, see how little mass ten of them hold. A nucleus (top-p) breathes with the distribution, a fixed k does not."),
            _top_k,
        ),
        Scene(
            "darts", _("Temperature 0.2, 1, 2, same darts"), _("One seed, so the same u at every position, at three temperatures."),
            _("The dart does not move; the bar beneath it does. At 0.2 the first piece covers nearly everything, at 2 the pieces behind it grow, and the "
              "same u falls on another token. From the first token that differs on the texts part, and with them the bars."),
            _darts,
        ),
        Scene(
            "beams", _("Beam search against greedy"), _("Greedy and a beam search of width 4 from the same prompt."),
            _("What you see first is the greedy text: it takes the best token each time and may regret it. The beams keep four beginnings alive: in the card "
              "Beams, the last of this page, look at who died when, and compare the sums of log-probabilities. Likelier is not better: the same card "
              "counts the repeated 3-grams."),
            _beams, far=True,
        ),
    )
}  # fmt: skip
