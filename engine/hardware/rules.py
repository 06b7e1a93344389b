"""Six rules of thumb about transformers, each beside the count that it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.hardware.flops import forward_flops
from engine.hardware.memory import KvShape
from engine.hardware.planner import Workload, decode_cost, moved, prefill_cost


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``rule``: as people say it; ``right``: what is counted. ``why``: what the rule leaves out."""

    name: str
    rule: str
    rule_value: float
    right: str
    right_value: float
    unit: str
    why: str

    @property
    def ratio(self) -> float:
        """The rule's value over the right one."""
        return self.rule_value / self.right_value


def rules_of_thumb(model: Mapping[str, Any], work: Workload) -> tuple[Rule, ...]:
    """``model``: as ``EngineStarted.model``; S tokens of prompt, t of context, batch B, layers L, hidden size d, parameters N."""
    layers, hidden, params = model["num_layers"], model["hidden_size"], model["num_parameters"]
    prompt, context, batch = work.prompt_tokens, work.context, work.batch
    plain = Workload(batch=batch, context=context, prompt=work.prompt, dtype=work.dtype)
    decode = decode_cost(model, plain)
    shape = KvShape.from_facts(model, plain.dtype)
    return (
        Rule(
            name="Parameters",
            rule="12 L d²",
            rule_value=12.0 * layers * hidden**2,
            right="the checkpoint's tensors, counted",
            right_value=float(params),
            unit="parameters",
            why="It assumes as many KV heads as query heads, a feed-forward of width 4 d without a gate, and no embeddings.",
        ),
        Rule(
            name="Operations of a prefill",
            rule="2 B S² d",
            rule_value=2.0 * batch * prompt**2 * hidden,
            right="2 × the linear layers × B S + 2 L B S² × the heads' width, causal pairs alone; the head for the sampled positions",
            right_value=prefill_cost(model, plain).flops * batch,
            unit="FLOP",
            why="It is one product of one layer: the linear layers and the other layers are left out.",
        ),
        Rule(
            name="Operations of a decoded token",
            rule="2 N",
            rule_value=2.0 * params,
            right="2 × the linear layers and the head, and 4 L t × the heads' width",
            right_value=decode.flops / batch,
            unit="FLOP",
            why="It leaves out attention over t keys, and counts an embedding table that is only looked up.",
        ),
        Rule(
            name="KV cache of a token",
            rule="2 L d × 2 B",
            rule_value=2.0 * layers * hidden * 2,
            right="2 L × KV heads × head size × 2 B",
            right_value=float(shape.bytes_per_token),
            unit="B",
            why="It is multi-head attention's: with GQA divide by query heads over KV heads.",
        ),
        Rule(
            name="Intensity of decode",
            rule="2 FLOP a byte",
            rule_value=2.0,
            right="FLOPs over bytes of weights and KV cache",
            right_value=decode.flops / moved(decode),
            unit="FLOP/B",
            why="Weights of 16 bits give B operations a byte, 1 at batch 1; the KV cache adds bytes that no batch shares.",
        ),
        Rule(
            name="Next token without a KV cache",
            rule="4 L t² d",
            rule_value=4.0 * layers * context**2 * hidden,
            right="all t tokens through the linear layers, and the causal pairs",
            right_value=forward_flops(model, start=0, num_tokens=context).total,
            unit="FLOP",
            why="The linear layers' t d² is left out, and at a moderate t it is the larger part; half of t² is never seen.",
        ),
    )
