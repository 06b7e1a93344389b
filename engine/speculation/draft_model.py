"""A small model drafts for the large one (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

It has KV of its own under the target's block ids. What it has not computed yet of a request (after a prefix hit that it has no
entries for, or when it was switched on in the middle) it catches up on in the first pass of a draft, together with the tokens
that were accepted last.

Two kinds: some layers of the target's width that share the target's embedding and head, in a drafter file; or any checkpoint
with the target's tokenizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.attention.base import create_attention
from engine.kvcache.layout import KVCache
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.llama import Model, Norm
from engine.speculation.base import Computed
from engine.speculation.chain import ChainDrafter, Drafting
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_kv import DraftLayers, DraftRun, Filled, draft_batch
from engine.speculation.files import DrafterFile, read_drafter, shipped_drafter
from engine.speculation.head import DraftHead, Target

_CATCH_UP = 1024  # tokens of one pass, at most


class Passes(ABC):
    """The model behind a draft model."""

    kv: KVCache
    head: DraftHead

    @abstractmethod
    def run(self, token_ids: Sequence[int], runs: Sequence[DraftRun]) -> torch.Tensor:
        """What the head reads at the last row of each run, [B, E]; K and V of all rows are stored."""


class SharedModel(Passes):
    """Layers of the target's width between the target's embedding and rows of its head."""

    def __init__(self, file: DrafterFile, target: Target) -> None:
        backend = target.backend()
        assert file.num_layers is not None
        self.target = target
        self.layers = DraftLayers(file.tensors, file.num_layers, target.model, backend, target.pool)
        self.norm = Norm(backend.tensor(file.tensors["norm.weight"]), target.model.config.rms_norm_eps)
        self.head = DraftHead.of(target, file.vocab)
        self.kv = self.layers.kv

    def run(self, token_ids: Sequence[int], runs: Sequence[DraftRun]) -> torch.Tensor:
        batch = self.layers.batch(token_ids, runs)
        return self.norm(self.layers.forward(self.target.embed(batch.token_ids), batch))


class WholeModel(Passes):
    """A checkpoint of its own."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        """ValueError for another tokenizer than the target's."""
        check_tokenizer(checkpoint, target)
        model, config = target.model, checkpoint.config
        self.model = Model(config, checkpoint.tensors, model.device, model.dtype)
        self.attention = create_attention("torch", config)
        self.kv = KVCache(config, target.pool.num_blocks, target.pool.block_size, model.device, model.dtype)
        # Ids behind the tokenizer's are padding of the tables, which may be of different sizes.
        size = min(config.vocab_size, target.vocab_size)
        self.head = DraftHead(self.model.head, torch.arange(size, device=model.device), target.vocab_size)

    def run(self, token_ids: Sequence[int], runs: Sequence[DraftRun]) -> torch.Tensor:
        batch = draft_batch(token_ids, runs, self.kv, self.attention, self.model.compute_dtype)
        return self.model.features(batch, self.kv)


def check_tokenizer(checkpoint: Checkpoint, target: Target) -> None:
    """ValueError unless every id stands for the same token: a drafted id is taken for the target's."""
    own, theirs = checkpoint.tokenizer.vocabulary(), target.tokenizer.vocabulary()
    if own == theirs:
        return
    shared = [(token, own[token], i) for token, i in theirs.items() if token in own and own[token] != i]
    if shared:
        token, got, want = min(shared, key=lambda item: item[2])
        difference = f"token {token!r} is {got} there and {want} here"
    else:
        missing = min(set(own) ^ set(theirs))
        difference = f"token {missing!r} is in one of them only ({len(own)} tokens there, {len(theirs)} here)"
    raise ValueError(f"{checkpoint.path}: a draft model needs the target's tokenizer, this one has another: {difference}")


class DraftModelDrafter(ChainDrafter):
    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        """``config.model``: a drafter file (.safetensors), or the path of a checkpoint. ValueError for one that does not fit."""
        path = Path(config.model) if config.model is not None else shipped_drafter("draft_model")
        self.passes: Passes
        if path.suffix == ".safetensors":
            self.passes = SharedModel(read_drafter(path, "draft_model", target.model.config, target.sha256), target)
        else:
            self.passes = WholeModel(load_checkpoint(path), target)
        super().__init__(config, target, self.passes.head)
        self.filled = Filled(target.pool)
        self._written: dict[str, tuple[int, list[int]]] = {}  # of a draft under way: tokens that have entries, from a position on

    def _first(self, drafting: Sequence[Drafting]) -> torch.Tensor:
        tokens: list[int] = []
        runs = []
        for one in drafting:
            request, end = one.request, one.request.num_tokens
            old = start = min(self.filled.leading(request.block_ids), end - 1)
            while end - start > _CATCH_UP:
                self.passes.run(request.token_ids[start : start + _CATCH_UP], [DraftRun(one.slots, start, _CATCH_UP)])
                start += _CATCH_UP
            tokens += request.token_ids[start:end]
            runs.append(DraftRun(one.slots, start, end - start))
            self.filled.mark(request.block_ids, old, end)
        return self.passes.run(tokens, runs)

    def _next(self, drafting: Sequence[Drafting], features: torch.Tensor) -> torch.Tensor:
        runs = [DraftRun(one.slots, one.last, 1) for one in drafting]
        return self.passes.run([one.token_ids[-1] for one in drafting], runs)

    def _drafted(self, drafting: Sequence[Drafting]) -> None:
        # The last token of a draft was never read.
        self._written = {one.request.request_id: (one.request.num_tokens, one.token_ids[:-1]) for one in drafting}

    def observe(self, computed: Sequence[Computed], features: torch.Tensor | None) -> None:
        """The entries of drafted tokens that were accepted are as good as any other."""
        for one in computed:
            start, tokens = self._written.get(one.request.request_id, (0, []))
            end = min(start + len(tokens), one.start + len(one.rows))
            good = start
            while good < end and one.request.token_ids[good] == tokens[good - start]:
                good += 1
            if good > start:
                self.filled.mark(one.request.block_ids, start, good)
        self._written = {}

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.passes.kv.copy_blocks(src, dst)
        self.filled.copy(src, dst)

    def forget(self, request_id: str) -> None:
        self._written.pop(request_id, None)
