"""What the device can do and what the engine takes of it, measured between two steps: whoever runs waits meanwhile."""

from typing import TYPE_CHECKING, Any

import psutil
import torch

from engine.events.hardware import MemoryMeasured, RoofsMeasured
from engine.hardware.roofs import kept_roofs, measured_roofs
from engine.loading import make_kv_cache, make_runner
from engine.model.store import cache_directory
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled

if TYPE_CHECKING:
    from engine.engine import Engine

TOKENS = 256  # of the forward pass whose memory is watched
_ID = "memory study"


def roofs(engine: "Engine", *, again: bool = False, only_kept: bool = False) -> RoofsMeasured | None:
    """The device's roofs: kept ones, or measured now (about two seconds). None with ``only_kept`` where none are kept.

    ValueError where the device has no room for the measurement.
    """
    device, cache = engine.parts.device.torch_device, cache_directory() / "roofs"
    kept = None if again else kept_roofs(device, cache)
    if kept is None and only_kept:
        return None
    try:
        found = kept if kept is not None else measured_roofs(device, cache=cache, again=again)
    except (RuntimeError, OSError) as error:  # no memory for the copy, no room for the file: the engine itself is well
        raise ValueError(f"the roofs could not be measured: {error}") from None
    fields = {
        "name": found.name, "device": str(device), "threads": torch.get_num_threads(), "copy_bandwidth": found.copy_bandwidth or 0.0,
        "read_bandwidth": found.read_bandwidth or 0.0, "peak": dict(found.peak), "kept": kept is not None,
        "fingerprint": found.fingerprint,
    }  # fmt: skip
    return _told(engine, RoofsMeasured, fields)


def memory(engine: "Engine") -> MemoryMeasured:
    """Bytes of weights and KV pool as held, and the most that one forward pass takes beside them."""
    config, weights = engine.config, engine.parts.weights
    tokens = max(1, min(TOKENS, (config.max_model_len or TOKENS) - 1, config.max_num_batched_tokens))
    activations, logits = _pass_bytes(engine, tokens)
    on_gpu = engine.parts.device.type == "cuda"
    fields = {
        "method": weights.plan.method or "", "group_size": weights.plan.group_size or 0, "dtype": engine.parts.device.dtype,
        "kv_cache_dtype": config.kv_cache_dtype, "linear_bytes": weights.linear_bytes, "other_bytes": weights.other_bytes,
        "model_bytes": storage_bytes(engine.parts.model), "kv_pool_bytes": engine.kv.nbytes,
        "num_kv_blocks": engine.pool.num_blocks, "block_size": engine.pool.block_size, "activation_tokens": tokens,
        "activation_bytes": activations, "logit_bytes": logits, "logit_rows": 1,
        "process_bytes": psutil.Process().memory_info().rss,
        "device_bytes": torch.cuda.memory_allocated(engine.parts.device.torch_device) if on_gpu else 0,
    }  # fmt: skip
    return _told(engine, MemoryMeasured, fields)


def _told(engine: "Engine", kind: Any, fields: dict[str, Any]) -> Any:
    recorder = engine.recorder
    if recorder.on:
        recorder.emit(kind, **fields)
    return kind(step=recorder.step, time_ns=recorder.now(), **fields)


def _pass_bytes(engine: "Engine", tokens: int) -> tuple[int, int]:
    """(most bytes held at a time in one forward pass of ``tokens`` tokens, without its logits; bytes of the logits).

    The request has a KV cache of its own, made before, so the pool and whoever runs in it are not touched.
    """
    config = engine.config.changed(num_kv_blocks=-(-tokens // engine.config.block_size))
    runner = make_runner(engine.parts, make_kv_cache(engine.parts, config), config)
    vocabulary = engine.model_config.vocab_size
    request = Request(_ID, [(7 * i + 11) % vocabulary for i in range(tokens)], SamplingParams(), 0)
    request.block_ids = list(range(config.num_kv_blocks or 0))
    run = Scheduled(request, 0, tokens, True)
    runner.run([run])  # what is made once and kept is no activation
    if engine.parts.device.type == "cuda":
        return _peak_on_gpu(runner, run, engine.parts.device.torch_device)
    return _peak_on_cpu(runner, run)


def _peak_on_gpu(runner: Runner, run: Scheduled, device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    logits = runner.run([run])
    torch.cuda.synchronize(device)
    size = logits.numel() * logits.element_size()
    return max(0, torch.cuda.max_memory_allocated(device) - before - size), size


def _peak_on_cpu(runner: Runner, run: Scheduled) -> tuple[int, int]:
    """From the profiler's record of what torch's allocator gave and took back, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logits = runner.run([run])
    size = logits.numel() * logits.element_size()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return max(0, most - size), size


def storage_bytes(root: Any) -> int:
    """Bytes of all tensors reachable from an object through attributes, lists, tuples and dicts; what several share counts once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = _storage(item)
            storages[storage[0]] = storage[1]
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple, set)):
            stack += item
        elif type(item).__module__.startswith("engine."):
            stack += getattr(item, "__dict__", {}).values()
            names = {name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())}
            stack += [getattr(item, name) for name in names if hasattr(item, name)]
    return sum(storages.values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """(what tells its storage from others, bytes)."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # an opaque layout of oneDNN
        return id(tensor), tensor.numel() * tensor.element_size()
