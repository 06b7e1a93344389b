"""Where a Panel object stands: its margins, sizes, classes and stylesheets as CSS."""

from typing import Any

PARAMS = (
    "align", "css_classes", "height", "margin", "max_height", "max_width", "min_height", "min_width", "sizing_mode", "styles",
    "stylesheets", "visible", "width",
)  # fmt: skip
_SIZES = ("width", "height", "min_width", "min_height", "max_width", "max_height")


def common(obj: Any) -> dict[str, Any]:
    """visible, classes, css (texts of stylesheets) and style (CSS property -> value) of any Panel object."""
    css = [sheet for sheet in obj.stylesheets if isinstance(sheet, str)]
    if len(css) != len(obj.stylesheets):
        raise ValueError(f"stylesheets of {type(obj).__name__} must be text: a linked one cannot be taken along")
    return {"visible": bool(obj.visible), "classes": [*(obj.css_classes or []), *_stretch(obj)], "css": css, "style": _style(obj)}


def _stretch(obj: Any) -> list[str]:
    mode = obj.sizing_mode or ""
    both = mode in ("stretch_both", "scale_both")
    wide = both or mode in ("stretch_width", "scale_width")
    high = both or mode in ("stretch_height", "scale_height")
    return ["ctm-wide"] * wide + ["ctm-high"] * high


def _style(obj: Any) -> dict[str, str]:
    style = {}
    margin = _margin(obj.margin)
    if margin:
        style["margin"] = margin
    stretched = _stretch(obj)
    for name in _SIZES:
        value = getattr(obj, name, None)
        if value is not None and not (
            (name == "width" and "ctm-wide" in stretched) or (name == "height" and "ctm-high" in stretched)
        ):
            style[name.replace("_", "-")] = f"{value}px" if isinstance(value, int | float) else str(value)
    return {**style, **{str(k): str(v) for k, v in (obj.styles or {}).items()}}


def _margin(margin: Any) -> str:
    if margin is None:
        return ""
    sides = margin if isinstance(margin, tuple | list) else (margin,)
    return " ".join(f"{side}px" for side in sides)
