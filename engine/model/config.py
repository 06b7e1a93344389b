"""What a checkpoint of the Llama family looks like, whichever file it came from.

Tensor names are those of Hugging Face checkpoints; shapes follow torch.nn.Linear: (out_features, in_features).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# rope_type -> the numbers it needs beside rope_theta
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# What a config.json that leaves a key out means, as transformers reads it. None: must be there.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 4096 * 32, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
}
_MAX_DIM = 1 << 24  # no size of a real model passes this; larger is a damaged or hostile file


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The numbers that define one model of the Llama family.

    ``rope_scaling``: None, or a dict with "rope_type" of "linear" (factor), "llama3" (factor, low_freq_factor,
    high_freq_factor, original_max_position_embeddings) or "factors" (a tuple of head_dim / 2 divisors of the rotary
    frequencies, as GGUF files store them). ``rope_frequencies()`` applies it.
    ``sliding_windows``: for each layer the number of last positions a token sees, itself included; None: all of them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str) -> "ModelConfig":
        """Read the content of a config.json (as transformers 4 and 5 write it).

        ``source`` names the file in errors. ValueError for another architecture, or a size or option that this engine
        does not know.
        """
        return _Reader(raw, source).config()

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor this model needs, with its shape, in the order of the forward pass."""
        q, kv, hidden, mlp = (
            self.num_attention_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        linears = (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.o_bias),
            ("mlp.gate_proj", mlp, hidden, self.mlp_bias),
            ("mlp.up_proj", mlp, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, mlp, self.mlp_bias),
        )
        norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
        if self.qk_norm:
            norms += [("self_attn.q_norm", self.head_dim), ("self_attn.k_norm", self.head_dim)]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, size in norms:
                shapes[f"{prefix}{name}.weight"] = (size,)
            for name, rows, columns, bias in linears:
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def num_parameters(self) -> int:
        """Numbers stored in the checkpoint; a tied head is not counted a second time."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def facts(self) -> dict[str, Any]:
        """Plain values for a log: every field, and ``num_parameters`` with ``num_embedding_parameters`` (the input table) of it."""
        facts = asdict(self)
        for name in ("sliding_windows", "eos_token_ids"):
            facts[name] = list(facts[name])
        if self.rope_scaling is not None:
            facts["rope_scaling"] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.rope_scaling.items()}
        facts["num_parameters"] = self.num_parameters()
        facts["num_embedding_parameters"] = self.vocab_size * self.hidden_size
        return facts


class _Reader:
    """Reads one config.json: each value is checked where it is taken, so that an error can name it."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        if not isinstance(raw, dict):
            raise ValueError(f"{source}: expected a JSON object, got {type(raw).__name__}")
        self.raw, self.source = raw, source
        architecture = raw.get("model_type")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise self.error("model_type", architecture, f"one of {ARCHITECTURES}")
        self.architecture: str = architecture
        self.defaults = _DEFAULTS[self.architecture]

    def error(self, key: str, got: Any, allowed: str) -> ValueError:
        shown = repr(got)
        return ValueError(f"{self.source}: {key} must be {allowed}, got {shown if len(shown) < 200 else shown[:200] + '...'}")

    def config(self) -> ModelConfig:
        raw, architecture = self.raw, self.architecture
        if raw.get("hidden_act", "silu") != "silu":
            raise self.error("hidden_act", raw["hidden_act"], "'silu'")
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", self.defaults.get("num_key_value_heads") or heads, null=heads)
        head_dim = self.integer("head_dim", self.defaults.get("head_dim") or hidden // heads, null=hidden // heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        if head_dim % 2:
            raise self.error("head_dim", head_dim, "even")
        layers = self.integer("num_hidden_layers", high=4096)
        attention_bias = self.boolean("attention_bias") if architecture in ("llama", "qwen3") else False
        theta, scaling = self.rope()
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=layers,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6), low=0.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=self.integer(
                "max_position_embeddings", self.defaults["max_position_embeddings"], high=1 << 30
            ),
            tie_word_embeddings=self.boolean("tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "qwen2",
            o_bias=attention_bias,
            mlp_bias=self.boolean("mlp_bias") if architecture == "llama" else False,
            qk_norm=architecture == "qwen3",
            sliding_windows=self.sliding_windows(layers),
            eos_token_ids=token_ids(raw.get("eos_token_id"), f"{self.source}: eos_token_id"),
            bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), f"{self.source}: bos_token_id")), None),
        )

    def integer(self, key: str, default: int | None = None, *, null: int | None = None, high: int = _MAX_DIM) -> int:
        """The positive integer under ``key``; ``default`` where the key is absent, ``null`` where its value is null."""
        value = self.raw.get(key, default)
        if value is None and key in self.raw:
            value = null
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.error(key, self.raw.get(key, value), f"an integer in [1, {high}]")
        return value

    def number(self, key: str, value: Any, low: float) -> float:
        """``value`` as a finite float above ``low``."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low < value < 1e300:  # (an int may be too large for a float; nan compares false)
            raise self.error(key, value, f"a finite number above {low:g}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.raw.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """Base and scaling of the rotary embedding. transformers 5 keeps both in rope_parameters, 4 in rope_theta and rope_scaling."""
        parameters = self.raw.get("rope_parameters")
        key = "rope_parameters" if parameters is not None else "rope_scaling"
        scaling = parameters if parameters is not None else self.raw.get("rope_scaling")
        if scaling is None:
            scaling = {}
        if not isinstance(scaling, dict):
            raise self.error(key, scaling, "a JSON object or null")
        theta = self.number("rope_theta", scaling.get("rope_theta", self.raw.get("rope_theta", 10000.0)), low=0.0)
        if scaling.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1)) not in (1, None):
            raise self.error("partial_rotary_factor", scaling.get("partial_rotary_factor"), "1")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return theta, None
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise self.error(f"{key}.rope_type", kind, f"one of {('default', *_ROPE_KEYS)}")
        numbers = {name: self.number(f"{key}.{name}", scaling.get(name), low=0.0) for name in _ROPE_KEYS[kind]}
        if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
            raise self.error(f"{key}.high_freq_factor", numbers["high_freq_factor"], "above low_freq_factor")
        return theta, {"rope_type": kind, **numbers}

    def sliding_windows(self, layers: int) -> tuple[int | None, ...]:
        if self.architecture == "llama":
            return (None,) * layers
        window = self.raw.get("sliding_window", self.defaults["sliding_window"])
        if window is not None:
            window = self.integer("sliding_window", self.defaults["sliding_window"], high=1 << 30)
        if self.architecture == "mistral":
            return (window,) * layers
        if not self.boolean("use_sliding_window"):
            return (None,) * layers
        kinds = self.raw.get("layer_types")
        if kinds is None:  # both Qwen: the layers from max_window_layers on have the window
            first = self.raw.get("max_window_layers", 28)
            if not isinstance(first, int):
                raise self.error("max_window_layers", first, "an integer")
            kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
        allowed = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in allowed for kind in kinds):
            raise self.error("layer_types", kinds, f"{layers} values out of {allowed}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def token_ids(value: Any, what: str) -> tuple[int, ...]:
    """A JSON value that holds no, one or several token ids, as a tuple without doubles."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ValueError(f"{what} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(values))


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: radians a rotary pair turns per position, scaling applied. A pair is (i, i + head_dim / 2).

    Llama-3's scaling: pairs that turn often within the original context keep their frequency, pairs that hardly turn are
    slowed down by ``factor``, and those between are blended.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "factors":
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
    slowed = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slowed
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # share of the frequency that is kept: 0 below `low` turns, 1 above `high`
    return kept * frequencies + (1 - kept) * slowed
