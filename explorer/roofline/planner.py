"""The memory planner: what a model takes on a GPU, the same for a pasted config.json, and the running engine's own bytes. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.events.hardware import MemoryMeasured
from engine.hardware.gpus import Gpu
from engine.hardware.memory import KvShape, pool_bytes
from engine.hardware.planner import LOGIT_BYTES, Plan, Workload, plan, weight_bytes
from explorer.i18n import _

LONGEST = 100_000  # characters of a pasted config.json
GROUPED = ("int4", "nf4", "gptq", "awq")  # methods of 4 bits with a group size
_BY_ROW = {"int8": 8, "fp8": 8, "int8_w8a8": 8}


@dataclass(frozen=True)
class Model:
    """A model to plan with: facts as in ``EngineStarted.model``; ``dtype`` is that of its weights as far as it says."""

    name: str
    facts: dict[str, Any]
    dtype: str
    bits: int  # of its weights


def pasted(text: str) -> Model:
    """The model of a pasted config.json. ValueError, in one sentence, for what is none or a model that is not of the Llama family."""
    if len(text) > LONGEST:
        raise ValueError(_("That is {n:,} characters; a config.json has a few thousand.").format(n=len(text)))
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" ({error.msg}, line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(_("This is not JSON{where}. Paste the whole config.json of a checkpoint.").format(where=where)) from None
    from engine.model.config import ModelConfig  # brings torch: only for who pastes

    try:
        config = ModelConfig.from_hf(raw, "config.json")
    except ValueError:
        raise
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"config.json: {error}") from None
    said = raw.get("dtype", raw.get("torch_dtype"))
    dtype = said if said in ("bfloat16", "float16", "float32") else "bfloat16"
    name = raw.get("_name_or_path")
    title = (
        name
        if isinstance(name, str) and 0 < len(name) < 100
        else _("pasted config.json ({kind})").format(kind=config.architecture)
    )
    return Model(title, config.facts(), dtype, 32 if dtype == "float32" else 16)


def planned(model: Model, gpu: Gpu, work: Workload) -> Plan:
    """ValueError for facts that are missing, heads that the GPUs cannot share, or a dtype that the GPU has no rate for."""
    return plan(model.facts, gpu, work)


@dataclass(frozen=True)
class Check:
    """One number of the plan beside what the engine holds. ``ratio``: planned over held; None where nothing is held."""

    name: str
    formula: str
    planned: float
    held: float
    why: str  # what the difference is, where there is one

    @property
    def ratio(self) -> float | None:
        return self.planned / self.held if self.held else None


def checks(model: Mapping[str, Any], held: MemoryMeasured) -> list[Check]:
    """The planner's formulas with the running engine's own numbers, beside its allocations. ValueError for facts that are missing."""
    work = running_work(held)
    shape = KvShape.from_facts(model, held.dtype, held.kv_cache_dtype, held.block_size)
    weights = held.linear_bytes + held.other_bytes
    activations = held.activation_tokens * _width_of(model, work)
    return [
        Check(
            _("weights"),
            _("(linear weights × {b:g} bits + the others × {f} bits) / 8").format(b=work.bits_per_weight, f=work.full_bits),
            weight_bytes(model, work), float(weights),
            _("A method that is not rounding to {b} bits in groups has other scales; a tied head in few bits is held beside the embedding.").format(
                b=work.weight_bits
            )
            if held.method
            else "",
        ),
        Check(
            _("KV pool"),
            _("{n} blocks × {b} B a block of {s} tokens").format(n=held.num_kv_blocks, b=f"{shape.bytes_per_block(held.block_size):,}", s=held.block_size),
            float(pool_bytes(shape, held.num_kv_blocks, held.block_size)), float(held.kv_pool_bytes),
            _("The int4 pool keeps the blocks that are not full in the model's dtype beside it.") if held.kv_cache_dtype == "int4" else "",
        ),
        Check(
            _("activations of {n} tokens").format(n=held.activation_tokens),
            _("tokens × numbers alive at the widest place of a layer × {b} B").format(b=work.full_bits // 8),
            float(activations), float(held.activation_bytes),
            _("Weights in few bits are unpacked for so many tokens at once, a matrix at a time: that comes on top.")
            if held.method
            else _("Buffers of the kernels and index tensors are in no formula."),
        ),
        Check(
            _("logits"), _("{r} × vocabulary × {b} B").format(r=held.logit_rows, b=LOGIT_BYTES),
            float(held.logit_rows * model["vocab_size"] * LOGIT_BYTES), float(held.logit_bytes),
            _("The planner counts them in float32, as they are sampled from.") if held.dtype != "float32" else "",
        ),
    ]  # fmt: skip


def running_work(held: MemoryMeasured) -> Workload:
    """The running engine's weights as the planner has them."""
    full = 32 if held.dtype == "float32" else 16
    bits = _BY_ROW.get(held.method, 4) if held.method else full
    return Workload(
        dtype=held.dtype,
        weight_bits=bits,
        group_size=held.group_size or (32 if bits == 4 else 1 << 14),
        kv_dtype=held.kv_cache_dtype,
    )


def _width_of(model: Mapping[str, Any], work: Workload) -> float:
    """Bytes that the planner has for one token's activations."""
    from engine.hardware.gpus import gpus

    one = plan(model, next(iter(gpus().values())), Workload(batch=1, context=1, dtype=work.dtype, weight_bits=work.full_bits))
    return one.activations.value
