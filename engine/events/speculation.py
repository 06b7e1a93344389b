"""What a drafter proposed, and what the target made of it."""

import msgspec

from engine.events.event import Event


class DraftNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One proposed token. A draft is a tree: ``parent`` is the node it follows, -1 the request's last token."""

    token_id: int
    text: str
    parent: int
    q: float  # the drafter's probability of it, after the request's processors; NaN: the drafter has none
    top_ids: list[
        int
    ] = []  # the drafter's likeliest tokens in its place, and their probabilities; what is missing to 1 is the rest
    top_texts: list[str] = []
    top_probs: list[float] = []


class DraftProposed(Event, frozen=True, kw_only=True):
    """A drafter proposed tokens to follow a request's last one. DraftVerified follows in the same step."""

    request_id: str
    method: str  # SpeculativeConfig.method
    position: int  # of the first proposed token
    num_wanted: int  # K of this step, after what pool, context and budget left of it
    nodes: list[DraftNode]  # parents before children; [] when there was nothing to propose
    sampled: bool  # drawn at random from the drafter's distribution
    draft_ms: float  # wall time of the whole batch's drafting in this step
    batch_size: int  # requests that were drafted for in that time
    failure: str = ""  # why there is no draft, where that is no matter of course
    found_at: int = -1  # n-gram: position in the sequence that was copied from; Lookahead: place in its pool


class VerifiedNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of one proposed token."""

    outcome: str  # "accepted" | "rejected" | "not reached"
    p: float  # the target's probability of it, after the processors (and after elder siblings were rejected); NaN: not looked at
    q: float  # the drafter's, as it was compared (renormalised over what elder siblings left); NaN: not compared
    u: float | None  # what the accept test drew (rejection: accepted when u < p / q); None: nothing was drawn for it
    accept: float  # probability with which it was to be accepted: min(1, p / q), or p where the target's own draw decides
    top_ids: list[int] = []  # the target's likeliest tokens in its place, after the processors
    top_texts: list[str] = []
    top_probs: list[float] = []


class DraftVerified(Event, frozen=True, kw_only=True):
    """The target computed a draft in one pass and kept ``path`` of it; then came one token of its own.

    TokenSampled is recorded for each token that the request gained, as in plain decoding.
    """

    request_id: str
    position: int  # of the first proposed token
    rule: str  # "rejection" | "draw" (the target's own draw decides: deterministic and coupled drafts) | "typical"
    nodes: list[VerifiedNode]  # as in DraftProposed
    path: list[int]  # accepted nodes, in order
    token_id: int  # the target's own token after them; -1: none (a stop token or a limit lay within the draft)
    text: str
    own: str  # "corrected" (a node stood in its place and was rejected) | "bonus" (nothing more was proposed) | ""
    own_u: float | None  # what it was drawn with; None: greedy, or none
    own_prob: float  # in the distribution that it was drawn from
    residual_ids: list[int] = []  # likeliest of the normalised positive part of p - q, where the token was drawn from that
    residual_texts: list[str] = []
    residual_probs: list[float] = []
    residual_mass: float = 0.0  # of that positive part before normalising: the probability of a rejection there
    verify_ms: float = 0.0  # wall time of the whole step's forward pass
    num_kept: int = 0  # tokens that the request gained
