"""The recorded runs that come with Cutaway: something real to look at before a model is here, or while it loads.

Each was made by the engine with the default model; ``python -m explorer.sources.record`` makes them anew.
"""

from dataclasses import dataclass
from pathlib import Path

from explorer.i18n import _

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ShippedRun:
    name: str  # in addresses: ?run=name
    title: str
    what: str  # what there is to see, in a sentence

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.cutaway"


SHIPPED: dict[str, ShippedRun] = {
    run.name: run
    for run in (
        ShippedRun(
            "shared-prefix",
            _("Six questions about one text"),
            _(
                "Their prompts begin alike: the first one computes the KV of the beginning, the others find its blocks in the prefix cache."
            ),
        ),
        ShippedRun(
            "full-pool",
            _("More requests than the pool can hold"),
            _(
                "Blocks run out: cached prefixes are evicted, a request is preempted and computed again, until the batch is made smaller."
            ),
        ),
    )
}
DEFAULT_RUN = "shared-prefix"
