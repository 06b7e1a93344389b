"""From the error to the token: some weights rounded and nothing else, on one text, beside the original model."""

from typing import TYPE_CHECKING, Any

import torch

from engine.attention.base import create_attention
from engine.config import EngineConfig
from engine.events.quantization import TokenShift
from engine.kvcache.layout import KVCache
from engine.model.llama import Model
from engine.model.unpacking import create_unpacking
from engine.quantization.base import QuantizedWeight
from engine.quantization.quality.divergence import kl_divergence, nucleus_change
from engine.quantization.quality.texts import prose
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled
from engine.weights.build import Built, Source, build_layer, mixed, quantize
from engine.weights.calibrate import Flow
from engine.weights.original import Originals
from engine.weights.plan import STACKS, make_plan

if TYPE_CHECKING:
    from engine.loading import Parts
    from engine.weights.studies import Study

MOST_TOKENS = 256  # of the text
_DEFAULT_TOKENS = 64
_CONTINUED = 24
_SHOWN = 12


class Asked:
    """One probe: what was asked, checked, and the study that answers."""

    def __init__(
        self, parts: "Parts", config: EngineConfig, method: str, group_size: int | None, only: list[str] | None,
        error_between: list[float] | None, text: str, top_p: float, probe_id: str,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {}
        if only:
            options["only"] = list(only)
        if error_between:
            options["error_between"] = [float(v) for v in error_between]
        self.parts, self.config = parts, config
        self.plan = make_plan(method, group_size, options, parts.model_config.num_layers)
        if self.plan.method is None or self.plan.needs_calibration:
            raise ValueError(f"a probe takes a method that rounds without calibration, got {method!r}")
        if not isinstance(top_p, (int, float)) or not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p!r}")
        ids = parts.tokenizer.encode(text or prose())
        self.token_ids = ids if text else ids[:_DEFAULT_TOKENS]
        room = min(MOST_TOKENS, parts.model_config.max_position_embeddings - _CONTINUED)
        if not 2 <= len(self.token_ids) <= room:
            raise ValueError(f"the text must have 2 to {room} tokens, got {len(self.token_ids)}")
        self.top_p, self.probe_id = float(top_p), probe_id

    def run(self, study: "Study") -> dict[str, Any]:
        """The fields of a QuantizationProbed."""
        with torch.inference_mode():
            originals = Originals(self.parts)
            before = originals.whole()
            study.check()
            after, changed = self._changed(originals, before)
            study.check()
            layer_errors, logits = self._side_by_side(before, after)
            kl = kl_divergence(*logits)
            at = int(kl.argmax())
            text = [self.parts.tokenizer.decode([token]) for token in self.token_ids]
            said = [self._continue(model, study) for model in (before, after)]
            tokens = [[token for token, _ in run] for run in said]
            first = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), -1)
            return {
                "probe_id": self.probe_id, "method": self.plan.method, "group_size": self.plan.group_size or 0,
                "only": self.plan.options.get("only", []), "error_between": self.plan.options.get("error_between", []),
                "changed_weights": changed, "text": self.parts.tokenizer.decode(self.token_ids), "num_tokens": len(self.token_ids),
                "layer_errors": layer_errors, "kl": [float(v) for v in kl], "positions": [at], "token_texts": text,
                "nucleus_p": self.top_p, **self._shifts(logits[0][at], logits[1][at]),
                "continuation": [self.parts.tokenizer.decode([t]) for t in tokens[0]],
                "continuation_changed": [self.parts.tokenizer.decode([t]) for t in tokens[1]],
                "first_difference": first, "margin": said[0][first][1] if first >= 0 else float("nan"),
            }  # fmt: skip

    def _changed(self, originals: Originals, before: Model) -> tuple[Model, int]:
        """The model with the chosen weights rounded, and how many of them are other numbers now."""
        after, changed, layers = before.apart(), 0, list(before.layers)
        built = Built(self.plan, [], create_unpacking(before.device))
        source = Source(originals.source.tensors)
        for index in range(len(layers)):
            rounded: dict[str, QuantizedWeight] = {}
            for stack, names in STACKS.items():
                taken = [self.plan.takes(index, name) for name in names]
                if not any(taken):
                    continue
                original = source.stack(index, stack)
                rounded[stack] = quantize(original, self.plan, None, f"layer {index}, {stack}")
                rows = [source.matrix(index, name).shape[0] for name in names]
                changed += int((mixed(original, rounded[stack], self.plan, rows, taken) != original).sum())
            if rounded:
                layers[index] = build_layer(before, source, self.plan, index, built, rounded.get)
        after.layers = layers
        return after, changed

    def _side_by_side(self, before: Model, after: Model) -> tuple[list[float], tuple[torch.Tensor, torch.Tensor]]:
        """How far each layer's output is off, and the logits of both at all positions."""
        flows = Flow(before, [self.token_ids]), Flow(after, [self.token_ids])
        errors = []
        for layers in zip(before.layers, after.layers, strict=True):
            for flow, layer in zip(flows, layers, strict=True):
                flow.move_on(layer)
            one, other = (flow.x.float() for flow in flows)
            errors.append(float((other - one).norm() / one.norm()))
        first, second = (model.head(model.norm(flow.x)).float() for model, flow in zip((before, after), flows, strict=True))
        return errors, (first, second)

    def _shifts(self, p: torch.Tensor, q: torch.Tensor) -> dict[str, list[TokenShift]]:
        before, after = p.double().softmax(-1), q.double().softmax(-1)

        def shown(ids: list[int]) -> list[TokenShift]:
            return [TokenShift(i, self.parts.tokenizer.decode([i]), float(before[i]), float(after[i])) for i in ids[:_SHOWN]]

        change = nucleus_change(p, q, self.top_p)
        likely = torch.maximum(before, after).topk(_SHOWN).indices.tolist()
        return {"entered": shown(change.entered), "left": shown(change.left), "top": shown(likely)}

    def _continue(self, model: Model, study: "Study") -> list[tuple[int, float]]:
        """Greedy: each token, and by how much its logit was the largest."""
        count = len(self.token_ids) + _CONTINUED
        blocks = -(-count // self.config.block_size)
        kv = KVCache(model.config, blocks, self.config.block_size, model.device, model.dtype)
        runner = Runner(model, kv, create_attention(self.config.attention_backend, model.config))
        request = Request("probe", list(self.token_ids), SamplingParams(), 0)
        request.block_ids = list(range(blocks))
        said: list[tuple[int, float]] = []
        done = 0
        for _ in range(_CONTINUED):
            study.check()
            row = runner.run([Scheduled(request, done, len(request.token_ids) - done, True)])[0].float()
            done = len(request.token_ids)
            values, ids = row.topk(2)
            said.append((int(ids[0]), float(values[0] - values[1])))
            request.token_ids.append(int(ids[0]))
        return said
