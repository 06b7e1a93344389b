"""REST: what followed the last tokens in a datastore of the target's own text (He et al., arXiv 2311.08252)."""

from collections.abc import Sequence
from pathlib import Path

from engine.speculation.base import Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.datastore import read_datastore
from engine.speculation.files import REST, shipped_drafter
from engine.speculation.head import Target

CONFIDENCE = 0.4  # of a draft that is worth a row more, where nothing else is asked for


class RestDrafter(Drafter):
    """Searches a datastore: some 0.1 ms a token. What it proposes is not drawn; the target's own draw decides."""

    method = REST

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        """ValueError for a datastore of another target."""
        path = Path(config.model) if config.model is not None else shipped_drafter(REST)
        self.datastore = read_datastore(path, target.model.config, target.sha256)
        self.confidence = CONFIDENCE if config.draft_confidence is None else config.draft_confidence
        self.datastore.find([0])  # sorts it, which takes a second for a million tokens

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        out = []
        for one in wanted:
            tokens, shares = self.datastore.follow(one.request.token_ids, one.count, self.confidence)
            tops = [[(token, share)] for token, share in zip(tokens, shares, strict=True)]
            out.append(Draft.chain(tokens, probs=shares, tops=tops))
        return out
