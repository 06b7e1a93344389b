"""Lookahead decoding: n-grams that the target itself made up ahead of the text, found by Jacobi iteration (no draft model).

Fu, Bailis, Stoica and Zhang, "Break the sequential dependency of LLM inference using lookahead decoding", arXiv 2402.02057.

The window has W columns and N - 1 levels of guessed tokens. Level 0 is a guess of the next W positions, each level after it
what the target said, one step later each, would follow the one before: column j of level r stands for the position j + r behind
the text's last token, and sees level 0 up to its own column, then its own column down to its own level (section 3.1, figure 2).
That is a tree whose root is the last token (column 0 of level 0), so a step computes the window as further nodes of the draft.
What the target says after the last level makes an n-gram of each column, which goes into a pool; then the first level is dropped.

The pool only proposes: n-grams that begin with the last token, verified exactly like any draft (section 3.2). What has been written
already is in it, too.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.speculation.base import Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig


class LookaheadDrafter(Drafter):
    method = "lookahead"

    def __init__(self, config: SpeculativeConfig) -> None:
        self.columns, self.n = config.lookahead_window, config.lookahead_ngram
        self.num_window = self.columns * (self.n - 1) - 1  # column 0 of level 0 is the last token itself
        self._states: dict[str, _State] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        drafts = []
        for one in wanted:
            tokens = one.request.token_ids
            state = self._states.get(one.request.request_id)
            if state is None or state.pool.seen > len(tokens):
                pool = NgramPool(self.n, self.columns)
                state = self._states[one.request.request_id] = _State(pool, random.Random(one.request.seed))
            state.pool.read(tokens)
            draft = state.pool.candidates(tokens[-1], one.count)
            state.pending = one.window >= self.num_window > 0
            if state.pending:
                self._align(state, tokens)
                self._add_window(draft, state.levels)
            drafts.append(draft)
        return drafts

    def observe_window(self, request: Any, token_ids: Sequence[int]) -> None:
        state = self._states.get(request.request_id)
        if state is None or not state.pending:
            return
        state.pending = False
        said = list(token_ids)
        if self.n == 2:  # the last level is the first: what follows its column 0 is the text itself
            said.insert(0, request.token_ids[state.base + 1] if len(request.token_ids) > state.base + 1 else said[0])
        if len(said) != self.columns:
            raise RuntimeError(f"the window has {self.columns} columns, {len(said)} tokens came back")
        for column in zip(*state.levels, said, strict=True):
            state.pool.add(column)
        state.levels = [*state.levels[1:], said]
        state.base += 1

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def _align(self, state: "_State", tokens: Sequence[int]) -> None:
        """Column 0 of level 0 is the last token now: columns that were overtaken leave, new ones come in as guesses from the text."""

        def guesses(count: int) -> list[int]:
            return [state.random.choice(tokens) for _ in range(count)]

        last = len(tokens) - 1
        gone = last - state.base
        if not state.levels or not 0 <= gone <= self.columns:
            state.levels, gone = [[] for _ in range(self.n - 1)], 0
        state.levels = [level[gone:] + guesses(self.columns - len(level[gone:])) for level in state.levels]
        state.levels[0][0] = tokens[-1]
        state.base = last

    def _add_window(self, draft: Draft, levels: list[list[int]]) -> None:
        above = [-1] * self.columns  # the node of each column on the level before
        for r, level in enumerate(levels):
            for j, token in enumerate(level):
                if r == 0 and j == 0:
                    continue
                draft.parents.append(above[j - 1] if r == 0 else above[j])
                draft.token_ids.append(token)
                above[j] = len(draft.token_ids) - 1
        draft.num_window = self.num_window
        draft.num_read = self.columns - (self.n == 2)


@dataclass
class _State:
    """What is kept of one request."""

    pool: "NgramPool"
    random: random.Random
    levels: list[list[int]] = field(default_factory=list)  # [N - 1][W]
    base: int = -1  # position of column 0 of level 0
    pending: bool = False  # the window is being computed


class NgramPool:
    """The n-grams of one request by their first token, at most ``most`` for each: the latest."""

    def __init__(self, n: int, most: int) -> None:
        self.n, self.most = n, most
        self.seen = 0  # tokens of the text whose n-grams are in
        self._tails: dict[int, dict[tuple[int, ...], int]] = {}  # first token -> the others -> number, the oldest first
        self._count = 0

    def add(self, ngram: Sequence[int]) -> None:
        tails = self._tails.setdefault(ngram[0], {})
        tail = tuple(ngram[1:])
        tails.pop(tail, None)  # so that it is the latest again
        tails[tail] = self._count
        self._count += 1
        if len(tails) > self.most:
            del tails[next(iter(tails))]

    def read(self, tokens: Sequence[int]) -> None:
        """Take in what was appended to the text."""
        for end in range(max(self.seen + 1, self.n), len(tokens) + 1):
            self.add(tokens[end - self.n : end])
        self.seen = len(tokens)

    def candidates(self, token: int, count: int) -> Draft:
        """Up to ``count`` nodes: n-grams that begin with ``token``, the latest first, equal beginnings merged.

        Nodes that are left over carry the first of them on, from n-gram to n-gram.
        """
        draft = Draft([], [])
        children: dict[tuple[int, int], int] = {}  # (node, token) -> node
        found = list(self._tails.get(token, {}).items())[::-1]
        for tail, _ in found:
            self._graft(draft, children, -1, tail, count)
        if found:
            draft.found_at = found[0][1]
            node = self._graft(draft, children, -1, found[0][0], count)
            while len(draft) < count and (tails := self._tails.get(draft.token_ids[node])):
                node = self._graft(draft, children, node, next(reversed(tails)), count)
        return draft

    @staticmethod
    def _graft(draft: Draft, children: dict[tuple[int, int], int], node: int, tail: Sequence[int], count: int) -> int:
        """Lead a path of ``tail`` away from ``node`` as far as ``count`` nodes allow; where it ends."""
        for token in tail:
            if (node, token) not in children:
                if len(draft) >= count:
                    break
                draft.token_ids.append(token)
                draft.parents.append(node)
                children[node, token] = len(draft) - 1
            node = children[node, token]
        return node
