"""What to speculate with: the drafter, how many tokens it proposes, and how they are accepted."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from engine.strict import strict

METHODS = ("draft_model", "ngram", "lookahead", "rest", "layer_skip", "medusa", "eagle")
ACCEPTANCES = ("rejection", "coupled", "typical")
MAX_SPECULATIVE_TOKENS = 16
AUTO = "auto"
_SAMPLES = ("draft_model", "layer_skip", "eagle")  # can draw from a distribution of their own
_TREES = ("medusa", "eagle")
_TRAINED = ("draft_model", "rest", "layer_skip", "medusa", "eagle")
_CONFIDENT = ("draft_model", "rest", "layer_skip", "eagle")  # draft token after token, and can stop
_MAX_TREE = 64  # nodes


@strict
@dataclass(frozen=True)
class SpeculativeConfig:
    """Names are vLLM's where it has one. A value out of range raises ValueError.

    ``acceptance`` of sampled drafts: "rejection" (Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318) or
    "coupled" (draft and target are drawn with the same number, accepted when equal: the text is that of plain decoding). What
    is not sampled (n-gram, Lookahead, REST, Medusa, any drafter at temperature 0) is accepted when the target's own draw equals it,
    whatever this says. "typical" (Medusa only; Cai et al., arXiv 2401.10774, section 3.3.1) is not lossless.
    """

    method: str
    _: KW_ONLY
    num_speculative_tokens: int | str = 4  # K: tokens proposed in a row (with a tree: its depth); 0: none; "auto": as many as pay
    model: str | None = None  # draft model, heads, layer or exit: a path; None: what ships for the default model
    acceptance: str = "rejection"
    tree: tuple[int, ...] | None = None  # children of a node at each depth, of the best nodes only; None: a chain
    prompt_lookup: bool = False  # not n-gram: look the request's own text up first, and draft where nothing is found
    draft_confidence: float | None = None  # stop behind the token that makes the product of the draft's probabilities fall below
    prompt_lookup_max: int = 4  # n-gram: longest match looked for
    prompt_lookup_min: int = 2  # and the shortest
    lookahead_window: int = 8  # Lookahead: columns of the Jacobi window
    lookahead_ngram: int = 4  # and the n of its n-grams
    exit_layer: int | None = None  # layer_skip: how many of the target's layers draft; None: as the exit was trained
    trained_exit: bool = True  # layer_skip: False leaves out the trained exit and reads the target's own head there

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        check(self.method in METHODS, "method", f"one of {METHODS}")
        k = self.num_speculative_tokens
        check(
            k == AUTO or _integer(k, 0, MAX_SPECULATIVE_TOKENS),
            "num_speculative_tokens",
            f"an integer in [0, {MAX_SPECULATIVE_TOKENS}] or 'auto'",
        )
        check(self.model is None or (isinstance(self.model, str) and self.model != ""), "model", "None or the path of a drafter")
        check(self.model is None or self.method in _TRAINED, "model", f"None for {self.method}")
        check(self.acceptance in ACCEPTANCES, "acceptance", f"one of {ACCEPTANCES}")
        check(self.acceptance != "typical" or self.method == "medusa", "acceptance", "'rejection' or 'coupled' but for medusa")
        if self.tree is not None:
            try:
                object.__setattr__(self, "tree", tuple(self.tree))
            except TypeError:
                check(False, "tree", "None or a sequence of integers")
            check(self.method in _TREES, "tree", f"None for {self.method} (a tree is for {_TREES})")
            fits = 0 < len(self.tree) <= MAX_SPECULATIVE_TOKENS and all(_integer(n, 1, 16) for n in self.tree)
            check(fits and sum(self.tree) <= _MAX_TREE, "tree", f"integers in [1, 16], at most {_MAX_TREE} together")
        check(isinstance(self.prompt_lookup, bool), "prompt_lookup", "a bool")
        check(not self.prompt_lookup or self.method in _TRAINED, "prompt_lookup", f"False but for {_TRAINED}")
        check(
            self.draft_confidence is None
            or (self.method in _CONFIDENT and self.tree is None and 0 <= self.draft_confidence <= 1),
            "draft_confidence",
            f"None, or for chains of {_CONFIDENT} in [0, 1]",
        )
        for name, low, high in (
            ("prompt_lookup_max", 1, 16),
            ("prompt_lookup_min", 1, 16),
            ("lookahead_window", 1, 32),
            ("lookahead_ngram", 2, 8),
        ):
            check(_integer(getattr(self, name), low, high), name, f"an integer in [{low}, {high}]")
        check(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            f"at most prompt_lookup_max ({self.prompt_lookup_max})",
        )
        check(
            self.exit_layer is None or (self.method == "layer_skip" and _integer(self.exit_layer, 1, 1 << 10)),
            "exit_layer",
            "None, or for layer_skip an integer >= 1",
        )
        check(isinstance(self.trained_exit, bool), "trained_exit", "a bool")

    @property
    def samples(self) -> bool:
        """Whether the drafter has a distribution to draw from at a temperature above 0."""
        return self.method in _SAMPLES

    def changed(self, **changes: Any) -> "SpeculativeConfig":
        """A copy with these fields changed; ValueError for a name that is not a field."""
        return replace(self, **changes)


def _integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
