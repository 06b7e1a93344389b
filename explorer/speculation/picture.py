"""What the page's own drawings are told: the text as ribbons, the stages of one verification, the tree and its mask. Pure."""

import math
from typing import Any

from explorer.i18n import _, ngettext
from explorer.speculation.rows import Round, Token, Track
from explorer.speculation.stats import method_name

PIECES = 500  # on the screen, the newest
PROMPT_TAIL = 160  # characters of the prompt in front of a text
CONTEXT = 6  # tokens in front of a draft
SHOWN = 6  # candidates of a place
LABEL = 60  # characters of the prompt that stand for a request


def track_label(track: Track) -> str:
    """A request in the list, the same words as long as it is there: they tell those that begin alike apart."""
    text = " ".join(track.prompt_text.split())
    text = text if len(text) <= LABEL else "…" + text[-LABEL:]
    t = float(track.asked_temperature)
    how = _("greedy") if t == 0 else _("temperature {t:g}").format(t=t)
    drafted = f"{method_name(track.setting.method)}, K = {track.setting.k}" if track.setting.on else _("plain")
    return f"{track.request_id} · {drafted} · {how} · {text}"


def none_if_nan(x: float | None) -> float | None:
    return None if x is None or math.isnan(x) else x


def visible(text: str) -> str:
    """A token within a sentence: what cannot be seen gets a sign."""
    return text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥") or "∅"


# ------------------------------------------------------------------------------------------------------------- ribbons


def ribbon_data(track: Track, step: int) -> dict[str, Any]:
    """Pieces [position, text, kind, round, [p, q, u, accept, rule], lost, residual], kind "plain" | "accepted" | "corrected" | "bonus";
    ``lost``: [[text, outcome, [p, q, u, accept, rule]]] of what was proposed and stood, or would have stood, from here on."""
    tokens, rounds = track.until(step)
    place: dict[int, tuple[str, Round, int]] = {}
    for r in rounds:
        for depth, node in enumerate(r.verified.path):
            place[r.position + depth] = ("accepted", r, node)
        place[r.position + len(r.verified.path)] = (r.verified.own or "plain", r, -1)
    shown = tokens[-PIECES:]
    return {
        "id": track.request_id,
        "prompt": track.prompt_text[-PROMPT_TAIL:],
        "cut": len(track.prompt_text) > PROMPT_TAIL,
        "dropped": len(tokens) - len(shown),
        "pieces": [_piece(token, place.get(token.position)) for token in shown],
        "counts": _counts(rounds, tokens),
    }


def _piece(token: Token, at: tuple[str, Round, int] | None) -> list[Any]:
    if at is None:
        return [token.position, token.text, "plain", -1, [], [], []]
    kind, r, node = at
    facts = (
        [*_facts(r, node), r.verified.rule] if node >= 0 else [none_if_nan(r.verified.own_prob), None, r.verified.own_u, None, ""]
    )
    residual = [[t, p] for t, p in zip(r.verified.residual_texts, r.verified.residual_probs)][:3] if node < 0 else []
    return [token.position, token.text, kind, r.position, facts, lost(r) if node < 0 else [], residual]


def _facts(r: Round, node: int) -> list[float | None]:
    seen = r.verified.nodes[node]
    q = seen.q if not math.isnan(seen.q) else r.proposed.nodes[node].q
    return [none_if_nan(seen.p), none_if_nan(q), seen.u, none_if_nan(seen.accept)]


def lost(r: Round) -> list[list[Any]]:
    """The nodes that were thrown away, those that were rejected first."""
    out = []
    for i, (node, seen) in enumerate(zip(r.proposed.nodes, r.verified.nodes)):
        if i not in r.verified.path:
            out.append([node.text, "rejected" if seen.outcome == "rejected" else "unseen", [*_facts(r, i), r.verified.rule]])
    return sorted(out, key=lambda each: each[1] != "rejected")


def _counts(rounds: list[Round], tokens: list[Token]) -> dict[str, int]:
    accepted = sum(len(r.verified.path) for r in rounds)
    own = [r.verified.own for r in rounds]
    counts = {
        "accepted": accepted,
        "rejected": sum(n.outcome == "rejected" for r in rounds for n in r.verified.nodes),
        "unseen": sum(n.outcome == "not reached" for r in rounds for n in r.verified.nodes),
        "corrected": own.count("corrected"),
        "bonus": own.count("bonus"),
    }
    counts["plain"] = max(0, len(tokens) - accepted - counts["corrected"] - counts["bonus"])
    return counts


# ---------------------------------------------------------------------------------------------------- one verification


def verification_data(track: Track, r: Round) -> dict[str, Any]:
    """One round for the player: columns (nodes), the token of the target's own, and the stages to step through."""
    before = sorted(t for t in track.tokens.values() if r.position - CONTEXT <= t.position < r.position)
    context = "".join(t.text for t in before)
    if len(before) < CONTEXT:
        context = track.prompt_text[-24:] + context
    nodes = [_column(r, i, depth) for i, depth in enumerate(r.depths)]
    v = r.verified
    own = None
    if v.token_id >= 0:
        own = {"text": v.text, "kind": v.own, "u": v.own_u, "p": none_if_nan(v.own_prob)}
    return {
        "key": f"{track.request_id} {r.position}", "context": context, "nodes": nodes, "own": own, "path": list(v.path),
        "chain": r.is_chain, "rule": v.rule, "residual": [[t, p] for t, p in zip(v.residual_texts, v.residual_probs)][:SHOWN],
        "mass": v.residual_mass, "stages": stages(r),
    }  # fmt: skip


def _column(r: Round, i: int, depth: int) -> dict[str, Any]:
    node, seen = r.proposed.nodes[i], r.verified.nodes[i]
    p, q, u, accept = _facts(r, i)
    return {
        "text": node.text, "parent": node.parent, "depth": depth, "outcome": seen.outcome, "p": p, "q": q, "u": u, "accept": accept,
        "pairs": pairs(node, seen),
    }  # fmt: skip


def pairs(node: Any, seen: Any) -> list[list[Any]]:
    """[text, q, p] of the likeliest tokens of a place, by what either side gives them; None: not among those recorded."""
    q = dict(zip(node.top_ids, node.top_probs))
    p = dict(zip(seen.top_ids, seen.top_probs))
    texts = {**dict(zip(node.top_ids, node.top_texts)), **dict(zip(seen.top_ids, seen.top_texts)), node.token_id: node.text}
    q.setdefault(node.token_id, none_if_nan(node.q))
    p.setdefault(node.token_id, none_if_nan(seen.p))
    order = sorted(texts, key=lambda t: (-max(p.get(t) or 0.0, q.get(t) or 0.0), t))[:SHOWN]
    if node.token_id not in order:
        order[-1:] = [node.token_id]
    return [[texts[t], q.get(t), p.get(t), t == node.token_id] for t in order]


def stages(r: Round) -> list[dict[str, Any]]:
    """What is told one after the other: {show, node, title, words}; show: "draft", "verify", "test", "own", "end"."""
    out = [_draft_stage(r), _verify_stage(r)]
    out += [_test_stage(r, i) for i in tested(r)]
    if r.verified.token_id >= 0:
        out.append(_own_stage(r))
    return [*out, _end_stage(r)]


def tested(r: Round) -> list[int]:
    """The nodes that the target looked at, in the order in which they are proposed along the path."""
    return [i for i, seen in enumerate(r.verified.nodes) if seen.outcome in ("accepted", "rejected")]


def _stage(show: str, node: int, title: str, words: str) -> dict[str, Any]:
    return {"show": show, "node": node, "title": title, "words": words}


def _draft_stage(r: Round) -> dict[str, Any]:
    p = r.proposed
    copied = p.method not in ("ngram", "lookahead") and p.found_at >= 0  # looked up first
    how = {
        "ngram": _("copies what followed when the last tokens stood in the text before"),
        "lookahead": _("looks its pool of n-grams up for the last token"),
        "rest": _("searches text that the target wrote before for what followed the last tokens"),
        "medusa": _("lets its heads guess the next tokens, all from one state of the target"),
        "layer_skip": _("lets the target's own first layers guess, token after token"),
        "eagle": _("continues the target's features, token after token"),
        "draft_model": _("runs a small model, token after token"),
    }.get("ngram" if copied else p.method, _("proposes"))
    drawn = (
        _("Each token is drawn from its distribution q.")
        if p.sampled
        else _("Nothing is drawn: it takes what it finds likeliest.")
    )
    count = ngettext("{n} token", "{n} tokens", len(p.nodes)).format(n=len(p.nodes))
    return _stage("draft", -1, _("Draft"), _("The drafter ({name}) {how}: {count} in {ms:.2f} ms. {drawn}").format(
        name=method_name(p.method), how=how, count=count, ms=p.draft_ms, drawn=drawn))  # fmt: skip


def _verify_stage(r: Round) -> dict[str, Any]:
    rows = len(r.proposed.nodes) + 1
    words = _(
        "The target computes {rows} tokens in one pass ({ms:.2f} ms): the last token and the {n} proposed ones. For each it gives the "
        "distribution p of what follows, so all places are known at once."
    )
    if r.proposed.method == "lookahead":
        words += " " + _("Besides, it computes the rows of Lookahead's own window, which find new n-grams.")
    if not r.is_chain:
        words += " " + _("In a tree every token attends to its own ancestors only.")
    return _stage("verify", -1, _("One pass of the target"), words.format(rows=rows, ms=r.verified.verify_ms, n=rows - 1))


def _test_stage(r: Round, i: int) -> dict[str, Any]:
    text, seen = visible(r.proposed.nodes[i].text), r.verified.nodes[i]
    p, q, u, accept = _facts(r, i)
    ok = seen.outcome == "accepted"
    title = (_("“{text}” is accepted") if ok else _("“{text}” is rejected")).format(text=text)
    if r.verified.rule == "rejection" and q is not None and p is not None and accept is not None:
        words = _("The draft gave it q = {q:.4f}, the target gives p = {p:.4f}. It is accepted with probability min(1, p / q) = {a:.4f}.").format(
            q=q, p=p, a=accept
        )  # fmt: skip
        if u is not None:
            words += " " + (
                _("The draw u = {u:.4f} lies below: accepted.") if ok else _("The draw u = {u:.4f} does not lie below: rejected.")
            ).format(u=u)
    elif r.verified.rule == "typical":
        words = _("Typical acceptance: p = {p:.4f} is compared with a threshold that falls where the target is unsure. The text's law changes.").format(
            p=math.nan if p is None else p
        )  # fmt: skip
    else:
        words = _("The target's own draw decides: it falls on this token with p = {p:.4f}.").format(
            p=math.nan if p is None else p
        )
        words += " " + (_("It did: accepted.") if ok else _("It fell on another one: rejected."))
    return _stage("test", i, title, words)


def _own_stage(r: Round) -> dict[str, Any]:
    v = r.verified
    if v.own == "bonus":
        words = _(
            "Everything proposed on this path was accepted. The pass has also said what follows the last of it: one token more, drawn from p "
            "itself (p = {p:.4f})."
        )
        return _stage("own", -1, _("Bonus: “{text}”").format(text=visible(v.text)), words.format(p=v.own_prob))
    if v.rule == "rejection" and v.residual_ids:
        words = _(
            "In its place comes a draw from the residual, the positive part of p - q, normalised: exactly what the accepted ones left out. "
            "The chance to get here was {mass:.4f}; “{text}” had {p:.4f} of the residual. So the text as a whole keeps the law p."
        )
    else:
        words = _(
            "In its place comes the target's own draw, “{text}” (p = {p:.4f}): what plain decoding with this seed writes here."
        )
    return _stage(
        "own",
        -1,
        _("Corrected: “{text}”").format(text=visible(v.text)),
        words.format(mass=v.residual_mass, text=visible(v.text), p=v.own_prob),
    )


def _end_stage(r: Round) -> dict[str, Any]:
    kept, thrown = r.verified.num_kept, len(r.proposed.nodes) - len(r.verified.path)
    words = ngettext("{n} token from one pass of the target.", "{n} tokens from one pass of the target.", kept).format(n=kept)
    if thrown:
        back = ngettext(
            "The keys and values of {n} token are rolled back.", "The keys and values of {n} tokens are rolled back.", thrown
        )
        words += " " + back.format(n=thrown)
    return _stage("end", -1, ngettext("Gained: {n} token", "Gained: {n} tokens", kept).format(n=kept), words)


# ----------------------------------------------------------------------------------------------------------- the tree


def tree_data(r: Round) -> dict[str, Any]:
    """Nodes [text, parent, depth, lane, outcome, [p, q]] and the attention mask among the rows of the pass."""
    lanes = _lanes([node.parent for node in r.proposed.nodes])
    nodes = []
    for i, (node, seen, depth) in enumerate(zip(r.proposed.nodes, r.verified.nodes, r.depths)):
        p, q, *_rest = _facts(r, i)
        nodes.append([node.text, node.parent, depth, lanes[i], seen.outcome, [p, q]])
    v = r.verified
    return {
        "key": f"{v.request_id} {v.position}", "nodes": nodes, "path": list(v.path), "own": [v.text, v.own] if v.token_id >= 0 else [],
        "mask": mask([node.parent for node in r.proposed.nodes]), "position": r.position, "chain": r.is_chain,
    }  # fmt: skip


def mask(parents: list[int]) -> list[list[int]]:
    """mask[i][j] is 1 where row i attends to row j: itself and its ancestors. Row 0 is the request's last token, row 1+n node n."""
    rows: list[list[int]] = []
    size = len(parents) + 1
    for i in range(size):
        row = list(rows[parents[i - 1] + 1]) if i else [0] * size
        row[i] = 1
        rows.append(row)
    return rows


def _lanes(parents: list[int]) -> list[float]:
    """A lane for each node so that no two of a depth share one: leaves in order, parents between their children."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(parents):
        children.setdefault(parent, []).append(i)
    lanes = [0.0] * len(parents)
    free = 0
    done: set[int] = set()
    stack = list(reversed(children.get(-1, [])))
    while stack:
        node = stack[-1]
        below = children.get(node, [])
        if not below:
            lanes[node], free = float(free), free + 1
        elif node not in done:
            done.add(node)
            stack += reversed(below)
            continue
        else:
            lanes[node] = (lanes[below[0]] + lanes[below[-1]]) / 2
        stack.pop()
    return lanes
