"""Drafters with a model, without an engine: a tiny random target on a pool full of NaN, and drafter files with random weights.

``Bench`` does what an engine's step does, and no more: it computes prompts, asks for drafts, computes them, keeps what it is told
to keep, and tells the drafter. What a draft should be is computed anew each time, without KV, by the float32 modules that the
training uses (``engine.speculation.training.modules``).
"""

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.events.recorder import Recorder
from engine.kvcache.layout import KVCache
from engine.kvcache.pool import BlockPool
from engine.model.checkpoint import load_checkpoint
from engine.model.llama import Model
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled
from engine.speculation.base import Computed, Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_model import DraftModelDrafter
from engine.speculation.eagle import EagleDrafter
from engine.speculation.files import write_drafter
from engine.speculation.head import Target
from engine.speculation.layer_skip import LayerSkipDrafter
from engine.speculation.medusa import MedusaDrafter
from engine.speculation.training import modules
from tests.engine.engines import tiny_parts
from tests.engine.model.test_few_rows import Uncompiled

GREEDY = SamplingParams(temperature=0, max_tokens=1000)
EXIT = 2  # of the tiny model's 3 layers
DRAFTERS = {"draft_model": DraftModelDrafter, "layer_skip": LayerSkipDrafter, "medusa": MedusaDrafter, "eagle": EagleDrafter}


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cutaway-drafters-"))


@functools.cache
def random_module(method: str, family: str = "llama") -> Any:
    """The drafter as a module, in weights that its file holds exactly."""
    config = tiny_parts(family)[0].model_config
    make = {
        "draft_model": lambda: modules.DraftModel(config, 2),
        "layer_skip": lambda: modules.Exit(config, EXIT),
        "medusa": lambda: modules.Medusa(config, 3),
        "eagle": lambda: modules.Eagle(config),
    }
    module = make[method]().eval()
    generator = torch.Generator().manual_seed(len(method))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            wide = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_((wide + 0.2 * torch.randn(parameter.shape, generator=generator)).half().float())
    return module


@functools.cache
def drafter_file(method: str, family: str = "llama", vocab: tuple[int, ...] | None = None) -> Path:
    """``vocab``: None: every third token is left out."""
    parts, _ = tiny_parts(family)
    ids = vocab if vocab is not None else tuple(i for i in range(parts.model_config.vocab_size) if i % 3)
    path = folder() / f"{method}-{family}-{len(ids)}.safetensors"
    module = random_module(method, family)
    write_drafter(
        path, method, module.state_dict(), torch.tensor(ids), config=parts.model_config, target="tiny",
        target_sha256=parts.model_facts["sha256"], settings=module.settings(),
    )  # fmt: skip
    return path


@functools.cache
def compiled_model(family: str) -> Model:
    checkpoint = load_checkpoint(tiny_parts(family)[0].path)
    return Model(checkpoint.config, checkpoint.tensors, "cpu", torch.float32, Uncompiled)  # type: ignore[arg-type]


class Oracle:
    """The same predictions from nothing but tokens."""

    def __init__(self, method: str, family: str = "llama") -> None:
        parts, _ = tiny_parts(family)
        checkpoint = load_checkpoint(parts.path)
        self.method = method
        self.module = random_module(method, family)
        self.target = modules.Target(checkpoint.config, checkpoint.tensors)
        self.ids = torch.tensor([i for i in range(checkpoint.config.vocab_size) if i % 3])

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """[Vd]: what the drafter thinks of the token after ``tokens`` and then ``drafted``; the target has computed all of
        ``tokens`` but the last one."""
        all_ = torch.tensor([[*tokens, *drafted]])
        features, left = self.target(all_, EXIT)
        features[:, len(tokens) - 1 :] = 7.0  # nobody knows these (NaN would spread through masked positions)
        depth = len(drafted)
        out = self.module.predict(features, self.target.embed_tokens(all_), left, depth + 1)
        if self.method == "medusa":
            feature = out[depth][0, len(tokens) - 2]
        elif self.method == "eagle":
            feature = out[depth][0, -1]
        else:
            feature = out[0][0, -1]
        return self.target.head[self.ids] @ feature

    def check(self, tokens: Sequence[int], draft: Draft, temperature: float = 0.0) -> None:
        """Probabilities of all nodes, and that at temperature 0 a chain's tokens are the likeliest."""
        for node, (token, parent, prob) in enumerate(zip(draft.token_ids, draft.parents, draft.probs, strict=True)):
            path: list[int] = []
            while parent >= 0:
                path.insert(0, draft.token_ids[parent])
                parent = draft.parents[parent]
            probs = (self.logits(tokens, path) / (temperature or 1.0)).softmax(-1)
            at = int((self.ids == token).nonzero())
            assert abs(float(probs[at]) - prob) < 2e-4, (node, float(probs[at]), prob)
            if draft.is_chain and temperature == 0:
                assert float(probs.max()) - prob < 2e-4
            if draft.q is not None:
                assert (draft.q[node][self.ids] - probs).abs().max() < 2e-4
                assert abs(float(draft.q[node].sum()) - 1) < 1e-9


class Bench:
    """Requests on a target with a drafter; ``fresh()`` changes the drafter."""

    def __init__(
        self,
        method: str,
        family: str = "llama",
        *,
        block_size: int = 4,
        num_blocks: int = 48,
        compiled: bool = False,
        **config: Any,
    ) -> None:
        """``compiled``: few rows of one request go through the layer that is compiled otherwise, as torch runs it."""
        self.parts, _ = tiny_parts(family)
        self.model = compiled_model(family) if compiled else self.parts.model
        self.rng = random.Random(0)
        self.pool = BlockPool(num_blocks, block_size, Recorder())
        self.kv = KVCache(self.parts.model_config, num_blocks, block_size, "cpu", torch.float32)
        self.kv.fill_blocks(range(num_blocks), float("nan"))
        self.runner = Runner(self.model, self.kv)
        model = config.pop("model", None) or str(drafter_file(method, family))
        self.config = SpeculativeConfig(method, model=None if config.get("trained_exit") is False else model, **config)
        self.target = Target(self.model, self.kv, self.pool, self.parts.tokenizer, self.parts.model_facts["sha256"])
        self.drafter: Drafter = DRAFTERS[method](self.config, self.target)
        self.fresh()

    def fresh(self) -> None:
        """A drafter that knows nothing yet, on KV full of NaN."""
        self.drafter = DRAFTERS[self.config.method](self.config, self.target)
        for holder in (getattr(self.drafter, "passes", None), getattr(self.drafter, "layers", None)):
            if holder is not None:
                holder.kv.fill_blocks(range(self.pool.num_blocks), float("nan"))
        if hasattr(self.drafter, "features"):
            self.drafter.features.fill_(float("nan"))

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 320) for _ in range(count)]

    def request(self, name: str, tokens: list[int], params: SamplingParams = GREEDY, seed: int = 7) -> Request:
        made = Request(name, tokens, params, seed)
        made.status = "running"
        return made

    def room(self, request: Request, count: int) -> None:
        """Blocks for ``count`` tokens."""
        more = -(-count // self.pool.block_size) - len(request.block_ids)
        if more > 0:
            request.block_ids += self.pool.allocate(request.request_id, len(request.block_ids), more)

    def prefill(self, request: Request, chunk: int = 1000) -> None:
        """Compute all but the last token; the drafter is told."""
        while request.num_computed_tokens < request.num_tokens - 1:
            count = min(chunk, request.num_tokens - 1 - request.num_computed_tokens)
            self.room(request, request.num_computed_tokens + count)
            self._compute([Scheduled(request, request.num_computed_tokens, count, False)])

    def propose(self, requests: Sequence[Request], counts: Sequence[int] | int = 4) -> list[Draft]:
        counts = [counts] * len(requests) if isinstance(counts, int) else counts
        for request, count in zip(requests, counts, strict=True):
            self.room(request, request.num_tokens + count)
        return self.drafter.propose([Wanted(r, n) for r, n in zip(requests, counts, strict=True)])

    def decide(
        self, requests: Sequence[Request], drafts: Sequence[Draft], paths: Sequence[Sequence[int]], own: Sequence[int]
    ) -> None:
        """Compute the drafts, keep the nodes of ``paths``, add the token ``own``; blocks behind that go back, poisoned."""
        runs = [
            Scheduled(r, r.num_computed_tokens, 1 + len(d), True, draft=d if len(d) else None)
            for r, d in zip(requests, drafts, strict=True)
        ]
        self._compute(runs, paths, own)

    def _compute(
        self, runs: Sequence[Scheduled], paths: Sequence[Sequence[int]] | None = None, own: Sequence[int] | None = None
    ) -> None:
        _, features = self.runner.run_with_features(runs)
        computed, row = [], 0
        for i, run in enumerate(runs):
            request, rows = run.request, list(range(row, row + run.num_tokens))
            row += run.num_tokens
            if paths is not None and own is not None:
                if run.draft is not None:
                    self.runner.compact(run, paths[i])
                    request.token_ids += [run.draft.token_ids[node] for node in paths[i]]
                rows = [rows[0], *(rows[1 + node] for node in paths[i])]
                request.token_ids.append(own[i])
            request.num_computed_tokens = run.start + len(rows)
            self._roll_back(request)
            computed.append(Computed(request, run.start, rows))
        self.drafter.observe(computed, features if self.drafter.needs_features else None)

    def _roll_back(self, request: Request) -> None:
        kept = -(-request.num_computed_tokens // self.pool.block_size)
        self.kv.fill_blocks(request.block_ids[kept:], float("nan"))
        self.pool.free(request.request_id, request.block_ids[kept:])
        del request.block_ids[kept:]

    def release(self, request: Request) -> None:
        self.pool.free(request.request_id, request.block_ids)
        request.block_ids, request.num_computed_tokens = [], 0
        self.runner.forget(request.request_id)
        self.drafter.forget(request.request_id)
