"""What the Sampling page says of a choice, as lines of HTML. Pure; every text of a model is escaped."""

import html
import math
from collections.abc import Callable

from engine.events.types import TokenSampled
from engine.request import SamplingParams
from explorer.i18n import _, ngettext
from explorer.sampling.whatif import Orders, Outcome

TextOf = Callable[[int], str | None]
ROUNDED = 5e-4  # of probability: what logits in 16 bits may move an edge by
NAMED = 6  # tokens of a difference that are named
NOTHING = _("No token yet. Press one of the scenes above, or send a prompt here or on the Run page.")
NOTHING_RECORDED = _(
    "No token yet at this step of the recorded run: step forward. A run whose tokens were not watched has none at any step."
)


def percent(p: float) -> str:
    return "0" if p == 0 else f"{100 * p:.1f} %" if p >= 0.001 else f"{100 * p:.2g} %"


def quoted(text: str | None, token_id: int) -> str:
    """The token as it is written into a line: escaped, with its spaces visible."""
    if text is None:
        return html.escape(_("token {id}").format(id=token_id))
    return f"<code>{html.escape(text.replace(' ', '·').replace(chr(10), '↵') or '∅')}</code>"


def recorded_words(e: TokenSampled, params: SamplingParams) -> str:
    """How the engine chose the token."""
    rank = (
        _("It was number {n} of the raw distribution, with {p}.").format(n=f"{e.rank:,}", p=percent(math.exp(e.logprob)))
        if e.rank
        else ""
    )
    if e.u is None:
        how = (
            _("Temperature 0: the likeliest token after the penalties is taken, nothing is drawn.")
            if params.temperature == 0
            else ""
        )
        return f"{how} {rank}".strip()
    kept = ngettext("{n:,} token was kept", "{n:,} tokens were kept", e.nucleus_size).format(n=e.nucleus_size)
    mass = _("which held {m} of the mass").format(m=percent(e.nucleus_mass))
    return _("{kept}, {mass}; u = {u} fell on {token}, whose share of the bar is {p}. {rank}").format(
        kept=f"<b>{kept}</b>", mass=mass, u=f"{e.u:.4f}", token=quoted(e.text, e.token_id), p=percent(e.prob), rank=rank
    )


def outcome_words(out: Outcome, orders: Orders | None, e: TokenSampled, params: SamplingParams, text_of: TextOf) -> str:
    """What the settings would have changed, how exact that is, and whether transformers would have kept the same."""
    token, took = quoted(text_of(out.token_id), out.token_id), quoted(e.text, e.token_id)
    if params.temperature != 0 and e.u is None:
        first = _("This token was chosen without a draw, so there is no u to fall: the bars alone are recomputed.")
    elif out.token_id == e.token_id:
        first = (
            _("<b>Still {token}</b>: the same u falls on the same token.")
            if params.temperature
            else _("<b>Still {token}</b>, the likeliest.")
        )
    elif params.temperature == 0:
        first = _("<b>{token}</b> instead of {took}: the likeliest.")
    else:
        first = _("<b>{token}</b> instead of {took}: u is the same, the pieces under it have moved.")
    alive = out.left[out.order[-1]]
    kept = ngettext("{n:,} token is kept.", "{n:,} tokens are kept.", alive).format(n=alive)
    near = ""
    if params.temperature and e.u is not None and out.full and out.margin(e.u) < ROUNDED:
        near = _("u lies {m} from the edge of that piece: the 16 bits may decide which it is.").format(m=percent(out.margin(e.u)))
    parts = [first.format(token=token, took=took), kept if params.temperature else "", near, _exactness(out)]
    if orders is not None:
        parts.append(_orders(orders, text_of))
    return " ".join(part for part in parts if part)


def _exactness(out: Outcome) -> str:
    if out.full:
        return _("Recomputed from all {n:,} logits, kept in 16 bits.").format(n=len(out.token_ids))
    if out.exact:
        return _("Recomputed from {n} candidates; exact, since nothing outside of them is kept.").format(n=len(out.token_ids))
    return _(
        "<b>Exact only inside the {n} recorded candidates:</b> shares are among these alone. Requests sent from this page keep all logits."
    ).format(n=len(out.token_ids))


def _orders(orders: Orders, text_of: TextOf) -> str:
    """Where vLLM's order (min-p, top-k, top-p) and transformers' (top-k, top-p, min-p) keep different sets."""

    def names(tokens: list[int]) -> str:
        shown = ", ".join(quoted(text_of(t), t) for t in tokens[:NAMED])
        return shown + (" …" if len(tokens) > NAMED else "")

    only = [
        _("only vLLM's keeps {tokens}").format(tokens=names(orders.only_ours)) if orders.only_ours else "",
        _("only transformers' keeps {tokens}").format(tokens=names(orders.only_theirs)) if orders.only_theirs else "",
    ]
    return _(
        "<b>The order matters here:</b> vLLM's (min-p first, as here) keeps {a}, transformers' (min-p last) {b}; {only}."
    ).format(a=orders.ours, b=orders.theirs, only=", ".join(part for part in only if part))
