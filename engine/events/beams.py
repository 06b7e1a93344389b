"""How a beam search went on, and what it ended with."""

import msgspec

from engine.events.event import Event


class BeamCandidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One way in which a beam could go on: one of the best of all ways of all beams of a request."""

    source: int  # sample_index of the beam that it goes on from
    token_id: int
    text: str
    logprob: float  # of the token, after the penalties (natural log)
    sum_logprob: float  # of the whole sequence so far
    beam: int  # sample_index of the beam that holds it from now on; -1: none
    score: float  # sum / length ** length_penalty when it ended here and was kept; NaN when it did not
    fate: str  # "kept" | "ended" (complete, and among the best complete ones) | "dropped"


class BeamsSelected(Event, frozen=True, kw_only=True):
    """One step of a beam search: which ways of going on were looked at, and which of them were taken.

    The beams are sequences of the request with a ``sample_index`` each, as the siblings of n > 1 are. From here on, beam
    ``c.beam`` of each kept candidate has the tokens of beam ``c.source`` before it, and its own token. A beam that no
    candidate names holds nothing any more: it ends, or takes over another one's tokens.
    """

    request_id: str
    position: int  # of the tokens chosen
    candidates: list[BeamCandidate]  # best first
    num_ended: int  # complete sequences kept so far
    worst_ended: float  # the lowest of their scores; NaN when there is none
    best_possible: (
        float  # the score that the best beam is taken to reach, as early stopping compares it; NaN when no beam is left
    )


class BeamSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token_ids: list[int]
    texts: list[str]  # one a token
    sum_logprob: float
    score: float
    reason: str  # "stop" | "length" | "abort"


class BeamsFinished(Event, frozen=True, kw_only=True):
    """The end of a beam search: its n best sequences, which its first n beams show from here on."""

    request_id: str
    why: str
    sequences: list[BeamSequence]  # best first
