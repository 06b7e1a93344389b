"""Stand-in drafters for tests of the engine around them: they know the answers, and are wrong as often as told."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from engine import Engine
from engine.speculation import speculator
from engine.speculation.base import Computed, Draft, Drafter, Wanted


class Guesses(Drafter):
    """Proposes what ``answers`` says comes next, each token wrong with a probability; chains, or random trees that hold it somewhere."""

    method = "guesses"
    needs_features = True

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], vocab_size: int, wrong: float = 0.3, tree: bool = False
    ) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self.wrong = wrong
        self.tree = tree
        self.random = random.Random(7)
        self.computed: dict[str, int] = {}  # request -> positions whose features were seen
        self.forgotten: list[str] = []
        self.proposed = 0

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [self._one(w) for w in wanted]

    def _one(self, w: Wanted) -> Draft:
        request = w.request
        assert request.num_computed_tokens == request.num_tokens - 1
        blocks = len(request.block_ids)
        assert request.num_tokens + w.count <= blocks * (blocks and self._block_size(request))
        self.proposed += 1
        if self.random.random() < 0.15:
            return Draft.chain([])
        answer = self.answers[tuple(request.prompt_token_ids)][request.num_tokens - request.num_prompt_tokens :]
        token_ids: list[int] = []
        parents: list[int] = []
        right, depth = -1, 0  # the node that the answer has reached
        for i in range(w.count):
            truth = answer[depth] if depth < len(answer) else 0
            good = self.random.random() > self.wrong
            token = truth if good else self.random.randrange(self.vocab_size)
            parent = (self.random.choice([right, right, self.random.randrange(-1, i)]) if i else -1) if self.tree else i - 1
            siblings = [token_ids[j] for j in range(i) if parents[j] == parent]
            while token in siblings:
                token = (token + 1) % self.vocab_size
            token_ids.append(token)
            parents.append(parent)
            if parent == right and token == truth:
                right, depth = i, depth + 1
            elif not self.tree:
                right = -2  # nothing behind it can be right
        return Draft(token_ids, parents)

    def _block_size(self, request: Any) -> int:
        return self.block_size

    block_size = 4

    def observe(self, computed: Sequence[Computed], features: torch.Tensor | None) -> None:
        assert features is not None or not computed
        for one in computed:
            assert one.start + len(one.rows) == one.request.num_computed_tokens
            if features is not None:
                assert max(one.rows) < len(features)
            self.computed[one.request.request_id] = one.start + len(one.rows)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)
        self.computed.pop(request_id, None)


def use(monkeypatch: Any, drafter: Drafter) -> None:
    """Whatever is configured, this drafter proposes."""

    def create(_config: Any, engine: Engine) -> Drafter:
        drafter.block_size = engine.pool.block_size  # type: ignore[attr-defined]
        return drafter

    monkeypatch.setattr(speculator, "create_drafter", create)
