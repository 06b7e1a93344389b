"""The target drafts for itself with its first layers (Zhang et al., "Draft & Verify", arXiv 2309.08168; LayerSkip, arXiv 2404.16710).

The layers are the target's own and so is their KV: what a draft writes there for its tokens is what the target's pass writes
again. Only the exit is added: a norm and an adapter before the head, trained for the target. Without it the target's final norm
and head read a state that they have never seen, and next to nothing is accepted.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.attention.base import create_attention
from engine.model.llama import Norm
from engine.speculation.chain import ChainDrafter, Drafting
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_kv import DraftRun, draft_batch
from engine.speculation.files import read_drafter, shipped_drafter
from engine.speculation.head import DraftHead, Target


class LayerSkipDrafter(ChainDrafter):
    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        """ValueError for an exit of another target, or an exit_layer that the model or the trained exit does not have."""
        model = target.model
        most = model.config.num_layers - 1
        if config.exit_layer is not None and config.exit_layer > most:
            raise ValueError(f"exit_layer must lie in [1, {most}] for this checkpoint, got {config.exit_layer}")
        if most < 1:
            raise ValueError("layer_skip needs a model of at least 2 layers")
        self.adapter = None
        if config.trained_exit:
            path = Path(config.model) if config.model is not None else shipped_drafter("layer_skip")
            file = read_drafter(path, "layer_skip", model.config, target.sha256)
            assert file.exit_layer is not None
            if config.exit_layer not in (None, file.exit_layer):
                raise ValueError(
                    f"exit_layer must be {file.exit_layer}, where the exit of {path} was trained, got {config.exit_layer}; "
                    "trained_exit=False reads anywhere"
                )
            backend = target.backend()
            self.exit_layer = file.exit_layer
            self.norm = Norm(backend.tensor(file.tensors["norm.weight"]), model.config.rms_norm_eps)
            self.adapter = backend.pack(file.tensors["adapter.weight"], None)
            head = DraftHead.of(target, file.vocab)
        else:
            self.exit_layer = config.exit_layer or max(1, model.config.num_layers // 3)
            self.norm = model.norm
            head = DraftHead(model.head, torch.arange(target.vocab_size, device=model.device), target.vocab_size)
        super().__init__(config, target, head)
        self.attention = create_attention("torch", model.config)

    def _first(self, drafting: Sequence[Drafting]) -> torch.Tensor:
        """The last token of each: the target has computed all before it, but not this one."""
        return self._run([one.request.token_ids[-1] for one in drafting], drafting)

    def _next(self, drafting: Sequence[Drafting], features: torch.Tensor) -> torch.Tensor:
        return self._run([one.token_ids[-1] for one in drafting], drafting)

    def _run(self, token_ids: list[int], drafting: Sequence[Drafting]) -> torch.Tensor:
        target = self.target
        runs = [DraftRun(one.slots, one.last, 1) for one in drafting]
        model = target.model
        batch = draft_batch(token_ids, runs, target.kv, self.attention, model.compute_dtype, takes=model.takes)
        h = self.norm(model.first_layers(batch, target.kv, self.exit_layer))
        return h if self.adapter is None else self.adapter.added_to(h.clone(), h)
