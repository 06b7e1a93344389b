"""What an engine speculates with: asks its drafter before a step's forward pass, tells it afterwards what was kept, and counts."""

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.runner import Scheduled
from engine.speculation.auto import AutoK
from engine.speculation.base import Computed, Draft, Drafter, Wanted
from engine.speculation.config import AUTO, SpeculativeConfig
from engine.speculation.head import Target
from engine.speculation.lookup_first import LookupFirst
from engine.speculation.telling import record_draft

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.request import Request
    from engine.scheduler import Schedule

_MOST = 8  # the largest K that "auto" chooses


class SpecDecodeMetrics:
    """Counts since the engine was made, under the names that vLLM gives them."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_tokens_per_pos: list[int] = []

    def add(self, draft: Draft, accepted: Sequence[int]) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += draft.num_proposed
        self.num_accepted_tokens += len(accepted)
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (max(draft.depths()[: draft.num_proposed], default=0) - len(per_pos))
        for position in range(len(accepted)):
            per_pos[position] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "vllm:spec_decode_num_drafts": self.num_drafts,
            "vllm:spec_decode_num_draft_tokens": self.num_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "vllm:spec_decode_num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
        }


class Speculator:
    """Between one engine and its drafter. There is none while ``EngineConfig.speculative`` is None."""

    def __init__(self, engine: "Engine", config: SpeculativeConfig, metrics: SpecDecodeMetrics) -> None:
        """ValueError: the drafter cannot be had, or does not fit this engine's model."""
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.drafter: Drafter = create_drafter(config, engine)
        self.needs_features = self.drafter.needs_features
        self.auto = AutoK(_MOST) if config.num_speculative_tokens == AUTO else None
        self.k = 0  # of the step under way

    # -- for the scheduler -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """K of the step to come; with "auto" by how many requests run."""
        running = max(1, len(self.engine.scheduler.running))
        self.k = self.auto.choose(running) if self.auto is not None else int(self.config.num_speculative_tokens)

    def num_wanted(self, request: "Request") -> int:
        """Nodes that may be proposed for a request whose last token alone is not computed."""
        if self.k == 0 or request.beams is not None or _about_to_fork(request):
            return 0
        output = request.num_tokens - request.num_prompt_tokens
        left = min(request.params.max_tokens - output, self.engine.most_tokens(request) - request.num_tokens) - 1
        depth = min(self.k, left)
        if depth <= 0:
            return 0
        return self._nodes(depth) + self.drafter.num_window

    def _nodes(self, depth: int) -> int:
        tree = self.config.tree
        return depth if tree is None else sum(tree[:depth])

    def covers(self, block_ids: Sequence[int]) -> int:
        return self.drafter.covers(block_ids)

    def forget(self, request_id: str) -> None:
        self.drafter.forget(request_id)

    # -- one step ----------------------------------------------------------------------------------------------------------

    def draft(self, schedule: "Schedule") -> None:
        """Fill the places that the scheduler has reserved."""
        at = [i for i, run in enumerate(schedule.runs) if run.num_drafts]
        if not at:
            return
        wanted = [self._wanted(schedule.runs[i]) for i in at]
        start = time.perf_counter()
        drafts = self.drafter.propose(wanted)
        draft_ms = 1e3 * (time.perf_counter() - start)
        for i, one, draft in zip(at, wanted, drafts, strict=True):
            if draft.num_proposed > one.count or draft.num_window > one.window:
                raise RuntimeError(
                    f"{self.config.method} gave {draft.num_proposed} and {draft.num_window} nodes where {one.count} and {one.window} were wanted"
                )
            if len(draft):
                schedule.runs[i] = replace(schedule.runs[i], num_tokens=1 + len(draft), draft=draft)
            if self.engine.recorder.on:
                record_draft(self.engine, self.config.method, one, draft, draft_ms, len(at))

    def _wanted(self, run: Scheduled) -> Wanted:
        window = self.drafter.num_window
        proposed = min(self.num_wanted(run.request) - window, run.num_drafts)
        return Wanted(run.request, proposed, window if run.num_drafts >= proposed + window else 0)

    def observe(self, schedule: "Schedule", logits: Any, features: Any, step_ms: float) -> None:
        """The step is committed: ``schedule.runs`` say what was accepted. ``logits``, ``features``: of the pass, in their order."""
        self._count(schedule.runs, step_ms)
        row = logit_row = 0
        computed = []
        for run in schedule.runs:
            logit_row += run.num_logits
            if run.draft is not None and run.draft.num_read and run.request.status == "running":
                read = logits[logit_row - run.draft.num_read : logit_row].argmax(-1).tolist()
                self.drafter.observe_window(run.request, read)
            rows = list(range(row, row + run.num_tokens))
            if run.draft is not None:
                rows = [rows[0], *(rows[1 + node] for node in run.accepted)]
            if run.request.status == "running":
                computed.append(Computed(run.request, run.start, rows))
            row += run.num_tokens
        self.drafter.observe(computed, features)

    def _count(self, runs: Sequence[Scheduled], step_ms: float) -> None:
        for run in runs:
            if run.draft is not None and run.draft.num_proposed:
                self.metrics.add(run.draft, run.accepted)
        decodes = [run for run in runs if run.sample and (run.num_tokens == 1 or run.draft is not None)]
        if self.auto is not None and decodes and len(decodes) == len(runs):  # a step with a prefill says nothing of decoding
            self.auto.observe(self.k, [len(run.accepted) for run in decodes if run.num_drafts], step_ms, len(runs))


def _about_to_fork(request: "Request") -> bool:
    """The prompt of n > 1, whose siblings leave it at its end."""
    return request.params.n > 1 and request.parent_id is None and request.num_tokens == request.num_prompt_tokens


_DRAFTERS = {  # imported when first used: most engines speculate with none or one
    "draft_model": "engine.speculation.draft_model:DraftModelDrafter",
    "ngram": "engine.speculation.ngram:NgramDrafter",
    "lookahead": "engine.speculation.lookahead:LookaheadDrafter",
    "layer_skip": "engine.speculation.layer_skip:LayerSkipDrafter",
    "rest": "engine.speculation.rest:RestDrafter",
    "medusa": "engine.speculation.medusa:MedusaDrafter",
    "eagle": "engine.speculation.eagle:EagleDrafter",
}
_WITHOUT_MODEL = ("ngram", "lookahead")  # they read tokens only


def create_drafter(config: SpeculativeConfig, engine: "Engine") -> Drafter:
    """The drafter of ``config.method``. ValueError where it does not fit the engine's model."""
    module, _, name = _DRAFTERS[config.method].partition(":")
    made = getattr(import_module(module), name)
    drafter: Drafter = made(config) if config.method in _WITHOUT_MODEL else made(config, Target.of(engine))
    return LookupFirst(config, drafter) if config.prompt_lookup else drafter
