"""From a configuration to what an Engine is made of: the checkpoint's parts on a device, and facts in place of "auto"."""

import platform
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.attention.base import create_attention
from engine.config import EngineConfig
from engine.hardware.cost import CostFacts
from engine.hardware.device import DeviceFacts, resolve_device
from engine.kvcache.layout import KVCache
from engine.model import compiled
from engine.model.checkpoint import load_checkpoint
from engine.model.config import ModelConfig
from engine.model.llama import Model
from engine.model.store import cache_directory, resolve_model
from engine.model.tokenizer import Tokenizer
from engine.runner import Runner
from engine.version import __version__

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
    not_compiled: str = ""  # why steps of one request are not compiled

    @cached_property
    def cost_facts(self) -> CostFacts:
        return CostFacts.from_facts(self.model_facts, self.device.dtype)

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
        return KVCache.bytes_per_block_of(self.model_config, config.block_size, self.device.torch_dtype)

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
    device = resolve_device(config.device, config.dtype, config.attention_backend)
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
    return Parts(path, checkpoint.config, checkpoint.tokenizer, model, device, facts, versions, unfit)


def make_kv_cache(parts: Parts, config: EngineConfig) -> KVCache:
    """The tensors behind the pool, on the model's device and in its dtype."""
    assert config.num_kv_blocks is not None
    return KVCache(
        parts.model_config, config.num_kv_blocks, config.block_size, parts.device.torch_device, parts.device.torch_dtype
    )


def make_runner(parts: Parts, kv: KVCache, config: EngineConfig) -> Runner:
    return Runner(parts.model, kv, create_attention(config.attention_backend, parts.model_config))
