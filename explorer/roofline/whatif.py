"""What if: the same model with another batch, context, bit width or number of KV heads, under the roofs. Pure, modelled."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.hardware.cost import StepCost
from engine.hardware.planner import Workload, decode_cost, moved, prefill_cost
from engine.hardware.roofline import Bound, Roofs, bound_by

BATCHES = tuple(1 << i for i in range(11))  # 1 .. 1024
CONTEXTS = tuple(1 << i for i in range(5, 18))  # 32 .. 131,072
BITS = (0, 32, 16, 8, 4)  # of the linear weights; 0: as they run
KV_DTYPES = ("auto", "int8", "fp8", "int4")
GROUP = 128  # weights that share a scale, in few bits


@dataclass(frozen=True)
class Point:
    """Modelled work under some roofs: it takes the time that the roofs allow, so it lies on them."""

    kind: str  # "prefill" | "decode"
    batch: int
    context: int
    flops: float
    bytes: float
    bound: Bound

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        return self.flops / self.bound.seconds

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together: a step gives each one token; a prefill takes its prompt's."""
        return (self.batch if self.kind == "decode" else self.context) / self.bound.seconds


def workload(
    *, batch: int, context: int, bits: int, running: int, dtype: str, kv_dtype: str = "auto", tensor_parallel: int = 1
) -> Workload:
    """The workload of the knobs. ``bits`` 0: those that run, ``running``, in ``dtype``; with 32 or 16 bits the dtype is of that width."""
    bits = bits or running
    if bits == 32:
        dtype = "float32"
    elif bits == 16 and dtype == "float32":
        dtype = "bfloat16"
    return Workload(
        batch=batch, context=context, prompt=context, dtype=dtype, weight_bits=bits, group_size=GROUP, kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
    )  # fmt: skip


def with_kv_heads(model: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The model with another number of KV heads (0: its own), its K and V projections of that width.

    ValueError for a number that does not divide the query heads.
    """
    heads, own = model.get("num_attention_heads"), model.get("num_kv_heads")
    if not kv_heads or kv_heads == own or not isinstance(heads, int) or not isinstance(own, int):
        return dict(model)
    if heads % kv_heads:
        raise ValueError(f"KV heads must divide the {heads} query heads, got {kv_heads}")
    more = 2 * model["num_layers"] * model["hidden_size"] * model["head_dim"] * (kv_heads - own)
    return {**model, "num_kv_heads": kv_heads, "num_parameters": model["num_parameters"] + more}


def kv_head_choices(model: Mapping[str, Any]) -> list[int]:
    """Divisors of the query heads, from one for each of them (MHA) to one for all (MQA); [] where they are not known."""
    heads = model.get("num_attention_heads")
    if not isinstance(heads, int) or not 1 <= heads <= 4096:
        return []
    return [n for n in range(heads, 0, -1) if heads % n == 0]


def decode_point(model: Mapping[str, Any], work: Workload, roofs: Roofs) -> Point:
    """One decode step of the whole batch at the end of its context. ValueError for facts that are missing, or a dtype without a rate."""
    return _point("decode", work, decode_cost(model, work), roofs)


def prefill_point(model: Mapping[str, Any], work: Workload, roofs: Roofs) -> Point:
    """One request's prompt of ``context`` tokens in one pass."""
    return _point("prefill", work, prefill_cost(model, work), roofs)


def _point(kind: str, work: Workload, cost: StepCost, roofs: Roofs) -> Point:
    bound = bound_by(cost.flops, moved(cost), roofs.peak_of(work.dtype), roofs.bandwidth)
    return Point(kind, work.batch if kind == "decode" else 1, work.context, cost.flops, moved(cost), bound)


@dataclass(frozen=True)
class WhatIf:
    """The modelled points of one setting under one device's roofs."""

    roofs: Roofs
    work: Workload
    prefill: Point
    decode: Point
    sweep: tuple[Point, ...]  # decode at every batch size of BATCHES, all else the same


def what_if(model: Mapping[str, Any], work: Workload, roofs: Roofs) -> WhatIf:
    """ValueError for facts that the model lacks, or a dtype whose rate the roofs lack."""
    one = decode_cost(model, _with_batch(work, 1))
    two = decode_cost(model, _with_batch(work, 2))
    names = ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes")
    sweep = []
    for batch in BATCHES:  # linear in the batch: two costs give all
        cost = StepCost(**{n: getattr(one, n) + (batch - 1) * (getattr(two, n) - getattr(one, n)) for n in names})
        sweep.append(_point("decode", _with_batch(work, batch), cost, roofs))
    return WhatIf(roofs, work, prefill_point(model, work, roofs), decode_point(model, work, roofs), tuple(sweep))


def _with_batch(work: Workload, batch: int) -> Workload:
    return replace(work, batch=batch)
