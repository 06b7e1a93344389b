"""The what-if knobs of the Roofline page: parameters of its view, and the widgets that show and set them."""

from typing import Any

import panel_material_ui as pmui

from engine.hardware.gpus import gpus
from explorer.i18n import _
from explorer.pace import quick
from explorer.quantization.labels import KV_TITLES
from explorer.roofline.whatif import BATCHES, BITS, CONTEXTS, KV_DTYPES, kv_head_choices

WIDE: dict[str, Any] = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}
TENSOR_PARALLEL = (1, 2, 4, 8)


def bound(view: Any, name: str, widget: Any) -> Any:
    """``widget`` shows the view's parameter and sets it."""

    def show(event: Any) -> None:
        values = list(widget.options.values()) if isinstance(widget.options, dict) else list(widget.options)
        if event.new in values and widget.value != event.new:
            widget.value = event.new

    def take(event: Any) -> None:
        if event.new is not None and getattr(view, name) != event.new:
            setattr(view, name, event.new)

    widget.param.watch(take, "value")
    view.param.watch(show, name)
    return widget


def gpu_select(view: Any) -> Any:
    titles = {gpu.title: key for key, gpu in gpus().items()}
    return bound(view, "gpu", pmui.Select(label=_("GPU"), options=titles, value=view.gpu, **WIDE))


def batch_slider(view: Any) -> Any:
    return bound(view, "batch", quick(_steps(_("Batch (what if)"), BATCHES, view.batch)))


def context_slider(view: Any) -> Any:
    return bound(view, "context", quick(_steps(_("Context, tokens"), CONTEXTS, view.context)))


def _steps(label: str, values: tuple[int, ...], value: int) -> Any:
    return pmui.DiscreteSlider(label=label, options=list(values), value=value, formatter="%d", **WIDE)


def bits_select(view: Any) -> Any:
    options = {(_("as they run") if not bits else _("{n} bits").format(n=bits)): bits for bits in BITS}
    return bound(view, "weight_bits", pmui.Select(label=_("Linear weights"), options=options, value=view.weight_bits, **WIDE))


def kv_dtype_select(view: Any) -> Any:
    options = {KV_TITLES.get(name, name): name for name in KV_DTYPES}
    return bound(view, "kv_dtype", pmui.Select(label=_("KV cache"), options=options, value=view.kv_dtype, **WIDE))


def tp_select(view: Any) -> Any:
    options = {str(n): n for n in TENSOR_PARALLEL}
    return bound(view, "tp", pmui.Select(label=_("Tensor parallel"), options=options, value=view.tp, **WIDE))


def kv_heads_select(view: Any) -> Any:
    options = {_("the model's own"): 0, **({str(view.kv_heads): view.kv_heads} if view.kv_heads else {})}
    return bound(view, "kv_heads", pmui.Select(label=_("KV heads (GQA)"), options=options, value=view.kv_heads, **WIDE))


def offer_kv_heads(select: Any, view: Any, model: dict[str, Any]) -> None:
    """The choices that this model has; what the address says stays one of them."""
    own = model.get("num_kv_heads")
    options = {(_("the model's own") if own is None else _("the model's own, {n}").format(n=own)): 0}
    heads = model.get("num_attention_heads")
    for n in kv_head_choices(model):
        if n != own:
            options[_("{n} (MHA)").format(n=n) if n == heads else _("{n} (MQA)").format(n=n) if n == 1 else str(n)] = n
    if view.kv_heads not in options.values():
        options[str(view.kv_heads)] = view.kv_heads
    if select.options != options:
        select.options = options
        select.value = view.kv_heads
