"""What the canvases of the Sampling page are told: plain values, with the texts of tokens and of columns. Pure."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from engine.events.types import TokenSampled
from engine.request import SamplingParams
from explorer.i18n import _, ngettext
from explorer.sampling.choice import Choice
from explorer.sampling.rows import Point, Track

TextOf = Callable[[int], str | None]
CHIPS = 500  # tokens of a strip, the newest
PROMPT_SHOWN = 160  # characters of a prompt, its end
NAMES = {
    "penalties": _("penalties"),
    "temperature": _("temperature"),
    "min_p": _("min-p"),
    "top_k": _("top-k"),
    "top_p": _("top-p"),
}
HINTS = {
    "raw": _("The model's own probability: softmax of its logits, at temperature 1."),
    "penalties": _(
        "After repetition, presence and frequency penalties, which change the logits of tokens that were already there."
    ),
    "temperature": _("Logits divided by the temperature: below 1 sharper, above 1 flatter. 0 leaves the likeliest token alone."),
    "min_p": _("Keeps tokens with at least this share of the likeliest one's probability."),
    "top_k": _("Keeps the k likeliest tokens, however much they hold together."),
    "top_p": _("Keeps the fewest likeliest tokens that hold this mass together: the nucleus."),
}


def choice_data(choice: Choice, params: SamplingParams, text_of: TextOf) -> dict[str, Any]:
    """``ChoicePicture.data``."""

    def text(token_id: int) -> str:
        found = text_of(token_id)
        return found if found is not None else _("(token {id})").format(id=token_id)

    rows = [
        {
            "id": row.token_id, "text": text(row.token_id), "shares": [_plain(p) for p in row.shares],
            "removed": NAMES.get(row.removed_by, ""), "chosen": row.chosen, "lands": row.lands,
        }
        for row in choice.rows
    ]  # fmt: skip
    curve = choice.curve
    return {
        "columns": [[name, *_column(name, params, choice.left)] for name in choice.columns],
        "rows": rows, "others": [_plain(p) for p in choice.others], "numOthers": choice.num_others,
        "segments": [[token, text(token), p] for token, p in choice.segments], "rest": choice.rest, "numRest": choice.num_rest,
        "u": choice.u, "lands": None if choice.landing is None else text(choice.landing),
        "curve": {"ranks": curve.ranks, "sums": curve.sums, "p": curve.p, "size": curve.size},
    }  # fmt: skip


def _plain(p: float) -> float | None:
    return None if math.isnan(p) else p


def _column(name: str, params: SamplingParams, left: dict[str, int]) -> tuple[str, str]:
    """(heading, what it means and how many tokens it left)."""
    if name == "raw":
        return _("raw"), HINTS["raw"]
    value = "" if name == "penalties" else f" {getattr(params, name):g}"
    hint = HINTS[name]
    if name in left and name not in ("penalties",):
        hint += " " + ngettext("It left {n:,} token.", "It left {n:,} tokens.", left[name]).format(n=left[name])
    return NAMES[name] + value, hint


def strip_data(track: Track, points: Iterable[Point]) -> dict[str, Any]:
    """``TokenStrip.data``: the prompt's end, what was inherited or not seen, and a chip for each token."""
    shown = list(points)
    chips: list[list[Any]] = [
        [p.position, p.text, p.step, _plain(p.logprob), p.rank, _plain(p.entropy), p.nucleus_size] for p in shown[-CHIPS:]
    ]
    first = chips[0][0] if chips else track.num_prompt_tokens + len(track.output_token_ids)
    inherited = "".join(track.output_texts[: max(0, first - track.num_prompt_tokens)]) if track.branched_from else ""
    prompt = track.prompt_text
    return {
        "id": track.request_id, "prompt": f"… {prompt[-PROMPT_SHOWN:]}" if len(prompt) > PROMPT_SHOWN else prompt,
        "inherited": inherited[-PROMPT_SHOWN:], "dropped": max(0, len(shown) - CHIPS), "tokens": chips,
    }  # fmt: skip


def alternatives(event: TokenSampled | None, count: int = 10) -> list[list[Any]]:
    """[token id, text, raw probability] of the other candidates, likeliest first."""
    if event is None:
        return []
    others = sorted((c for c in event.top if c.token_id != event.token_id), key=lambda c: -c.logprob)
    return [[c.token_id, c.text, math.exp(c.logprob)] for c in others[:count]]


def track_label(track: Track, tracks: dict[str, Track]) -> str:
    """How a request is named in a list: its id, its settings, the end of its prompt."""
    s = track.sampling
    how = _("greedy") if s.get("temperature") == 0 else f"T {s.get('temperature', 1):g}"
    more = [how]
    for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
        if s.get(name) not in (None, off):
            more.append(f"{NAMES.get(name, name)} {s[name]:g}")
    if track.branched_from is not None:
        more.append(_("branch of {id}").format(id=track.branched_from))
    prompt = " ".join(track.prompt_text.split())
    return f"{track.request_id} · {', '.join(more)} · {'…' + prompt[-36:] if len(prompt) > 37 else prompt}"
