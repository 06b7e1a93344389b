"""What the Attention page says: pure functions from arrays and answers to HTML."""

import html
from collections.abc import Mapping
from typing import Any

from engine.events.types import Run
from engine.hardware.occupancy import Occupancy
from engine.kernels.report import ASYNC_COPY, TENSOR_CORE
from explorer.attention.labels import bars, facts, said
from explorer.attention.rows import DERIVED, MODELLED, Schedule
from explorer.attention.shape import Shape
from explorer.i18n import _, ngettext
from explorer.theme import badge, number

NO_STEP = _("No step has run yet. Send a prompt on the Run page; the kernel below can be tried without.")
NO_STEP_RECORDED = _("This recorded run has no step up to here. Move on in time.")
MOST_TILES = 1200  # that the interpreter is given
SPILL_NAMES = ("LDL", "STL")
SHOWN_INSTRUCTIONS = 14


def step_html(step: int, runs: list[Run], live: bool) -> str:
    """Which attention the engine's step on the screen was."""
    if not runs:
        return said(html.escape(NO_STEP if live else NO_STEP_RECORDED))
    chunks = [run for run in runs if run.phase != "decode"]
    decodes = [run for run in runs if run.phase == "decode"]
    parts = []
    if chunks:
        keys = [run.start + run.num_tokens for run in chunks]
        what = ngettext("{n} prompt’s chunk", "{n} prompts’ chunks", len(chunks))
        parts.append(_over(what, chunks, keys))
    if decodes:
        keys = [run.start + run.num_tokens for run in decodes]
        parts.append(_over(ngettext("{n} decode", "{n} decodes", len(decodes)), decodes, keys))
    pairs = sum(run.num_tokens * (run.start + (run.num_tokens + 1) / 2) for run in runs)
    text = _("Step {step}: {what}. Query-key pairs in each head: {pairs}.").format(
        step=step, what=_("; ").join(parts), pairs=number(round(pairs))
    )
    return said(html.escape(text))


def _over(what: str, runs: list[Run], keys: list[int]) -> str:
    tokens = sum(run.num_tokens for run in runs)
    queries = ngettext("{n:,} query token", "{n:,} query tokens", tokens).format(n=tokens)
    low, high = min(keys), max(keys)
    over = (
        _("a context of {high:,}") if low == high and len(runs) == 1 else _("contexts of {high:,}") if low == high
        else _("contexts of {low:,} to {high:,}")
    )  # fmt: skip
    return _("{what} with {queries} over {over}").format(
        what=what.format(n=len(runs)), queries=queries, over=over.format(low=low, high=high)
    )


def run_html(
    shape: Shape, made: Schedule, answer: Mapping[str, Any] | None, seconds: float | None, too_many: bool, in_file: bool
) -> str:
    """Where what is drawn comes from."""
    if in_file:
        text = _("Drawn from the kernel’s own arithmetic (in a file no kernel runs).")
        return said(f"{badge('derived')} {html.escape(text)}")
    if made.source == DERIVED:
        mark = badge("derived")
        if answer is not None:
            return said(f"{mark} {html.escape(str(answer.get('error', '')))}", "error")
        if too_many:
            text = _(
                "{n:,} tiles: too many for the interpreter, which needs about 8 ms for each. Drawn from the kernel’s own arithmetic: the tiles, "
                "masks and bytes that it records where it does run."
            ).format(n=made.num_tiles)
            return said(f"{mark} {html.escape(text)}")
        going = _("the kernel runs under Triton’s interpreter ({s:.0f} s so far)").format(s=seconds) if seconds else None
        text = _("Drawn from the kernel’s own arithmetic while {what}.").format(
            what=going or _("the kernel’s run is being prepared")
        )
        return said(f"{mark} {html.escape(text)}", "wait")
    if answer is None:
        return ""
    if made.clock == MODELLED:
        text = _(
            "The recorded programs, dealt in the order of their launch to {slots:,} places that work side by side ({sms} multiprocessors of {gpu}), each tile "
            "one unit of time. A model: no GPU was asked."
        ).format(slots=len(made.lanes), sms=shape.chip.num_sms, gpu=shape.chip.title)
        return said(f"{badge('modelled')} {html.escape(text)}")
    text = _(
        "Recorded by the kernel itself, run under Triton’s interpreter in {s:.2f} s: order, not time (the interpreter runs one program after the other). "
        "Output: at most {error:.1e} off from float64’s, where the largest is {most:.2g}."
    ).format(s=answer["seconds"], error=answer["error_max"], most=answer["output_max"])
    if answer["dropped"]:
        text += " " + _("The trace was full: {n:,} records were dropped.").format(n=answer["dropped"])
    return said(f"{badge('measured')} {html.escape(text)}", "good")


def counts_html(made: Schedule, shape: Shape) -> str:
    total = made.num_tiles + made.skipped
    masked = int(made.tiles["masked"].sum())
    return facts(
        [
            (f"{made.num_tiles:,}", _("tiles done")),
            (f"{made.skipped:,} ({100 * made.skipped / max(1, total):.0f} %)", _("never loaded")),
            (f"{masked:,}", _("masked element by element")),
            (f"{len(made.programs['row']):,}", _("programs")),
            (number(made.bytes_loaded + made.bytes_stored, "B"), _("to and from device memory")),
        ]
    )


# ------------------------------------------------------------------------------------------------------------- compiled


def compile_state(shape: Shape, report: Mapping[str, Any] | None, seconds: float | None, in_file: bool) -> str:
    if in_file:
        return said(html.escape(_("In a file nothing is compiled.")))
    chip = f"{shape.chip.title} ({shape.target})"
    if report is None:
        if seconds is None:
            return said(html.escape(_("Waiting for the compiler…")), "wait")
        text = _(
            "Compiling for {chip}: {s:.0f} s so far. Triton, LLVM and ptxas take 2 to 20 s on a machine like this; the answer is kept."
        )
        return said(html.escape(text.format(chip=chip, s=seconds)), "wait")
    if "error" in report:
        return said(html.escape(str(report["error"])), "error")
    if report["refused"]:
        text = _("Refused for {chip}, in the compiler’s own words:").format(chip=chip)
        return said(f"{html.escape(text)}<pre>{html.escape(report['refused'])}</pre>", "error")
    text = _("Compiled for {chip} in {s:.1f} s by Triton {version}{kept}; no GPU was needed.").format(
        chip=chip, s=report["seconds"], version=report["versions"].get("triton", ""), kept=_(" (kept from before)") if report["cached"] else ""
    )  # fmt: skip
    return said(f"{badge('measured')} {html.escape(text)}", "good")


def compiled_html(shape: Shape, report: Mapping[str, Any], room: Occupancy | None) -> str:
    limits = shape.chip.limits
    found = [
        (number(report["shared_bytes"], "B"), _("shared memory, of {most}").format(most=number(limits.shared_per_block, "B"))),
        (str(report["registers"]), _("registers a thread, of {most}").format(most=limits.max_registers_per_thread)),
        (str(report["spills"]), _("spills: loads and stores of local memory")),
    ]
    if report["tensor_memory_columns"]:
        found.append((str(report["tensor_memory_columns"]), _("columns of tensor memory, of 512")))
    if room is not None:
        found.append(
            (f"{100 * room.occupancy:.0f} %", _("occupancy: {a} of {b} warps").format(a=room.active_warps, b=room.max_warps))
        )
        found.append((str(room.blocks_per_sm), _("programs at a time on a multiprocessor")))
    return facts(found)


def room_html(room: Occupancy) -> str:
    """How many programs each resource admits; the smallest binds."""
    most = max(room.by.values())
    rows = [(_(name), n / max(1, most), "bind" if name in room.limited_by else "", str(n)) for name, n in room.by.items()]
    text = _("Bound by {what}. The rest of an occupancy calculator’s rules: granularities of warps, registers and shared memory.")
    names = _(" and ").join(_(name) for name in room.limited_by)
    return bars(rows) + f'<p class="ct-muted ct-small" style="margin-top:6px">{html.escape(text.format(what=names))}</p>'


def kind_of(name: str) -> str:
    """What an instruction does: "tensor", "copy", "spill" or ""."""
    if name in TENSOR_CORE:
        return "tensor"
    return "copy" if name in ASYNC_COPY else "spill" if name in SPILL_NAMES else ""


def mix_html(instructions: Mapping[str, int]) -> str:
    """The instructions that stand in the machine code, the most frequent ones and all that are told apart."""
    ranked = sorted(instructions.items(), key=lambda item: -item[1])
    shown = ranked[:SHOWN_INSTRUCTIONS] + [item for item in ranked[SHOWN_INSTRUCTIONS:] if kind_of(item[0])]
    most = max(instructions.values(), default=1)
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(text)}</span>'
        for colour, text in (
            ("#0072b2", _("tensor cores")),
            ("#009e73", _("asynchronous copies")),
            ("#d55e00", _("spills")),
            ("#8a8f98", _("the rest")),
        )
    )
    left = len(ranked) - len(shown)
    rest = _("{n:,} instructions of {kinds} kinds; {left} rarer kinds are not drawn.").format(
        n=sum(instructions.values()), kinds=len(ranked), left=left
    )
    rows = [(name, n / most, kind_of(name), f"{n:,}") for name, n in shown]
    return (
        bars(rows)
        + f'<div class="at-keys">{keys}</div><p class="ct-muted ct-small" style="margin-top:4px">{html.escape(rest)}</p>'
    )
