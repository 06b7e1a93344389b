"""Events for the Roofline page's tests, with numbers that can be worked out by hand."""

from typing import Any

from engine.events.hardware import MemoryMeasured, RoofsMeasured
from engine.events.types import EngineStarted, RequestState, Run, Snapshot, StepDone
from tests.engine.hardware.facts import SMOL

MODEL = {**SMOL, "name": "smollm2-135m", "max_position_embeddings": 8192}


def started(**device: Any) -> EngineStarted:
    return EngineStarted(
        step=0, time_ns=0, config={"block_size": 16, "num_kv_blocks": 512, "kv_cache_dtype": "auto"}, model=MODEL,
        device={"device": "cpu", "dtype": "float32", "name": "a processor", **device}, versions={},
        kv_bytes_per_block=737_280, kv_pool_bytes=512 * 737_280,
    )  # fmt: skip


def snapshot(**knobs: Any) -> Snapshot:
    requests = [
        RequestState(request_id=f"r{i}", owner="guest-1", status="running", prompt_token_ids=list(range(64)), output_token_ids=[],
                     prompt_text="p", output_text="", sampling={}, num_computed_tokens=10, block_ids=[])
        for i in range(3)
    ]  # fmt: skip
    return Snapshot(
        step=0, time_ns=0, num_blocks=512, block_size=16, ref_counts=[0] * 512, cached={}, lru=[], requests=requests,
        knobs={"quantization": None, "kv_cache_dtype": "auto", "block_size": 16, "num_kv_blocks": 512, **knobs},
    )  # fmt: skip


def step(n: int, *phases: str, tokens: int = 1, **more: Any) -> StepDone:
    runs = [Run(f"r{i}", phase, 10, tokens, True) for i, phase in enumerate(phases)]
    fields = {
        "num_waiting": 0, "num_running": len(runs), "token_budget": 512, "max_num_seqs": 8, "used_blocks": 1, "cached_free_blocks": 0,
        "schedule_ms": 1.0, "forward_ms": 100.0, "sample_ms": 50.0, "commit_ms": 1.0, "step_ms": 152.0, "record_ms": 0.0,
        "flops": 2e8, "weight_bytes": 3e8, "kv_read_bytes": 9e7, "kv_write_bytes": 1e7,
    }  # fmt: skip
    return StepDone(step=n, time_ns=n, runs=runs, **{**fields, **more})


def roofs(step: int = 0, **more: Any) -> RoofsMeasured:
    fields: dict[str, Any] = {
        "name": "a processor", "device": "cpu", "threads": 2, "copy_bandwidth": 8e9, "read_bandwidth": 1e10,
        "peak": {"float32": 1e11, "bfloat16": 4e10}, "kept": False, "fingerprint": "f",
    }  # fmt: skip
    return RoofsMeasured(step=step, time_ns=0, **{**fields, **more})


def memory(**more: Any) -> MemoryMeasured:
    linear = 30 * (576 * (2 * 576 + 2 * 192 + 3 * 1536)) * 4
    fields: dict[str, Any] = {
        "method": "", "group_size": 0, "dtype": "float32", "kv_cache_dtype": "auto", "linear_bytes": linear,
        "other_bytes": 4 * MODEL["num_parameters"] - linear, "model_bytes": 651_578_228, "kv_pool_bytes": 512 * 737_280, "num_kv_blocks": 512,
        "block_size": 16, "activation_tokens": 256, "activation_bytes": 5_834_760, "logit_bytes": 196_608, "logit_rows": 1,
        "process_bytes": 1 << 30, "device_bytes": 0,
    }  # fmt: skip
    return MemoryMeasured(step=0, time_ns=5, **{**fields, **more})
