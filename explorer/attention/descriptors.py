"""The same kernel with tensor descriptors, for GPUs that copy whole tiles by themselves (TMA, from sm_90 on), beside the plain one."""

import html
from typing import Any

from engine.kernels.report import ASYNC_COPY
from explorer.attention import words
from explorer.attention.labels import table
from explorer.attention.shape import Shape
from explorer.i18n import _
from explorer.theme import number

FIRST = 90  # compute capability from which there is a tensor memory accelerator


def has_tma(shape: Shape) -> bool:
    return shape.chip.arch >= FIRST


def beside_html(shape: Shape, plain: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """``plain`` and ``other``: the compiler's reports without and with descriptors; None: not there yet."""
    if not has_tma(shape):
        text = _("{gpu} has no tensor memory accelerator: it came with sm_90. Choose an H100, H200 or B200.").format(
            gpu=shape.chip.title
        )
        return _note(text)
    if other is not None and "error" in other:
        return _note(other["error"])
    if plain is None or other is None:
        return _note(_("Compiling the variant with descriptors…"))
    if other["refused"]:
        return _note(_("The compiler refuses the variant: {words}").format(words=other["refused"]))
    if plain["refused"]:
        return _note(_("The compiler refuses the plain kernel, so there is nothing to compare."))
    both = (plain, other)
    copies = sorted({name for report in both for name in report["instructions"] if name in ASYNC_COPY})
    tensor = sorted({name for report in both for name in report["instructions"] if words.kind_of(name) == "tensor"})
    rows = [
        *((False, [_meaning(name), *(f"{r['instructions'].get(name, 0):,}" for r in both)]) for name in (*copies, *tensor)),
        (False, [_("all instructions"), *(f"{sum(r['instructions'].values()):,}" for r in both)]),
        (False, [_("registers a thread"), *(number(r["registers"]) for r in both)]),
        (False, [_("shared memory"), *(number(r["shared_bytes"], "B") for r in both)]),
    ]
    told = _(
        "Plain: every thread computes addresses and issues cp.async (LDGSTS) for 16 bytes of a tile at a time. With a descriptor one thread "
        "names the tile (UTMALDG), and the accelerator copies it whole. That is one of the three things that FlashAttention-3 adds on this "
        "generation. The second, warps that only copy beside warps that only compute, and the third, 8-bit products, are not in this kernel."
    )
    head = (_("in the machine code"), _("plain"), _("with descriptors"))
    return table(head, rows) + _note(told)


def _meaning(name: str) -> str:
    kinds = {
        "LDGSTS": _("copies of 16 bytes a thread"),
        "UTMALDG": _("copies of a whole tile"),
        "HGMMA": _("products of a warp group"),
        "HMMA": _("products of a warp"),
    }
    return f"{name}: {kinds[name]}" if name in kinds else name


def _note(text: str) -> str:
    return f'<p class="ct-muted ct-small" style="margin:8px 0 0">{html.escape(text)}</p>'
