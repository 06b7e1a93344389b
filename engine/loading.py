"""From a configuration to what an Engine is made of: the checkpoint's parts on a device, and facts in place of "auto"."""

import platform
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.attention import triton
from engine.attention.base import create_attention
from engine.config import EngineConfig
from engine.cuda_graphs import DecodeGraphs
from engine.hardware.cost import CostFacts
from engine.hardware.device import DeviceFacts, resolve_device
from engine.hardware.heap import give_back
from engine.kvcache.create import block_bytes, create_kv_cache
from engine.kvcache.layout import KVCache
from engine.model import compiled
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.config import ModelConfig
from engine.model.llama import Model
from engine.model.store import cache_directory, resolve_model
from engine.model.tokenizer import Tokenizer
from engine.runner import Runner
from engine.version import __version__
from engine.weights import state as weights_state
from engine.weights.build import Built
from engine.weights.make import make_weights
from engine.weights.plan import WeightPlan

DEFAULT_MODEL_LEN = 2048  # when nobody says: longer contexts are asked for, and paid for, explicitly
DEFAULT_CPU_BLOCK_TOKENS = 8192  # tokens the pool holds on a CPU when nobody says
_MEMORY_SHARE = 0.8  # of the free memory, what a KV pool may take at most


@dataclass
class Parts:
    """A loaded checkpoint. Several Engines, one after another, may be built on it."""

    path: Path
    model_config: ModelConfig
    tokenizer: Tokenizer
    model: Model
    device: DeviceFacts
    model_facts: dict[str, Any]
    versions: dict[str, str]
    checkpoint: Checkpoint
    not_compiled: str = ""  # why steps of one request are not compiled

    def __post_init__(self) -> None:
        self.weights = weights_state.of_model(self)
        self.flow_states: dict[int, torch.Tensor] = {}  # see engine.weights.original

    def install(self, built: Built) -> None:
        """Run these layers from the next forward pass on."""
        head = built.head
        if head is None and self.weights.plan.options.get("head"):
            tied = self.model_config.tie_word_embeddings
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            head = self.model.backend.pack(self.checkpoint.tensors[name], None)
        self.model.set_layers(built.layers, built.unpacking, head)
        self.weights = weights_state.of_model(self, built)
        self.__dict__.pop("cost_facts", None)
        give_back()

    @cached_property
    def cost_facts(self) -> CostFacts:
        facts = CostFacts.from_facts(self.model_facts, self.device.dtype)
        plain = self.weights.num_weights * self.device.torch_dtype.itemsize
        return replace(facts, layer_weight_bytes=facts.layer_weight_bytes - plain + self.weights.linear_bytes)

    @property
    def device_facts(self) -> dict[str, Any]:
        return {
            **self.device.as_dict(),
            "linear_backend": self.model.linear_backend,
            "single_row": self.model.compiled.state if self.model.compiled is not None else self.not_compiled,
        }

    def resolve(self, config: EngineConfig) -> EngineConfig:
        """The same configuration with a fact wherever it said "auto" or None. ValueError where the facts forbid it."""
        longest = self.model_config.max_position_embeddings
        length = config.max_model_len if config.max_model_len is not None else min(longest, DEFAULT_MODEL_LEN)
        if length > longest:
            raise ValueError(f"max_model_len must be at most {longest} for this checkpoint, got {length}")
        config = config.changed(
            device=self.device.device,
            dtype=self.device.dtype,
            max_model_len=length,
            attention_backend=self.device.attention_backend,
        )
        if config.num_kv_blocks is None:
            config = config.changed(num_kv_blocks=self._default_blocks(config))
        self.check_pool_fits(config)
        return config

    def _block_bytes(self, config: EngineConfig) -> int:
        return block_bytes(config.kv_cache_dtype, self.model_config, config.block_size, self.device.torch_dtype)

    def _default_blocks(self, config: EngineConfig) -> int:
        size = config.block_size
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device.device)
            room = free - (1 - config.gpu_memory_utilization) * total
            return max(1, int(room // self._block_bytes(config)))
        wanted = max(DEFAULT_CPU_BLOCK_TOKENS, config.max_model_len or 0)
        fits = int(_MEMORY_SHARE * psutil.virtual_memory().available) // self._block_bytes(config)
        return max(1, min(-(-wanted // size), fits))

    def check_pool_fits(self, config: EngineConfig, held: int = 0) -> None:
        """ValueError when the pool would not fit into the memory that is free. ``held``: bytes of the pool in whose place it comes;
        on a CPU they are not counted as free, since only what was written of it is really there."""
        wanted = (config.num_kv_blocks or 0) * self._block_bytes(config)
        if self.device.type == "cuda":
            available = torch.cuda.mem_get_info(self.device.device)[0] + held
        else:
            available = psutil.virtual_memory().available
        if wanted > available:
            raise ValueError(
                f"num_kv_blocks={config.num_kv_blocks} of {config.block_size} tokens need {wanted / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
            )


def load_parts(config: EngineConfig) -> Parts:
    """Find, read and place the checkpoint. ValueError (naming file and tensor) for one that cannot run here."""
    path = resolve_model(config.model)
    checkpoint = load_checkpoint(path)
    device = _with_kernels(resolve_device(config.device, config.dtype, config.attention_backend), config, checkpoint.config)
    unfit = (
        "enforce_eager" if config.enforce_eager else compiled.unfit(checkpoint.config, device.torch_device, device.torch_dtype)
    )
    layer = None if unfit else partial(compiled.CompiledLayer, directory=cache_directory() / "compiled")
    model = Model(checkpoint.config, checkpoint.tensors, device.torch_device, device.torch_dtype, layer)
    facts = {
        **checkpoint.config.facts(),
        "name": config.model,
        "file": path.name,
        "format": checkpoint.format,
        "sha256": checkpoint.checksum,
    }
    versions = {"cutaway": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    parts = Parts(path, checkpoint.config, checkpoint.tokenizer, model, device, facts, versions, checkpoint, unfit)
    if checkpoint.quantized:  # until here it ran dequantised
        parts.install(make_weights(parts, WeightPlan()))
    else:
        give_back()
    return parts


def _with_kernels(device: DeviceFacts, config: EngineConfig, model: ModelConfig) -> DeviceFacts:
    """Torch's attention where ours does not fit the model and was not asked for by name; ValueError where it was."""
    why = triton.unfit(model) if device.attention_backend == "triton" else ""
    if not why:
        return device
    if config.attention_backend == "triton":
        raise ValueError(f"attention_backend='triton': {why}")
    return replace(device, attention_backend="torch", why=f"{device.why}, but {why}: by torch")


def make_kv_cache(parts: Parts, config: EngineConfig) -> KVCache:
    """The tensors behind the pool, on the model's device and in its dtype or fewer bits."""
    assert config.num_kv_blocks is not None
    return create_kv_cache(
        config.kv_cache_dtype, parts.model_config, config.num_kv_blocks, config.block_size,
        parts.device.torch_device, parts.device.torch_dtype,
        # A request's block that is not full, and the next, into which a draft may reach.
        tail_blocks=2 * config.max_num_seqs,
    )  # fmt: skip


def make_runner(parts: Parts, kv: KVCache, config: EngineConfig) -> Runner:
    attention = create_attention(config.attention_backend, parts.model_config)
    graphs = None
    if parts.device.type == "cuda" and isinstance(attention, triton.TritonAttention) and not config.enforce_eager:
        assert config.max_model_len is not None
        graphs = DecodeGraphs(parts.model, kv, attention, config.max_num_seqs, config.max_model_len)
    return Runner(parts.model, kv, attention, graphs)
