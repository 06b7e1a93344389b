"""The arithmetic card and the cost of having no cache: plain values to plain values, pure."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.events.types import CacheTimed, EngineStarted, PoolResized
from engine.hardware.flops import forward_flops
from engine.hardware.memory import KvShape, blocks_for, human_bytes, pool_bytes
from explorer.i18n import _, ngettext

LENGTHS = (16, 64, 128, 256, 384, 512)  # contexts at which a step is timed with and without the cache


@dataclass(frozen=True)
class Measured:
    """A pool's tensors as the engine allocated them (EngineStarted, then PoolResized)."""

    num_blocks: int
    block_size: int
    pool_bytes: int

    @classmethod
    def of(cls, event: EngineStarted | PoolResized) -> "Measured":
        facts = (
            event.config
            if isinstance(event, EngineStarted)
            else {"num_kv_blocks": event.num_blocks, "block_size": event.block_size}
        )
        return cls(int(facts.get("num_kv_blocks") or 0), int(facts.get("block_size") or 0), event.kv_pool_bytes)


def shape_of(started: EngineStarted, kv_dtype: str = "auto", block_size: int = 16) -> KvShape:
    """ValueError when the log does not say enough about its model. ``kv_dtype``: what the cache is held in."""
    return KvShape.from_facts(started.model, str(started.device.get("dtype")), kv_dtype, block_size)


def card_html(
    started: EngineStarted, measured: Measured | None, num_blocks: int, block_size: int, request: tuple[str, int] | None = None,
    kv_dtype: str = "auto",
) -> str:  # fmt: skip
    """The formula with this model's numbers. ``request``: (id, tokens in its cache) of the one that is selected."""
    shape = shape_of(started, kv_dtype, block_size)
    token = shape.bytes_per_token
    max_len = int(started.config.get("max_model_len") or 0)
    factors = (
        ("2", _("K and V")), (str(shape.num_layers), _("layers")), (str(shape.num_kv_heads), _("KV heads")),
        (str(shape.head_dim), _("head size")), _bytes_each(shape, str(started.device.get("dtype"))),
    )  # fmt: skip
    formula = '<span class="kv-times">×</span>'.join(
        f'<span class="kv-factor"><b>{html.escape(value)}</b><i>{html.escape(name)}</i></span>' for value, name in factors
    )
    rows = [
        (_("One token"), _("{n:,} bytes").format(n=token), human_bytes(token)),
        _times(_("One block of {n} tokens").format(n=block_size), block_size, token),
    ]
    if request is not None:
        held = blocks_for(request[1], block_size) * block_size
        now = _("{request} now: {tokens} tokens, in {blocks} blocks")
        rows.append(_times(now.format(request=request[0], tokens=request[1], blocks=held // block_size), held, token))
    if max_len:
        rows.append(_times(_("The longest request ({n:,} tokens)").format(n=max_len), max_len, token))
    rows.append(_times(_("The pool ({n:,} blocks)").format(n=num_blocks), num_blocks * block_size, token))
    body = "".join(f"<tr><th>{html.escape(a)}</th><td>{b}</td><td><b>{c}</b></td></tr>" for a, b, c in rows)
    return (
        f'<div class="kv-formula" role="math" aria-label="{html.escape(_("bytes of one token"))}">{formula}<span class="kv-times">=</span>'
        f'<span class="kv-factor kv-result"><b>{human_bytes(token)}</b><i>{html.escape(_("per token"))}</i></span></div>'
        f'<table class="kv-table">{body}</table>{_heads_html(shape)}{agreement_html(shape, measured, num_blocks, block_size)}'
        f"{_parameters_html(started.model)}"
    )


def _bytes_each(shape: KvShape, dtype: str) -> tuple[str, str]:
    """Bytes of one number; in few bits its share of scales and minima with it."""
    if shape.kv_dtype == "auto":
        return str(shape.bytes_per_element), _("bytes ({dtype})").format(dtype=dtype)
    each = shape.bytes_per_token / (2 * shape.num_layers * shape.num_kv_heads * shape.head_dim)
    return f"{each:.4g}", _("bytes ({dtype}, its scales included)").format(dtype=shape.kv_dtype)


def _times(name: str, slots: int, token: int) -> tuple[str, str, str]:
    return name, _("{slots:,} × {bytes:,} bytes").format(slots=slots, bytes=token), human_bytes(slots * token)


def _heads_html(shape: KvShape) -> str:
    """What one token costs with this model's heads, and had every query head, or none, its own K and V."""
    kinds = [("MHA", shape.mha, _("a K and V for each query head")), ("MQA", shape.mqa, _("one K and V for all query heads"))]
    if shape.attention_name == "GQA":
        group = shape.num_attention_heads // shape.num_kv_heads
        kinds.insert(1, ("GQA", shape, _("groups of {n} query heads share one").format(n=group)))
    rows = ""
    for name, variant, what in kinds:
        width = 100 * variant.num_kv_heads / shape.num_attention_heads
        ratio = variant.bytes_per_token / shape.bytes_per_token
        here = variant == shape
        tag = _(" (this model)") if here else f" (× {ratio:.3g})"
        heads = ngettext("{n} KV head: {what}", "{n} KV heads: {what}", variant.num_kv_heads).format(
            n=variant.num_kv_heads, what=what
        )
        each = _("{n} bytes per token").format(n=variant.bytes_per_token)
        rows += (
            f'<div class="kv-head{" kv-here" if here else ""}"><span>{name}<i>{html.escape(tag)}</i></span>'
            f'<span class="kv-bar" title="{html.escape(each)}">'
            f'<span style="width:{width:.1f}%"></span></span>'
            f"<span>{human_bytes(variant.bytes_per_token)}</span><em>{html.escape(heads)}</em></div>"
        )
    return f'<h3>{html.escape(_("Had it been built otherwise, per token"))}</h3><div class="kv-heads">{rows}</div>'


def agreement_html(shape: KvShape, measured: Measured | None, num_blocks: int, block_size: int) -> str:
    """The formula's bytes beside those of the tensors, and whether they are the same; None: the log no longer says."""
    derived = pool_bytes(shape, num_blocks, block_size)
    if measured is None:
        gone = _(
            "Pool by the formula <b>{derived:,} bytes</b> (derived); what was allocated for it is no longer in the recorded events."
        )
        return f'<p class="kv-agree">{gone.format(derived=derived)}</p>'
    gap = measured.pool_bytes - derived
    if shape.kv_dtype == "int4" and gap > 0:  # what the formula leaves out, and says so
        tail = _("the rest is the tail: {bytes} for blocks that are not full, in the model's own dtype").format(
            bytes=human_bytes(gap)
        )
        verdict = f'<span class="kv-ok">✓ {html.escape(tail)}</span>'
    elif gap == 0:
        verdict = f'<span class="kv-ok">✓ {html.escape(_("equal to the byte"))}</span>'
    else:
        more = _("{n:,} bytes more allocated than the formula says")
        fewer = _("{n:,} bytes fewer allocated than the formula says")
        verdict = f'<span class="kv-off">✗ {html.escape((more if gap > 0 else fewer).format(n=abs(gap)))}</span>'
    both = _("Pool by the formula <b>{derived:,} bytes</b> (derived), tensors as allocated <b>{measured:,} bytes</b> (measured)")
    return f'<p class="kv-agree">{both.format(derived=derived, measured=measured.pool_bytes)}: {verdict}</p>'


def _parameters_html(model: dict[str, Any]) -> str:
    """Beside the cache: the weights, as counted, and by the rule of thumb 12 L d²."""
    if not {"num_parameters", "hidden_size", "num_layers"} <= set(model):
        return ""
    rule = 12 * model["num_layers"] * model["hidden_size"] ** 2
    embedding = model.get("num_embedding_parameters", 0)
    words = _(
        "For scale: the model has {parameters:,} parameters, {embedding:,} of them in the embedding. The rule of thumb 12 L d² "
        "gives {rule:,}: it assumes MHA, a feed-forward of 4 d and no embedding."
    ).format(parameters=model["num_parameters"], embedding=embedding, rule=rule)
    return f'<p class="kv-agree">{html.escape(words)}</p>'


# ------------------------------------------------------------------------------------------- a step with and without cache


@dataclass(frozen=True)
class CacheCurves:
    """Measured points and, on a fine grid of lengths, the formula's curves in milliseconds."""

    lengths: np.ndarray
    with_ms: np.ndarray
    without_ms: np.ndarray
    grid: np.ndarray
    model_with: np.ndarray
    model_without: np.ndarray
    attention_only: np.ndarray  # of model_without, the t² part that the slogan "O(t²) against O(t)" is about
    gflops: float  # the rate that the fit found for computing everything again
    fixed_ms: float  # the time of a step that does not grow with its operations


def cache_curves(timed: CacheTimed, model: dict[str, Any]) -> CacheCurves:
    """Scale the counted operations to the measured times: ms = fixed + operations / rate, both >= 0, by least squares.

    The two curves share their fixed part only if the data say so: each is fitted to its own points, since a decode of one
    token reads the weights once (memory) while recomputation multiplies with them t times (arithmetic).
    """
    if not timed.lengths or len(timed.lengths) != len(timed.with_ms) or len(timed.lengths) != len(timed.without_ms):
        got = len(timed.lengths), len(timed.with_ms), len(timed.without_ms)
        raise ValueError(f"as many times as lengths are needed, got {got} lengths, times with and times without the cache")
    lengths = np.array(timed.lengths)
    order = np.argsort(lengths)
    lengths, with_ms, without_ms = lengths[order], np.array(timed.with_ms)[order], np.array(timed.without_ms)[order]
    grid = np.unique(np.linspace(1, lengths[-1], 120).astype(int))
    fixed_with, rate_with = fit([_with(model, t) for t in lengths], with_ms)
    fixed, rate = fit([_without(model, t) for t in lengths], without_ms)
    return CacheCurves(
        lengths=lengths, with_ms=with_ms, without_ms=without_ms, grid=grid,
        model_with=fixed_with + rate_with * np.array([_with(model, t) for t in grid]),
        model_without=fixed + rate * np.array([_without(model, t) for t in grid]),
        attention_only=rate * np.array([forward_flops(model, start=0, num_tokens=int(t)).attention for t in grid]),
        gflops=1e-6 / rate if rate > 0 else float("inf"), fixed_ms=fixed,
    )  # fmt: skip


def _with(model: dict[str, Any], t: int) -> float:
    return forward_flops(model, start=int(t) - 1, num_tokens=1).total


def _without(model: dict[str, Any], t: int) -> float:
    return forward_flops(model, start=0, num_tokens=int(t)).total


def fit(flops: Sequence[float], ms: np.ndarray) -> tuple[float, float]:
    """(fixed ms, ms per operation), both >= 0: the least-squares line, or the better of the two lines at the border."""
    x = np.array(flops, float)
    y = np.asarray(ms, float)
    if len(x) > 1 and np.ptp(x) > 0:
        slope, fixed = np.polyfit(x / x.max(), y, 1)
        slope /= x.max()
        if slope >= 0 and fixed >= 0:
            return float(fixed), float(slope)
        if slope < 0:
            return float(y.mean()), 0.0
    return 0.0, float((x @ y) / (x @ x))


def crossover(model: dict[str, Any]) -> int:
    """The context at which attention's t² d term catches up with the linear layers' t d² when all is computed again."""
    one = forward_flops(model, start=0, num_tokens=1)
    # linear(t) = t * linear(1), attention(t) = attention(1) * t (t + 1) / 2
    return int(np.ceil(2 * one.linear / one.attention - 1))


def in_words(curves: CacheCurves, model: dict[str, Any]) -> str:
    """What was found, in one or two sentences."""
    t = int(curves.lengths[-1])
    ratio = curves.without_ms[-1] / curves.with_ms[-1] if curves.with_ms[-1] else float("nan")
    share = forward_flops(model, start=0, num_tokens=t)
    return _(
        "At {t} tokens the next token takes {with_ms:.1f} ms with the cache and {without_ms:.1f} ms without: {ratio:.1f} times. "
        "Of the operations without it, {linear:.0f} % are linear layers (t d²) and {attention:.0f} % attention (t² d), which would "
        "take over at about {crossover:,} tokens."
    ).format(
        t=t, with_ms=curves.with_ms[-1], without_ms=curves.without_ms[-1], ratio=ratio, linear=100 * share.linear / share.total,
        attention=100 * share.attention / share.total, crossover=crossover(model),
    )  # fmt: skip
