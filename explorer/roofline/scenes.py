"""Scenes that a button stages with real requests, so that points of both kinds come about."""

from dataclasses import dataclass

from engine.request import SamplingParams
from explorer.i18n import _

STORY = (
    "The lighthouse stood on a rock that the sea covered twice a day. Its keeper wrote down every ship, its flag and its course, and the "
    "weather of the hour; in forty years he had not left out one. "
)
TOPICS = (
    "the sea",
    "an old clock",
    "a stolen painting",
    "winter bread",
    "two rivers",
    "a quiet robot",
    "the last train",
    "honey",
)


@dataclass(frozen=True)
class Scene:
    """``asks``: prompts and how, sent together."""

    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at
    asks: tuple[tuple[str, SamplingParams], ...]


_DECODE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "prefill", _("One long prompt"), _("A prompt of some hundred tokens and a short answer."),
            _("Each weight that is read is used for every token of the chunk: the squares stand far to the right, near or under the flat roof. The few "
              "circles are the same model with one token in hand."),
            ((STORY * 10 + "The last entry said that", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)),),
        ),
        Scene(
            "alone", _("Decode, batch 1"), _("One request that writes 40 tokens."),
            _("One token for each reading of all weights: two operations for each weight of so many bytes. The circles stand at the far left, under the "
              "slanted roof, and no faster arithmetic would move them up."),
            ((f"A short story about {TOPICS[0]}. Once", _DECODE),),
        ),
        Scene(
            "together", _("Decode, batch 8"), _("Eight requests that write 40 tokens each, at once."),
            _("The weights are read once for all eight: the circles move to the right and up along the slanted roof. The KV caches are not shared, "
              "so it is somewhat less than eight times as far."),
            tuple((f"A short story about {topic}. Once", _DECODE) for topic in TOPICS),
        ),
    )
}  # fmt: skip
