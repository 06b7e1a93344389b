"""What the engine tells of drafts: DraftProposed and DraftVerified."""

import math
from typing import TYPE_CHECKING, Any

from engine.events.types import DraftNode, DraftProposed, DraftVerified, VerifiedNode
from engine.speculation.base import Draft, Wanted
from engine.speculation.verify import NodeVerdict, Verdict

if TYPE_CHECKING:
    from engine.engine import Engine

_Entries = list[tuple[int, float]]  # token ids and probabilities


def record_draft(engine: "Engine", method: str, wanted: Wanted, draft: Draft, draft_ms: float, batch_size: int) -> None:
    """What a drafter proposed for one request; ``draft_ms``: of all ``batch_size`` requests of the step."""
    probs = draft.probs or [math.nan] * len(draft)
    watched = bool(engine.recorder.tokens_top)
    nodes = []
    for i in range(draft.num_proposed):
        ids, texts, values = _listed(engine, draft.tops[i] if watched and draft.tops else [])
        token = draft.token_ids[i]
        nodes.append(DraftNode(token, engine.committer.token_text(token), draft.parents[i], probs[i], ids, texts, values))
    engine.recorder.emit(
        DraftProposed, request_id=wanted.request.request_id, method=method, position=wanted.request.num_tokens,
        num_wanted=wanted.count, nodes=nodes, sampled=draft.q is not None, draft_ms=draft_ms, batch_size=batch_size,
        failure=draft.failure, found_at=-1 if draft.found_at is None else draft.found_at,
    )  # fmt: skip


def record_verdict(engine: "Engine", request: Any, position: int, v: Verdict, num_kept: int) -> None:
    """What became of it; ``num_kept``: tokens that the request gained."""
    ids, texts, values = _listed(engine, v.residual)
    own = v.sampled[-1].token_id if v.own and num_kept == len(v.sampled) else -1
    engine.recorder.emit(
        DraftVerified, request_id=request.request_id, position=position, rule=v.rule, nodes=[_node(engine, n) for n in v.nodes],
        path=v.path[:num_kept], token_id=own, text="" if own < 0 else engine.committer.token_text(own), own=v.own if own >= 0 else "",
        own_u=v.own_u if own >= 0 else None, own_prob=v.own_prob if own >= 0 else math.nan, residual_ids=ids, residual_texts=texts,
        residual_probs=values, residual_mass=v.residual_mass, verify_ms=engine.forward_ms, num_kept=num_kept,
    )  # fmt: skip


def _node(engine: "Engine", n: NodeVerdict) -> VerifiedNode:
    return VerifiedNode(n.outcome, n.p, n.q, n.u, n.accept, *_listed(engine, n.top))


def _listed(engine: "Engine", entries: _Entries) -> tuple[list[int], list[str], list[float]]:
    return [t for t, _ in entries], [engine.committer.token_text(t) for t, _ in entries], [p for _, p in entries]
