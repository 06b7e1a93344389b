"""Drafter files: safetensors with what a drafter adds to its target, and metadata that says whose it is.

Metadata (all text): ``format`` "cutaway-drafter", ``version`` "1", ``method``, ``target_sha256`` (``Parts.model_facts["sha256"]``),
``target`` (its name), ``hidden_size``, ``exit_layer`` (layer_skip), ``num_layers`` (draft_model), ``card`` (how it was made).
Tensors: ``vocab`` int32 [V], ascending token ids of the draft vocabulary, whose rows of the target's head are the drafter's head;
the others float16 or bfloat16, shapes in ``tensor_shapes``. The embedding is the target's.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.model.config import ModelConfig

FORMAT, VERSION = "cutaway-drafter", "1"
METHODS = ("draft_model", "layer_skip", "medusa", "eagle")
REST = "rest"  # a datastore, see ``datastore``
SHIPPED = (*METHODS, REST)
MAX_LAYERS, MAX_HEADS = 64, 16  # more than any drafter has; a larger number is a damaged or hostile file
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DrafterFile:
    """What ``read_drafter`` found, checked against the target."""

    path: Path
    method: str
    vocab: torch.Tensor  # int64 [V], ascending
    tensors: dict[str, torch.Tensor]  # float16 or bfloat16, exactly the names of ``tensor_shapes``
    exit_layer: int | None  # layer_skip
    num_layers: int | None  # draft_model
    num_heads: int | None  # medusa
    target: str  # name of the target
    card: str


def write_atomically(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that is there whole or not at all."""
    new = path.with_name(path.name + ".new")
    save_file(tensors, new, metadata)
    os.replace(new, path)


def shipped_drafter(method: str) -> Path:
    """Where the drafter that we trained for the default model lies. ValueError for a method that has none."""
    if method not in SHIPPED:
        raise ValueError(f"a drafter file is for one of {SHIPPED}, got {method!r}")
    return Path(__file__).parent / "drafters" / f"{method}.safetensors"


def tensor_shapes(method: str, config: ModelConfig, *, num_layers: int = 1, num_heads: int = 1) -> dict[str, tuple[int, ...]]:
    """name -> shape of all tensors but ``vocab``. ``num_layers``: of a draft model; ``num_heads``: of Medusa."""
    hidden = config.hidden_size
    if method == "medusa":
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(num_heads):
            shapes |= {f"heads.{i}.weight": (hidden, hidden), f"heads.{i}.bias": (hidden,)}
        return shapes
    if method == "layer_skip":
        return {"norm.weight": (hidden,), "adapter.weight": (hidden, hidden)}
    if method not in METHODS:
        raise ValueError(f"a drafter file is for one of {METHODS}, got {method!r}")
    shapes = {"fc.weight": (hidden, 2 * hidden)} if method == "eagle" else {}
    q, kv, mlp = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    for i in range(1 if method == "eagle" else num_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "norm.weight": (hidden,)}


def write_drafter(
    path: Path, method: str, tensors: Mapping[str, torch.Tensor], vocab: torch.Tensor, *, config: ModelConfig, target: str,
    target_sha256: str, settings: Mapping[str, Any] | None = None, card: str = "", dtype: torch.dtype = torch.float16,
) -> None:  # fmt: skip
    """Write a drafter, its tensors rounded to ``dtype``. ValueError where they are not a drafter's, or too large for the dtype."""
    values = {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}
    unfit = [name for name, tensor in values.items() if not tensor.isfinite().all()]
    if unfit:
        raise ValueError(f"{path}: tensor {unfit[0]!r} has values that {dtype} cannot hold")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "method": method,
        "target": target,
        "target_sha256": target_sha256,
        "hidden_size": str(config.hidden_size),
        **{name: str(value) for name, value in (settings or {}).items()},
        "card": card,
    }
    ids = vocab.to(torch.int32)
    _check(path, metadata, {**values, "vocab": ids}, method, config, target_sha256)
    write_atomically(path, {**values, "vocab": ids}, metadata)


def read_drafter(path: str | Path, method: str, config: ModelConfig, target_sha256: str) -> DrafterFile:
    """The drafter at ``path`` for this target.

    ValueError, naming the file: not a whole safetensors file, not one of ours, of another version or method, made for
    another target, a tensor missing, left over, or of another shape or dtype, a vocabulary that is none.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such drafter file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            check_metadata(path, metadata, method, config, target_sha256)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    return _check(path, metadata, tensors, method, config, target_sha256)


def _check(
    path: Path, metadata: Mapping[str, str], tensors: dict[str, torch.Tensor], method: str, config: ModelConfig, sha256: str
) -> DrafterFile:
    check_metadata(path, metadata, method, config, sha256)
    layers = heads = exit_layer = None
    if method == "draft_model":
        layers = _integer(path, metadata, "num_layers", MAX_LAYERS)
    elif method == "layer_skip":
        exit_layer = _integer(path, metadata, "exit_layer", config.num_layers - 1)
    elif method == "medusa":
        heads = max(1, min(MAX_HEADS, sum(name.endswith(".bias") for name in tensors)))
    own = {name: tensor for name, tensor in tensors.items() if name != "vocab"}
    vocab = _check_vocab(path, tensors.get("vocab"), config.vocab_size)
    shapes = tensor_shapes(method, config, num_layers=layers or 1, num_heads=heads or 1)
    for name, shape in shapes.items():
        if name not in own:
            raise ValueError(f"{path}: tensor {name!r} missing")
        if tuple(own[name].shape) != shape:
            raise ValueError(f"{path}: tensor {name!r} has shape {list(own[name].shape)}, this target asks for {list(shape)}")
        if own[name].dtype not in _DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has dtype {own[name].dtype}, supported: {_DTYPES}")
    left_over = sorted(set(own) - set(shapes))
    if left_over:
        raise ValueError(f"{path}: tensor {left_over[0]!r} has no place in a drafter of method {method!r}")
    target, card = metadata.get("target", ""), metadata.get("card", "")
    return DrafterFile(path, method, vocab, own, exit_layer, layers, heads, target, card)


def check_metadata(path: Path, metadata: Mapping[str, str], method: str, config: ModelConfig, sha256: str) -> None:
    """ValueError unless this is a file of ours, for this method and target."""
    if method not in SHIPPED:
        raise ValueError(f"a drafter file is for one of {SHIPPED}, got {method!r}")
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: not a drafter file: its metadata says format {metadata.get('format')!r}, expected {FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path}: drafter file of version {metadata.get('version')!r}; this program reads {VERSION!r}")
    if metadata.get("method") != method:
        raise ValueError(f"{path}: a drafter of method {metadata.get('method')!r}, {method!r} was asked for")
    if metadata.get("target_sha256") != sha256:
        raise ValueError(
            f"{path}: made for another target: {metadata.get('target')!r} with SHA-256 {metadata.get('target_sha256')!r}, "
            f"the checkpoint here has {sha256!r}"
        )
    if metadata.get("hidden_size") != str(config.hidden_size):
        raise ValueError(
            f"{path}: made for a hidden_size of {metadata.get('hidden_size')!r}, the checkpoint here has {config.hidden_size}"
        )


def _integer(path: Path, metadata: Mapping[str, str], name: str, high: int) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and 1 <= int(text) <= high):
        raise ValueError(f"{path}: {name} must be an integer in [1, {high}], got {metadata.get(name)!r}")
    return int(text)


def _check_vocab(path: Path, vocab: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    if vocab is None:
        raise ValueError(f"{path}: tensor 'vocab' missing")
    if vocab.dtype != torch.int32 or vocab.dim() != 1 or not len(vocab):
        raise ValueError(f"{path}: vocab must be int32 of one dimension and not empty, got {vocab.dtype} {list(vocab.shape)}")
    ids = vocab.to(torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(f"{path}: vocab must be ascending token ids in [0, {vocab_size})")
    return ids
