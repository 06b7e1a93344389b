"""The pages, by slug. Navigation, addresses, tests and the documentation all walk this dict."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from explorer.base import Clock, ExplorerView
from explorer.i18n import _


@dataclass(frozen=True)
class Page:
    slug: str
    title: str
    question: str  # what a reader can answer with it
    icon: str  # a Material icon's name
    view: str  # "module:class" of its ExplorerView, imported when first opened, so that the first page shows early

    @property
    def view_name(self) -> str:
        """The view's class name, which is also the name of its widget in a notebook."""
        return self.view.partition(":")[2]

    def view_class(self) -> type[ExplorerView]:
        module, _colon, name = self.view.partition(":")
        view: type[ExplorerView] = getattr(import_module(module), name)
        return view

    def build(self, store: Any, session: Any, clock: Clock) -> ExplorerView:
        """A view of ``store``; ``session`` is None for a saved run."""
        return self.view_class()(store, session, clock)


PAGES: dict[str, Page] = {
    page.slug: page
    for page in (
        Page(
            "run",
            _("Run"),
            _("What does the engine do with my prompts, step by step?"),
            "play_circle",
            "explorer.run.view:RunView",
        ),
        Page(
            "kv-cache",
            _("KV cache"),
            _("Where do keys and values live, and who shares them?"),
            "grid_view",
            "explorer.kv_cache.view:KVCacheView",
        ),
        Page(
            "batching",
            _("Batching"),
            _("Who is in the batch at each step, and what does that cost in throughput and waiting?"),
            "view_timeline",
            "explorer.batching.view:BatchingView",
        ),
        Page(
            "sampling",
            _("Sampling"),
            _("Why did this token come out, and what would another setting have given?"),
            "casino",
            "explorer.sampling.view:SamplingView",
        ),
        Page(
            "speculation",
            _("Speculation"),
            _("Who wrote each token, the drafter or the target, and does it pay?"),
            "fast_forward",
            "explorer.speculation.view:SpeculationView",
        ),
        Page(
            "quantization",
            _("Quantisation"),
            _("What does rounding do to a weight, to the output, to the text, and what does it save?"),
            "compress",
            "explorer.quantization.view:QuantizationView",
        ),
        Page(
            "attention",
            _("Attention"),
            _("How does the kernel go over the score matrix tile by tile, and what does that take of a GPU?"),
            "apps",
            "explorer.attention.view:AttentionView",
        ),
        Page(
            "roofline",
            _("Roofline"),
            _("What bounds a step, arithmetic or memory, and what fits into which GPU?"),
            "speed",
            "explorer.roofline.view:RooflineView",
        ),
    )
}
HOME = "run"
