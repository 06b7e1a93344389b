"""What serving a model takes, before there is a GPU: bytes by what they hold, what fits, and the times that the roofs allow.

Modelled throughout: each number carries its formula. Bytes of the KV cache are ``memory``'s, operations and bytes moved ``cost``'s.
Times are the roofline's (``roofline.bound_by``), which no program beats and few reach; talking between GPUs is left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.hardware.cost import DTYPE_BYTES, CostFacts, StepCost, step_cost
from engine.hardware.flops import linear_parameters
from engine.hardware.gpus import Gpu
from engine.hardware.memory import KvShape
from engine.hardware.roofline import Bound, bound_by

WEIGHT_BITS = (32, 16, 8, 4)
OVERHEAD_BITS = {32: 0, 16: 0, 8: 16, 4: 32}  # for each group: nothing; a scale; a scale and a minimum, of 16 bits each
LOGIT_BYTES = 4  # logits are float32
_MOST = 1 << 26  # no batch and no context is looked for beyond


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is served: ``batch`` requests of ``context`` tokens each (the prompt is ``prompt`` of them; None: all but one)."""

    batch: int = 1
    context: int = 4096
    prompt: int | None = None
    dtype: str = "bfloat16"  # of activations and of what is not in few bits
    weight_bits: int = 16  # of the linear layers; 32 with float32 alone
    group_size: int = 128  # weights that share a scale
    kv_dtype: str = "auto"  # as EngineConfig.kv_cache_dtype
    tensor_parallel: int = 1
    max_batched_tokens: int = 8192  # in one forward pass
    memory_share: float = 0.9  # of a GPU's memory that is planned with

    def __post_init__(self) -> None:
        for name in ("batch", "context", "group_size", "tensor_parallel", "max_batched_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.weight_bits not in WEIGHT_BITS:
            raise ValueError(f"weight_bits must be one of {WEIGHT_BITS}, got {self.weight_bits!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {tuple(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.weight_bits > self.full_bits:
            raise ValueError(f"weight_bits must be at most the {self.full_bits} of {self.dtype}, got {self.weight_bits}")
        if self.prompt is not None and not 1 <= self.prompt <= self.context:
            raise ValueError(f"prompt must be in [1, context={self.context}], got {self.prompt!r}")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share must be in (0, 1], got {self.memory_share!r}")

    @property
    def prompt_tokens(self) -> int:
        return self.prompt if self.prompt is not None else max(1, self.context - 1)

    @property
    def full_bits(self) -> int:
        """Of a number in ``dtype``."""
        return 8 * DTYPE_BYTES[self.dtype]

    @property
    def bits_per_weight(self) -> float:
        """Of a linear layer's weight, its share of the group's scale and minimum included."""
        return self.weight_bits + OVERHEAD_BITS[self.weight_bits] / self.group_size


@dataclass(frozen=True, kw_only=True)
class Item:
    """A number with its formula as text. ``unit``: "B", "s", "tokens", "requests"."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes are those of one GPU of the ``tensor_parallel`` that share the model."""

    weights: Item
    kv_cache: Item
    activations: Item
    logits: Item
    budget: Item  # bytes that are planned with
    largest_batch: Item  # at this context; 0: not even one request
    largest_context: Item  # at this batch
    ttft: Item  # time to the first token of one request alone
    per_token: Item  # one decode step of the whole batch
    prefill: Bound
    decode: Bound

    @property
    def parts(self) -> tuple[Item, ...]:
        return (self.weights, self.kv_cache, self.activations, self.logits)

    @property
    def total(self) -> float:
        return sum(item.value for item in self.parts)

    @property
    def fits(self) -> bool:
        return self.total <= self.budget.value


@dataclass(frozen=True)
class _Run:
    start: int
    num_tokens: int
    sampled: bool = True
    num_drafts: int = 0


def plan(model: Mapping[str, Any], gpu: Gpu, work: Workload) -> Plan:
    """``model``: as ``EngineStarted.model``. ValueError for facts that are missing, or heads that the GPUs cannot share."""
    tp, heads = work.tensor_parallel, model.get("num_attention_heads")
    linear_parameters(model)  # tells what is missing
    assert isinstance(heads, int)
    if heads % tp:
        raise ValueError(f"tensor_parallel must divide the {heads} query heads, got {tp}")
    per_token = kv_bytes_per_token(model, work)
    parts = _bytes(model, work)
    budget = gpu.memory_bytes * work.memory_share
    first, step = prefill_cost(model, work), decode_cost(model, work)
    peak, bandwidth = gpu.peak_of(work.dtype) * tp, gpu.bandwidth * tp
    prefill, decode = (bound_by(cost.flops, moved(cost), peak, bandwidth) for cost in (first, step))

    def fits(batch: int, context: int) -> bool:
        other = replace(work, batch=batch, context=context, prompt=None if work.prompt is None else min(work.prompt, context))
        return sum(_bytes(model, other).values()) <= budget

    batch = _largest(lambda n: fits(n, work.context))
    context = _largest(lambda n: fits(work.batch, n))
    kv_heads = -(-model["num_kv_heads"] // tp)
    times = "max(FLOPs / (peak × TP), bytes / (bandwidth × TP)) = max({f}FLOP / {p}FLOP/s, {b}B / {w}B/s)"
    return Plan(
        weights=Item(
            name="weights",
            value=parts["weights"],
            unit="B",
            formula=f"(linear weights × {work.bits_per_weight:g} bits + the other parameters × {work.full_bits} bits) / 8 / TP {tp}",
        ),
        kv_cache=Item(
            name="KV cache",
            value=parts["kv"],
            unit="B",
            formula=f"{_requests(work.batch)} × {work.context:,} tokens × {per_token:,} B "
            f"(K and V, {model['num_layers']} layers, {kv_heads} KV heads a GPU, head size {model['head_dim']}, {_kv_name(work)})",
        ),
        activations=Item(
            name="activations",
            value=parts["activations"],
            unit="B",
            formula=f"{_tokens_at_once(work):,} tokens at once × {_width(model, tp):,} numbers × {work.full_bits // 8} B "
            "(two residual streams, and the wider of attention's Q, K, V, output and the MLP's gate, up and their product)",
        ),
        logits=Item(
            name="logits",
            value=parts["logits"],
            unit="B",
            formula=f"{_requests(work.batch)} × {model['vocab_size']:,} vocabulary × {LOGIT_BYTES} B",
        ),
        budget=Item(
            name="planned with",
            value=budget,
            unit="B",
            formula=f"{gpu.memory_bytes / 1e9:g} GB of {gpu.title} × {work.memory_share:g}",
        ),
        largest_batch=Item(
            name="largest batch",
            value=batch,
            unit="requests",
            formula=f"the most requests of {work.context:,} tokens whose sum fits"
            + ("; no more are looked for" if batch >= _MOST - 1 else ""),
        ),
        largest_context=Item(
            name="largest context",
            value=context,
            unit="tokens",
            formula="the most tokens that fit"
            + (f" for each of {work.batch:,} requests" if work.batch > 1 else "")
            + ("; no more are looked for" if context >= _MOST - 1 else ""),
        ),
        ttft=Item(
            name="TTFT",
            value=prefill.seconds,
            unit="s",
            formula=f"{work.prompt_tokens:,} tokens: "
            + times.format(f=_si(first.flops), p=_si(peak), b=_si(moved(first)), w=_si(bandwidth)),
        ),
        per_token=Item(
            name="time per token",
            value=decode.seconds,
            unit="s",
            formula=f"batch {work.batch}: " + times.format(f=_si(step.flops), p=_si(peak), b=_si(moved(step)), w=_si(bandwidth)),
        ),
        prefill=prefill,
        decode=decode,
    )


def kv_bytes_per_token(model: Mapping[str, Any], work: Workload) -> int:
    """Bytes of one token's K and V on one GPU: its share of the KV heads, of which each GPU has at least one."""
    heads = {"num_kv_heads": (n := -(-model["num_kv_heads"] // work.tensor_parallel))}
    # How many query heads a KV head serves is no matter here: one each.
    shape = KvShape.from_facts({**model, **heads, "num_attention_heads": n}, work.dtype, work.kv_dtype)
    return shape.bytes_per_token


def weight_bytes(model: Mapping[str, Any], work: Workload) -> float:
    """Bytes of all weights: the layers' projections in ``weight_bits``, embeddings, head, norms and biases in ``dtype``."""
    linear = linear_parameters(model) * model["num_layers"]
    return (linear * work.bits_per_weight + (model["num_parameters"] - linear) * work.full_bits) / 8


def cost_facts(model: Mapping[str, Any], work: Workload) -> CostFacts:
    """``cost``'s facts with the linear layers' weights in ``weight_bits``."""
    facts = CostFacts.from_facts(model, work.dtype, work.kv_dtype)
    saved = linear_parameters(model) * model["num_layers"] * (work.full_bits - work.bits_per_weight) / 8
    return replace(facts, layer_weight_bytes=facts.layer_weight_bytes - saved)


def prefill_cost(model: Mapping[str, Any], work: Workload) -> StepCost:
    """One request's prompt in one pass, nothing cached."""
    return step_cost(cost_facts(model, work), [_Run(0, work.prompt_tokens)])


def decode_cost(model: Mapping[str, Any], work: Workload) -> StepCost:
    """One token for each request of the batch, at the end of its context."""
    facts, run = cost_facts(model, work), _Run(work.context - 1, 1)
    one, two = step_cost(facts, [run]), step_cost(facts, [run, run])  # linear in the batch but for the weights
    return StepCost(**{
        name: getattr(one, name) + (work.batch - 1) * (getattr(two, name) - getattr(one, name))
        for name in ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes")
    })  # fmt: skip


def moved(cost: StepCost) -> float:
    """Bytes to and from memory."""
    return cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes


def _bytes(model: Mapping[str, Any], work: Workload) -> dict[str, float]:
    tp = work.tensor_parallel
    return {
        "weights": weight_bytes(model, work) / tp,
        "kv": float(work.batch * work.context * kv_bytes_per_token(model, work)),
        "activations": float(_tokens_at_once(work) * _width(model, tp) * work.full_bits / 8),
        "logits": float(work.batch * model["vocab_size"] * LOGIT_BYTES),
    }


def _tokens_at_once(work: Workload) -> int:
    return max(min(work.batch * work.prompt_tokens, work.max_batched_tokens), work.batch)


def _width(model: Mapping[str, Any], tp: int) -> int:
    """Numbers alive for one token on one GPU at the widest place of a layer."""
    q, kv = model["num_attention_heads"] * model["head_dim"] // tp, -(-model["num_kv_heads"] // tp) * model["head_dim"]
    return int(2 * model["hidden_size"] + max(2 * q + 2 * kv, 3 * -(-model["intermediate_size"] // tp)))


def _kv_name(work: Workload) -> str:
    return work.dtype if work.kv_dtype == "auto" else work.kv_dtype


def _requests(n: int) -> str:
    return "1 request" if n == 1 else f"{n:,} requests"


def _si(value: float) -> str:
    """Three digits and the prefix of a unit to come: "254 G"."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}"
    return f"{value:.3g} "


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest n for which ``fits``, which is monotone; 0 if not even 1 does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
