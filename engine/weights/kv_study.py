"""Keys and values of one layer on calibration text: which channels are large, and what each KV dtype would lose on them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.kvcache.create import block_bytes
from engine.quantization import kv
from engine.weights.original import Originals

if TYPE_CHECKING:
    from engine.loading import Parts
    from engine.weights.studies import Study


def observe(parts: "Parts", config: EngineConfig, layer: int) -> Callable[["Study"], dict[str, Any]]:
    """A study that gives the fields of a KvObserved."""

    def work(study: "Study") -> dict[str, Any]:
        with torch.inference_mode():
            originals = Originals(parts)
            flow = originals.flow_at(layer)
            study.check()
            found = originals.layer(layer)
            qkv = found.project(flow.x, flow.cos, flow.sin)
            keys, values = qkv[:, found.heads :].to(parts.model.dtype).split((found.kv_heads, found.kv_heads), 1)
            block = config.block_size
            return {
                "layer": layer, "num_tokens": len(keys), "num_kv_heads": found.kv_heads, "head_dim": found.head_dim,
                "key_abs_max": _flat(keys.float().abs().amax(0)), "key_abs_mean": _flat(keys.float().abs().mean(0)),
                "value_abs_max": _flat(values.float().abs().amax(0)), "value_abs_mean": _flat(values.float().abs().mean(0)),
                "key_errors": {name: _lost(keys, _ways(block)[name][0]) for name in _ways(block)},
                "value_errors": {name: _lost(values, _ways(block)[name][1]) for name in _ways(block)},
                "bytes_per_token": {
                    name: block_bytes(name, parts.model_config, block, parts.model.dtype) / block for name in ("auto", *_ways(block))
                },
                "text": f"{len(keys):,} tokens of calibration text",
            }  # fmt: skip

    return work


_Round = Callable[[torch.Tensor], torch.Tensor]


def _ways(block_size: int) -> dict[str, tuple[_Round, _Round]]:
    """For each KV dtype: keys there and back, values there and back; [tokens, heads, head_dim]."""
    int8: _Round = lambda x: kv.dequantize_int8(*kv.quantize_int8(x), torch.float32)
    fp8: _Round = lambda x: kv.dequantize_fp8(*kv.quantize_fp8(x), torch.float32)

    def keys_int4(x: torch.Tensor) -> torch.Tensor:
        whole = len(x) // block_size * block_size  # the last block is not full: it stays in the tail
        blocks = x[:whole].unflatten(0, (-1, block_size))
        out = torch.empty_like(blocks, dtype=torch.float32)
        return torch.cat((kv.dequantize_keys_int4(*kv.quantize_keys_int4(blocks), out).flatten(0, 1), x[whole:].float()))

    def values_int4(x: torch.Tensor) -> torch.Tensor:
        return kv.dequantize_values_int4(*kv.quantize_values_int4(x), torch.empty_like(x, dtype=torch.float32))

    return {"int8": (int8, int8), "fp8": (fp8, fp8), "int4": (keys_int4, values_int4)}


def _lost(x: torch.Tensor, there_and_back: _Round) -> float:
    return float((there_and_back(x).float() - x.float()).norm() / x.float().norm())


def _flat(x: torch.Tensor) -> list[float]:
    return [float(v) for v in x.flatten()]
