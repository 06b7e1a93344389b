"""Events about the device: what it can do, and what the engine takes of it. See ``engine.events.types`` for what holds for all events."""

from engine.events.event import Event


class RoofsMeasured(Event, frozen=True, kw_only=True):
    """What the device reached in plain torch, the best of several tries. Recorded under ``measure_roofs``."""

    name: str  # of the processor
    device: str  # "cpu", "cuda:0"
    threads: int  # that torch used on a CPU
    copy_bandwidth: float  # bytes a second, read and written
    read_bandwidth: float
    peak: dict[str, float]  # dtype -> operations a second of a matrix product, two for a multiply-add
    kept: bool  # whether it was measured before and read from the disk
    fingerprint: str  # of processor, threads and versions: what it holds for


class MemoryMeasured(Event, frozen=True, kw_only=True):
    """What the engine holds, in bytes, looked up in its tensors. Recorded under ``measure_memory``."""

    method: str  # EngineConfig.quantization; "" for the checkpoint's own weights
    group_size: int
    dtype: str  # of what is not in few bits
    kv_cache_dtype: str
    linear_bytes: int  # of the linear layers' weights as held for a product
    other_bytes: int  # embedding, head and norms
    model_bytes: int  # of all storages that the model holds, second forms and tables too
    kv_pool_bytes: int
    num_kv_blocks: int
    block_size: int
    activation_tokens: int  # of a forward pass, the only request in it
    activation_bytes: int  # the most that was held at a time in that pass beside weights and KV cache; without logits
    logit_bytes: int  # of the logits that it gave
    logit_rows: int
    process_bytes: int  # resident set of the engine's process
    device_bytes: int  # that torch holds on a GPU; 0 on a CPU
