"""Scenes of the Quantisation page: a button moves the weights of the whole model, and says what to look at."""

from dataclasses import dataclass
from typing import Any

from explorer.i18n import _


@dataclass(frozen=True)
class Scene:
    """``knobs`` go to ``reconfigure``."""

    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at once these weights run
    knobs: dict[str, Any]


def _knobs(method: str | None, group_size: int | None = None) -> dict[str, Any]:
    return {"quantization": method, "quantization_group_size": group_size, "quantization_options": None}


SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "int8", _("int8: nothing to see"), _("One scale for each output channel, 255 levels: half the bytes of 16 bits."),
            _("About 40 dB everywhere: errors of a hundredth of a weight's size. The map has little colour to it, and the text stays the same for long. Look at the "
              "memory above, and at tokens/s on the tab “The trade”."),
            _knobs("int8"),
        ),
        Scene(
            "int4", _("int4: 16 levels a group"), _("Groups of 32 columns, each with a scale and a minimum: 5 bits per weight, scales counted."),
            _("Four bits are not four: a scale and a minimum in 16 bits for 32 weights are one bit more for each. Click a cell: whether the levels cost much depends on "
              "where the weights stood before. Those of a 4-bit file stand on such levels already."),
            _knobs("int4", 32),
        ),
        Scene(
            "coarse", _("int4 in groups of 128"), _("The same 16 levels for four times as many columns: 4.25 bits per weight."),
            _("One outlier stretches the grid of its whole group, and in a larger group it takes more neighbours with it: SQNR falls everywhere. Compare the map of the "
              "share of outliers with that of the output error."),
            _knobs("int4", 128),
        ),
        Scene(
            "int2", _("int2: the text breaks"), _("Four levels a group: too few for plain rounding."),
            _("The output error is of the size of the output itself, and thirty layers carry it on. Send a prompt on the Run page: this is what that sounds like. GPTQ and "
              "AWQ choose better levels (see the last tab), but two bits stay few."),
            _knobs("int2", 32),
        ),
        Scene(
            "back", _("Back to the original"), _("The original weights again, in the model's dtype."),
            _("Nothing is rounded, so the map of SQNR is empty; the share of outliers is the checkpoint's own."),
            _knobs(None),
        ),
    )
}  # fmt: skip
