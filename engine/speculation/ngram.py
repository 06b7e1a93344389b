"""Prompt lookup: what followed the last tokens when they came before, in the prompt or in the output.

Saxena, "Prompt lookup decoding", 2023; vLLM's ``method="ngram"``: the longest suffix of ``prompt_lookup_max`` down to
``prompt_lookup_min`` tokens that came before decides. Of several occurrences the latest is taken (vLLM takes the first): text that
is being repeated or edited goes on from where it was repeated last, and a loop is followed in its latest form. An occurrence so
near the end that fewer than K tokens have followed it goes on with those that are proposed (as in LZ77), so a loop shorter than K
fills it all the same.
"""

from collections.abc import Sequence

from engine.speculation.base import Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig


class NgramDrafter(Drafter):
    """Costs a few dictionary entries for each new token of a request, however long it is."""

    method = "ngram"

    def __init__(self, config: SpeculativeConfig) -> None:
        self.longest, self.shortest = config.prompt_lookup_max, config.prompt_lookup_min
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        drafts = []
        for one in wanted:
            index = self._indexes.get(one.request.request_id)
            if index is None:
                index = self._indexes[one.request.request_id] = NgramIndex(self.longest, self.shortest)
            tokens = one.request.token_ids
            at = index.find(tokens)
            drafts.append(Draft([], []) if at is None else Draft.chain(follow(tokens, at, one.count), found_at=at))
        return drafts

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class NgramIndex:
    """Where in one sequence each run of ``shortest`` to ``longest`` tokens was last seen."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # run -> position behind its latest occurrence
        self._seen = 0  # runs that end before this position are in
        self._last = -1  # the token before it: the sequence is the one that was seen

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position behind the latest earlier occurrence of the longest suffix of ``tokens`` that has one; None: none has.

        ``tokens`` is what it was at the last call with more behind it; where it is not, everything is read anew.
        """
        if not 0 < self._seen < len(tokens) or tokens[self._seen - 1] != self._last:
            self._after.clear()
            self._seen = 0
        for end in range(self._seen + 1, len(tokens)):  # the suffix itself, which ends at the end, is no earlier occurrence
            for n in self._lengths:
                if n <= end:
                    self._after[tuple(tokens[end - n : end])] = end
        self._seen = max(0, len(tokens) - 1)
        self._last = tokens[self._seen - 1] if self._seen else -1
        for n in self._lengths:
            if n < len(tokens):
                at = self._after.get(tuple(tokens[len(tokens) - n :]))
                if at is not None:
                    return at
        return None


def follow(tokens: Sequence[int], at: int, count: int) -> list[int]:
    """``count`` tokens from position ``at`` on, and where the sequence ends, from those that were copied so far."""
    out = list(tokens[at : at + count])
    period = len(tokens) - at
    while len(out) < count:
        out.append(out[len(out) - period])
    return out
