"""What the rounds come to: acceptance by position, accepted lengths, tokens per pass; by drafter, rule and temperature. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from explorer.i18n import _
from explorer.speculation.rows import AFTER_LOOKUP, StepRow, Tally

MAX_GROUPS = 5  # that can be told apart in one figure; the newest
AVERAGED = 20  # steps in the running mean of tokens per pass

METHODS = {
    "ngram": _("n-gram"),
    "lookahead": _("Lookahead"),
    "rest": _("REST"),
    "draft_model": _("draft model"),
    "layer_skip": _("layer skipping"),
    "medusa": _("Medusa"),
    "eagle": _("EAGLE"),
}
RULES = {
    "rejection": _("rejection"),
    "draw": _("the target's own draw"),
    "typical": _("typical acceptance"),
}


def method_name(method: str) -> str:
    """``method``: as ``rows.told_method`` gives it."""
    own = method.removesuffix(AFTER_LOOKUP)
    name = METHODS.get(own, own)
    return name if own == method else _("{drafter} after lookup").format(drafter=name)


def rule_name(rule: str) -> str:
    return RULES.get(rule, rule)


@dataclass
class Group:
    """All rounds of one drafter, rule and temperature. ``reached[d]``: drafts that proposed something at depth d+1 and were accepted
    up to there; ``passed[d]``: those accepted there too; ``proposed[d]``: all that proposed something there."""

    method: str
    rule: str
    temperature: float
    rounds: int = 0
    nodes: int = 0
    accepted: int = 0
    kept: int = 0
    proposed: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # lengths[n]: rounds that accepted n

    @property
    def name(self) -> str:
        return _("{drafter}, {rule}, temperature {t:g}").format(
            drafter=method_name(self.method), rule=rule_name(self.rule), t=self.temperature
        )

    def add(self, tally: Tally) -> None:
        self.rounds, self.nodes = self.rounds + 1, self.nodes + tally.nodes
        self.accepted, self.kept = self.accepted + tally.accepted, self.kept + tally.kept
        for counts in (self.proposed, self.reached, self.passed):
            counts += [0] * (tally.depth - len(counts))
        self.lengths += [0] * (tally.depth + 1 - len(self.lengths))
        self.lengths[tally.accepted] += 1
        for d in range(tally.depth):
            self.proposed[d] += 1
            self.reached[d] += tally.accepted >= d
            self.passed[d] += tally.accepted > d

    @property
    def rate(self) -> float:
        """Chance that a token is accepted, given that all before it were: the a of the modelled curve."""
        return sum(self.passed) / sum(self.reached) if sum(self.reached) else float("nan")

    @property
    def per_pass(self) -> float:
        """Tokens that came out of a pass of the target in which there was a draft."""
        return self.kept / self.rounds if self.rounds else float("nan")

    def metrics(self) -> list[tuple[str, str]]:
        """Under vLLM's names; these count since the engine started there, here of what is kept."""
        per_pos = ", ".join(f"{n:,}" for n in self.passed)
        return [
            ("vllm:spec_decode_num_drafts", f"{self.rounds:,}"),
            ("vllm:spec_decode_num_draft_tokens", f"{self.nodes:,}"),
            ("vllm:spec_decode_num_accepted_tokens", f"{self.accepted:,}"),
            ("vllm:spec_decode_num_accepted_tokens_per_pos", per_pos),
        ]


def groups(tallies: Iterable[Tally], step: int) -> list[Group]:
    """The groups of the rounds up to ``step``, the one that was added to last first; at most ``MAX_GROUPS``."""
    found: dict[tuple[str, str, float], Group] = {}
    for tally in tallies:
        if tally.step > step:
            break
        key = (tally.method, tally.rule, tally.temperature)
        group = found.pop(key, None) or Group(*key)
        found[key] = group
        group.add(tally)
    return list(reversed(found.values()))[:MAX_GROUPS]


def per_pass(steps: Sequence[StepRow], window: int = AVERAGED) -> tuple[list[int], list[float], list[float]]:
    """(steps, tokens a request gained in each, the mean of the newest ``window`` of them)."""
    if not steps:
        return [], [], []
    each = np.array([row.kept / row.batch for row in steps])
    summed = np.concatenate([[0.0], np.cumsum(each)])
    first = np.maximum(np.arange(1, len(each) + 1) - window, 0)
    mean = (summed[1:] - summed[first]) / (np.arange(1, len(each) + 1) - first)
    return [row.step for row in steps], each.tolist(), mean.tolist()
