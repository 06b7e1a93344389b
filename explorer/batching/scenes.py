"""Scenes of the Batching page: a button sets the knobs, sends a load, and says what to look at."""

from dataclasses import dataclass, field
from typing import Any

from explorer.batching.load_settings import Settings
from explorer.i18n import _


@dataclass(frozen=True)
class Scene:
    """``knobs`` are moved first, ``load`` is sent then."""

    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at
    knobs: dict[str, Any]
    load: Settings = field(repr=False)


CONTINUOUS = {"batching": "continuous", "enable_chunked_prefill": True, "preemption_mode": "recompute", "scheduling_policy": "fcfs", "max_num_waiting": None}  # fmt: skip
SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "static", _("Static: together in, together out"), _("24 requests of very different lengths, eight in a batch."),
            _("Every batch begins with a block of prefill and ends with its longest answer. Whoever has ended before keeps its slot: dotted is padding, computed for "
              "nobody. And the queue stands still meanwhile. (The first request finds an idle engine, and gets a batch of its own.) Press the next scene for the same requests, continuous."),
            {**CONTINUOUS, "batching": "static", "max_num_seqs": 8},
            Settings(arrivals="at once", num_requests=24, prompt_shape="uniform", prompt_tokens=48, output_shape="exponential", output_tokens=28, seed=3),
        ),
        Scene(
            "continuous", _("Continuous: a slot is never empty"), _("The same 24 requests; whoever ends makes room at the next step."),
            _("No dots: where a bar ends, another request's prefill begins in the next step. Compare time, padding and the queue with the static run: "
              "the tab “Two schedulers” puts both on one axis."),
            {**CONTINUOUS, "max_num_seqs": 8},
            Settings(arrivals="at once", num_requests=24, prompt_shape="uniform", prompt_tokens=48, output_shape="exponential", output_tokens=28, seed=3),
        ),
        Scene(
            "chunks", _("Long prompts in small chunks"), _("Prompts of 300 tokens arrive among running answers; the budget is 64 tokens a step."),
            _("Tokens of each step: the decodes take one each, and the rest of the budget goes to a slice of a prompt. Steps stay short, so the running answers keep "
              "coming. Switch chunked prefill off among the live knobs and start the load again: single steps tower above the rest, and ITL p99 with them."),
            {**CONTINUOUS, "max_num_seqs": 8, "max_num_batched_tokens": 64},
            Settings(arrivals="poisson", rate=3.0, num_requests=20, prompt_shape="equal", prompt_tokens=300, output_shape="equal", output_tokens=32, seed=5),
        ),
        Scene(
            "overload", _("More than it can take"), _("Requests come faster than it can serve them, and no more than 16 may wait."),
            _("The queue fills up to its limit and stays there: those who come then are refused at once (queue full), and time to first token stays bounded. Without "
              "the limit it would grow for as long as the load lasts. Move the arrival rate down and watch the queue drain."),
            {**CONTINUOUS, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_num_waiting": 16},
            Settings(arrivals="poisson", rate=16.0, num_requests=480, prompt_shape="uniform", prompt_tokens=48, output_shape="exponential", output_tokens=32, seed=7),
        ),
    )
}  # fmt: skip
MOVED = tuple(dict.fromkeys(name for scene in SCENES.values() for name in scene.knobs))
