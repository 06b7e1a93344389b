"""What the head and the tab "Matrices" of the Quantisation page say. HTML where it says so; pure."""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from engine.events.types import MatrixObserved, QuantizationProgress, WeightsChanged
from explorer.i18n import _, ngettext
from explorer.quantization.labels import CALIBRATED, TITLES, line, said, share, small, table, weights_label
from explorer.quantization.rows import Change, Quantity, cancelled, failed, text_of, worst
from explorer.quantization.whatif import How, Tried
from explorer.theme import number

NO_ENGINE = _("No engine runs yet. Once it does, this page asks it what rounding did to each of its weights.")
NO_WATCH = _("Asked: the engine compares every weight that runs with the checkpoint's own. The map fills in a few seconds.")
NOT_RECORDED = _(
    "Nobody had looked at the weights at this step of the recorded run, so there is no map of them. With this page open beside a running "
    "engine, what rounding did is recorded, and is in the run that is saved."
)
NO_MATRIX_RECORDED = _(
    "In this recorded run no matrix was looked into. The map above is all that was recorded: a matrix itself is large, and is kept only "
    "where somebody clicked on it."
)
LOOK_INSIDE = _(
    "Click a cell of the map, or choose a layer and a matrix: its weights and what comes into them are then fetched once."
)
FETCHING = _("Fetching layer {layer}, {name}: its weights, and its inputs on calibration text …")
NEEDS_ENGINE = _("The engine does not run.")
RUNS_ALREADY = _("This is what runs.")
FORMS = {
    "plain": _("as full matrices in the model's dtype"),
    "int4_kernel": _("multiplied as 4-bit codes by torch's packed kernel: small in memory, and fewer bytes to read for each token"),
    "int8_kernel": _("multiplied as 8-bit codes by torch's packed kernel"),
    "int8_integers": _("multiplied as integers, the inputs rounded to 8 bits as well"),
    "dequantized": _("rounded, then held in the model's dtype: no kernel here multiplies these codes, so the loss is real and the memory is not saved"),
    "dequant_kernel": _("multiplied as codes by a kernel that unpacks them in registers"),
    "unpacked_at_use": _("held as codes and unpacked for each product"),
}  # fmt: skip


# -- the head -----------------------------------------------------------------------------------------------------------


def now_html(change: Change, num_layers: int) -> str:
    """What runs: method, group, bits, bytes against 16 bits, how, and what became of the running requests. HTML."""
    e = change.event
    title = TITLES.get(e.method, e.method) if e.method else _("the checkpoint's own weights")
    options = weights_label("", 0, e.options).partition(", ")[2] if e.options else ""
    group = (
        ngettext("groups of {n} column", "groups of {n} columns", e.group_size).format(n=e.group_size)
        if e.group_size
        else _("no groups")
    )
    if e.method and not e.group_size:
        group = _("a scale for each output channel")
    took = _("made in {t}").format(t=number(e.seconds, "s", 2)) + (", " + _("from the disk") if e.cached else "")
    if e.calibration_tokens:
        took += ", " + _("calibrated on {n:,} tokens").format(n=e.calibration_tokens)
    cells = [
        (title, " · ".join(part for part in (group, options) if part) if e.method else _("nothing was rounded")),
        (number(e.bits_per_weight, "bits", 4), _("per weight of the linear layers, scales and all counted")),
        (number(e.linear_bytes, "B"), _("linear layers, as they are held")),
    ]
    if e.method:
        cells.append((number(e.seconds, "s", 2), took.partition(", ")[2] or _("to make them")))
    body = "".join(f"<div><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>" for a, b in cells)
    return f'<div class="qm-now">{body}</div>{memory_html(change, num_layers)}<div class="qm-how">{line(_forms(e))}{_recomputed(e)}</div>'


def sixteen_bits(change: Change, num_layers: int) -> int:
    """Bytes of the linear layers in 16 bits; 0 while not all matrices have been told."""
    e = change.event
    if not e.method and set(e.forms) == {"plain"} and e.bits_per_weight:
        return round(e.linear_bytes * 16 / e.bits_per_weight)
    return 2 * change.num_weights if num_layers and len(change.layers) >= 7 * num_layers else 0


def memory_html(change: Change, num_layers: int) -> str:
    """Two bars: what is held, and the same in 16 bits."""
    e, plain = change.event, sixteen_bits(change, num_layers)
    rows = [(_("now"), e.linear_bytes)]
    if plain:
        rows.append((_("in 16 bits"), plain))
    most = max(linear for _name, linear in rows) + e.other_bytes or 1
    body = ""
    for name, linear in rows:
        body += (
            f'<span>{html.escape(name)}</span><span class="qm-bar" aria-hidden="true"><i style="width:{100 * linear / most:.1f}%"></i>'
            f'<i class="rest" style="width:{100 * e.other_bytes / most:.1f}%"></i></span><span class="n">{number(linear + e.other_bytes, "B")}</span>'
        )
    times = _("the linear layers take {share} of 16 bits").format(share=share(e.linear_bytes / plain)) if plain else ""
    keys = (
        f'<span><i></i>{html.escape(_("linear layers"))}</span><span><i class="rest"></i>{html.escape(_("embedding, head and norms: not rounded unless asked"))}</span>'
        f"<span>{html.escape(times)}</span>"
    )
    return f'<div class="qm-memory">{body}</div><div class="qm-keys">{keys}</div>'


def _forms(e: WeightsChanged) -> str:
    parts = [f"{n} {FORMS.get(form, form)}" for form, n in sorted(e.forms.items(), key=lambda item: -item[1])]
    return (
        html.escape(
            _("How they run (linear layers, q, k, v as one and gate, up as one): {forms}.").format(forms="; ".join(parts))
        )
        if parts
        else ""
    )


def _recomputed(e: WeightsChanged) -> str:
    if not e.recomputed:
        return ""
    text = ngettext(
        "{n} running request was computed again under these weights: keys and values that other weights had written would not fit them.",
        "{n} running requests were computed again under these weights: keys and values that other weights had written would not fit them.",
        len(e.recomputed),
    )  # fmt: skip
    return line(html.escape(text.format(n=len(e.recomputed))))


def progress_html(progress: QuantizationProgress | None) -> str:
    """Weights that are being made; "" where there are none."""
    if progress is None:
        return ""
    title = TITLES.get(progress.method, progress.method)
    if failed(progress):
        return said(
            html.escape(
                _("{method}: {why}. The weights stay as they were.").format(method=title, why=progress.doing.rstrip("."))
            ),
            "error",
        )
    if cancelled(progress):
        return said(html.escape(_("{method} was cancelled. The weights stay as they were.").format(method=title)), "mind")
    width = 100 * progress.done / progress.total if progress.total else 0
    text = _("{method}, {doing}: {done} of {total} layers. The engine runs on with the weights that it has.").format(
        method=title, doing=progress.doing, done=progress.done, total=progress.total
    )
    if progress.method in CALIBRATED:
        text += " " + _("The first time takes minutes; then it is kept on disk.")
    bar = f'<div class="qp-progress" role="progressbar" aria-label="{html.escape(title)}" aria-valuenow="{width:.0f}" aria-valuemin="0" aria-valuemax="100"><i style="width:{width:.1f}%"></i></div>'
    return said(html.escape(text) + bar, "wait")


# -- the map ------------------------------------------------------------------------------------------------------------


def map_html(change: Change, quantity: Quantity, exact: bool, expected: int) -> str:
    """Which matrices lose most, or why there is nothing to compare."""
    text = quantity.hint
    if exact and quantity.key != "outliers":
        if not change.event.method:
            text = _(
                "These are the checkpoint's own weights: nothing was rounded, so nothing is lost. Choose a method above, or look at the share of outliers."
            )
        else:
            text = _(
                "Rounded, and nothing is lost: the checkpoint's weights stand on this very grid already, since they come from a file in few "
                "bits. Choose other groups or fewer bits, and the map takes on colour."
            )
        return line(html.escape(text))
    found = worst(change, quantity)
    named = ", ".join(f"<b>{e.layer}.{html.escape(e.name)}</b> {html.escape(text_of(quantity, e))}" for e in found)
    lead = _("Most outliers") if quantity.key == "outliers" else _("Loses most")
    there = f"{lead}: {named}. " if named else ""
    filling = ""
    if expected and len(change.layers) < expected:
        filling = html.escape(_("{n} of {of} matrices so far.").format(n=len(change.layers), of=expected)) + " "
    return line(f'{filling}{there}<span class="ct-muted">{html.escape(text)}</span>')


# -- one matrix ------------------------------------------------------------------------------------------------------------


def decibels(value: float) -> str:
    return "∞ dB" if value == math.inf else f"{value:.1f} dB" if math.isfinite(value) else "–"


def tried_html(tried: Tried, every: int) -> str:
    """The numbers of the grid that is tried. HTML."""
    cells = [
        (decibels(tried.sqnr_db), _("SQNR")), (share(tried.output_error, 2), _("output error on the recorded inputs")),
        (f"{tried.bits_per_weight:.3f} bits", _("per weight truly used")), (f"{tried.max_error:.3g}", _("largest error, in units of the weights")),
        (f"{tried.step:.3g}", _("typical distance of two levels")),
    ]  # fmt: skip
    body = "".join(f"<div><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>" for a, b in cells)
    part = _("On one of {n} output channels: the matrix is large.").format(n=every) if every > 1 else ""
    return f'<div class="qm-now">{body}</div>' + (line(html.escape(part)) if part else "")


def numbers_of(tried: Tried) -> dict[str, float]:
    return {name: getattr(tried, name) for name in ("bits_per_weight", "sqnr_db", "output_error", "max_error")}


def comparison_html(
    rows: Sequence[tuple[str, dict[str, float]]], tried: Tried, running: tuple[str, dict[str, float]] | None
) -> str:
    """The same matrix under several methods, the one that is tried marked among them. HTML."""
    here = tried.how.label
    if here not in (name for name, _numbers in rows):
        rows = [(here, numbers_of(tried)), *rows]
    head = [_("grid"), _("bits per weight"), _("SQNR"), _("output error"), _("largest error")]

    def cells(name: str, n: dict[str, float]) -> list[str]:
        return [
            html.escape(name),
            f"{n['bits_per_weight']:.3f}",
            decibels(n["sqnr_db"]),
            share(n["output_error"], 2),
            small(n["max_error"]),
        ]

    body = [("here" if name == here else "", cells(name, numbers)) for name, numbers in rows]
    if running is not None:
        body.insert(0, ("now", cells(_("runs now: {name}").format(name=running[0]), running[1])))
    return table(head, body, "qm-table")


def source_html(event: MatrixObserved, rows: Sequence[tuple[How, dict[str, float]]]) -> str:
    """Where the checkpoint's numbers come from, and what that means for what is seen here. HTML."""
    source = event.source or _("the checkpoint, which does not say in what form it holds them")
    found = re.search(r"Q4_1", event.source)
    by_how = dict(rows)
    same, coarse, nf4 = by_how.get(How("int", 4, 32)), by_how.get(How("int", 4, 128)), by_how.get(How("nf4", 4, 64))
    if not found:
        low = re.search(r"Q[2-8]_|int[248]|GPTQ|AWQ|fp8", event.source, re.IGNORECASE)
        text = _("The original weights come from {source}.").format(source=source)
        if low:
            text += " " + _(
                "They have been rounded once already: a grid like that one loses less on them than on weights that never were."
            )
        return said(html.escape(text), "mind")
    text = _("These weights come from a file with 4 bits ({source}): groups of 32, each with a scale and a minimum. They stand on 16 levels already.").format(source=source)  # fmt: skip
    if same is not None:
        text += " " + _("So int4, asymmetric, with the same groups of 32 costs almost nothing here: {a} of SQNR").format(
            a=decibels(same["sqnr_db"])
        )
        others = [(_("NF4 in groups of 64"), nf4), (_("int4 in groups of 128"), coarse)]
        text += "".join(f", {name} {decibels(n['sqnr_db'])}" for name, n in others if n is not None) + "."
    text += " " + _(
        "To see what rounding does to weights that never were rounded, look at a checkpoint in 16 bits: CUTAWAY_MODEL, a directory with safetensors."
    )
    return said(html.escape(text), "mind")


def levels_words(tried: Tried, event: MatrixObserved) -> str:
    """What the first picture shows. Plain text."""
    how = tried.how
    if how.levels == "fp8":
        return _("253 levels, dense about 0: the step grows with the weight. One scale a row takes its largest weight to 448.")
    if how.levels == "nf4":
        return _("16 levels at quantiles of a normal distribution: about 0, where most weights are, they lie close together.")
    n = 1 << how.bits
    if "Q4_1" in event.source and how.group_size == 32 and not how.symmetric:
        return _(
            "{n} even levels. The spikes are the file's own 16 levels: the weights stood on them before anything was rounded here."
        ).format(n=n)
    if how.symmetric:
        return _(
            "{n} even levels about 0, each group turned so that its largest weight stands at −1: there the grid reaches one step further."
        ).format(n=n)
    return _("{n} even levels from the least to the largest weight of each group.").format(n=n)


def what_became(how: How, running: WeightsChanged | None) -> bool:
    """Whether ``how`` is what runs already."""
    if running is None:
        return False
    from explorer.quantization.whatif import live_knobs

    knobs, _why = live_knobs(how)
    if knobs is None or knobs["quantization"] != running.method:
        return False
    same_group = (knobs["quantization_group_size"] or 0) == running.group_size
    return same_group and (knobs["quantization_options"] or {}) == _plain(running.options)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not False and value is not None}
