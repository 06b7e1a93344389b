"""The weight methods by name: what each is and what it takes. Plain values: a configuration that is read elsewhere needs no torch."""

from dataclasses import dataclass

# The configuration's names (``EngineConfig.quantization``), in the order in which a screen lists them.
METHODS = ("int8", "int8_w8a8", "fp8", "int4", "nf4", "gptq", "awq", "int3", "int2")


@dataclass(frozen=True, slots=True)
class Method:
    """One method, as a screen or a configuration needs to know it."""

    name: str  # one of base.METHODS
    title: str
    bits: int  # of a code
    group_size: int | None  # columns that share a scale unless told otherwise; None: one scale for each output channel, no choice
    group_sizes: tuple[int, ...]  # those a screen offers; any of 1 or more is taken. Empty where there is no choice
    needs_calibration: bool
    description: str  # one sentence


_GROUPS = (16, 32, 64, 128, 192, 576)

METHOD: dict[str, Method] = {
    m.name: m
    for m in (
        Method(
            name="int8",
            title="int8",
            bits=8,
            group_size=None,
            group_sizes=(),
            needs_calibration=False,
            description="Each output channel is divided by its own scale and rounded to one of 255 evenly spaced integers.",
        ),
        Method(
            name="int8_w8a8",
            title="int8, W8A8",
            bits=8,
            group_size=None,
            group_sizes=(),
            needs_calibration=False,
            description="The layer's inputs are rounded to int8 as well, token by token, so the whole product is of integers.",
        ),
        Method(
            name="fp8",
            title="FP8 e4m3",
            bits=8,
            group_size=None,
            group_sizes=(),
            needs_calibration=False,
            description="Eight-bit floating point: the step grows with the weight, so small weights keep their digits and large ones lose some.",
        ),
        Method(
            name="int4",
            title="int4",
            bits=4,
            group_size=32,
            group_sizes=_GROUPS,
            needs_calibration=False,
            description="Each group of neighbouring weights is rounded to 16 even steps between its own least and largest.",
        ),
        Method(
            name="nf4",
            title="NF4",
            bits=4,
            group_size=64,
            group_sizes=_GROUPS,
            needs_calibration=False,
            description="The 16 levels are quantiles of a normal distribution: close together about zero, where most weights are.",
        ),
        Method(
            name="gptq",
            title="GPTQ",
            bits=4,
            group_size=64,
            group_sizes=_GROUPS,
            needs_calibration=True,
            description="Columns are rounded one after another, and those still to come are shifted to make up for the error already made.",
        ),
        Method(
            name="awq",
            title="AWQ",
            bits=4,
            group_size=64,
            group_sizes=_GROUPS,
            needs_calibration=True,
            description="Weights that meet large inputs are scaled up before rounding, and the inputs down, so that they lose less.",
        ),
        Method(
            name="int3",
            title="int3",
            bits=3,
            group_size=32,
            group_sizes=_GROUPS,
            needs_calibration=False,
            description="Eight even steps for each group: the error is about twice that of four bits, and text begins to suffer.",
        ),
        Method(
            name="int2",
            title="int2",
            bits=2,
            group_size=32,
            group_sizes=_GROUPS,
            needs_calibration=False,
            description="Four even steps for each group: too few for plain rounding, and good for seeing what breaks first.",
        ),
    )
}


def check(method: str, group_size: int | None = None) -> tuple[Method, int | None]:
    """The method of that name and the group size it would use: ``group_size``, or its own where None.

    ValueError, with what is allowed: an unknown name, a group size below 1 or not an integer, one for a method that has no groups.
    """
    if method not in METHOD:
        raise ValueError(f"quantization is one of {', '.join(METHODS)}, got {method!r}")
    known = METHOD[method]
    if group_size is None:
        return known, known.group_size
    if known.group_size is None:
        raise ValueError(f"{method} has one scale for each output channel and takes no group size, got {group_size!r}")
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        offered = ", ".join(map(str, known.group_sizes))
        raise ValueError(f"{method} takes groups of 1 column or more ({offered} are usual), got {group_size!r}")
    return known, group_size
