"""Scenes of the Attention page: a button moves the what-if knobs and says what to look at."""

from dataclasses import dataclass
from typing import Any

from explorer.i18n import _


@dataclass(frozen=True)
class Scene:
    """``knobs``: fields of ``Shape``; ``tab``: which one opens."""

    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at
    knobs: dict[str, Any]
    tab: str


_PLAIN = {
    "block_m": 64, "block_n": 64, "num_stages": 2, "num_warps": 4, "head_dim": 64, "seq_len": 512, "causal": True, "window": 0, "group": 1,
}  # fmt: skip

SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "causal", _("Causality halves the work"), _("512 tokens in tiles of 64 × 64, each token sees the past."),
            _("28 of 64 tiles are never loaded, and only the eight on the diagonal are masked element by element. The last queries have the most tiles, so their "
              "program is launched first: nobody is left running alone at the end."),
            dict(_PLAIN), "tiles",
        ),
        Scene(
            "window", _("A sliding window"), _("The same with a window of 128 keys: what lies before it is not loaded either."),
            _("Every row of tiles has the same few tiles, however long the text: the work grows with N and no longer with N²."),
            {**_PLAIN, "seq_len": 1024, "window": 128}, "tiles",
        ),
        Scene(
            "large", _("Tiles that do not fit"), _("Tiles of 256 × 128, five stages, heads of 128 numbers, for a GeForce RTX 4090."),
            _("The compiler's own words say how much shared memory this takes and how much there is. Fewer stages or smaller tiles, and it compiles; then see what the "
              "registers say."),
            {**_PLAIN, "block_m": 256, "block_n": 128, "num_stages": 5, "num_warps": 8, "head_dim": 128, "gpu": "rtx4090"}, "compile",
        ),
        Scene(
            "spill", _("Too much for the registers"), _("Tiles of 128 × 128 with four warps, for an A100."),
            _("Accumulator and scores lie in registers. 128 × 64 + 128 × 128 floats are 192 for each of 128 threads; with the rest that is more than 255, and "
              "some go to local memory: spills. Eight warps share it among twice as many threads."),
            {**_PLAIN, "block_m": 128, "block_n": 128, "num_stages": 3, "gpu": "a100-80gb"}, "compile",
        ),
        Scene(
            "double", _("Twice as long, four times the traffic"), _("Bytes from and to device memory, by the number of tokens."),
            _("Both curves are straight lines with the same slope: flash attention moves far fewer bytes, and still four times as many for twice the tokens. What became "
              "linear is the memory it needs."),
            {**_PLAIN, "block_m": 128, "seq_len": 1024, "causal": False}, "traffic",
        ),
    )
}  # fmt: skip
