"""ModelConfig against the configs and models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.config import ModelConfig, rope_frequencies
from tests.engine.model import tiny

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(family: str, **overrides: Any) -> tuple[ModelConfig, Any]:
    made = tiny.model(family, **overrides)
    return ModelConfig.from_hf(json.loads(made.config.to_json_string(use_diff=False)), "config.json"), made


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_asks_for_the_tensors_of_transformers(family: str) -> None:
    config, made = read(family)
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert config.tensor_shapes() == wanted
    assert config.num_parameters() == sum(parameter.numel() for parameter in made.parameters())
    assert config.architecture == made.config.model_type
    assert config.rms_norm_eps == made.config.rms_norm_eps
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rope_frequencies_are_those_of_transformers(family: str) -> None:
    config, made = read(family)
    torch.testing.assert_close(rope_frequencies(config), made.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_llama3_scaling_has_frequencies_of_all_three_kinds() -> None:
    config, _ = read("llama3", head_dim=64)
    plain = rope_frequencies(ModelConfig(**{**vars(config), "rope_scaling": None}))
    ratio = (plain / rope_frequencies(config)).tolist()
    assert ratio[0] == 1 and ratio[-1] == 8 and any(1 < r < 8 for r in ratio)


def test_factors_divide_the_frequencies() -> None:
    config, _ = read("llama")
    factors = tuple(float(i + 1) for i in range(config.head_dim // 2))
    scaled = ModelConfig(**{**vars(config), "rope_scaling": {"rope_type": "factors", "factors": factors}})
    torch.testing.assert_close(rope_frequencies(scaled) * torch.tensor(factors), rope_frequencies(config))


def test_sliding_windows_by_family() -> None:
    assert read("llama")[0].sliding_windows == (None, None, None)
    assert read("mistral")[0].sliding_windows == (7, 7, 7)
    assert read("mistral-full")[0].sliding_windows == (None, None, None)
    assert read("qwen2")[0].sliding_windows == (None, None, None)
    assert read("qwen2-window")[0].sliding_windows == (None, 5, 5)


def test_configs_as_transformers_4_wrote_them() -> None:
    raw = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {**tiny.LLAMA3_ROPE}, "head_dim": None}
    config = ModelConfig.from_hf(raw, "config.json")
    assert config.rope_theta == 500000.0 and config.head_dim == 8
    assert config.rope_scaling is not None and config.rope_scaling["rope_type"] == "llama3"
    older = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, "config.json")
    assert older.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    window = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    assert ModelConfig.from_hf({**LLAMA, **window}, "config.json").sliding_windows == (None, 9)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_key_left_out_means_what_it_means_to_transformers(architecture: str) -> None:
    from transformers import AutoConfig

    short = {"vocab_size": 100, "hidden_size": 512, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 32}
    ours = ModelConfig.from_hf({"model_type": architecture, **short}, "config.json")
    theirs = AutoConfig.for_model(architecture, **short)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    windowed = architecture == "mistral"
    assert ours.sliding_windows == ((theirs.sliding_window,) * 2 if windowed else (None, None))


def test_facts_are_plain_and_count_parameters() -> None:
    config, made = read("llama-tied")
    facts = config.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["num_parameters"] == sum(parameter.numel() for parameter in made.parameters())
    assert facts["num_embedding_parameters"] == made.model.embed_tokens.weight.numel()
    assert facts["num_kv_heads"] == 2 and facts["sliding_windows"] == [None, None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type must be one of .*got 'gpt2'"),
        ({"model_type": None}, r"model_type must be one of"),
        ({"hidden_act": "gelu"}, r"hidden_act must be 'silu', got 'gelu'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor"),
        ({"num_attention_heads": 0}, r"num_attention_heads must be an integer in"),
        ({"vocab_size": None}, r"vocab_size must be an integer"),
        ({"vocab_size": 1 << 40}, r"vocab_size must be an integer in \[1, 16777216\], got 1099511627776"),
        ({"hidden_size": True}, r"hidden_size must be an integer"),
        ({"num_hidden_layers": 1 << 20}, r"num_hidden_layers must be an integer in \[1, 4096\]"),
        ({"head_dim": 7}, r"head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps must be a finite number"),
        ({"rope_theta": -1}, r"rope_theta must be a finite number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling.rope_type must be one of \('default', 'linear', 'llama3'\), got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.factor must be a finite number"),
        ({"rope_scaling": {**tiny.LLAMA3_ROPE, "high_freq_factor": 1.0}}, r"rope_scaling.high_freq_factor must be above low_freq_factor"),
        ({"rope_scaling": 3}, r"rope_scaling must be a JSON object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor must be 1"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings must be true or false"),
        ({"eos_token_id": "2"}, r"eos_token_id must be a token id"),
        ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window must be an integer in"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, r"layer_types must be 2 values"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "all"}, r"max_window_layers must be an integer"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_an_error_that_names_file_and_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^some/config.json: {message}"):
        ModelConfig.from_hf({**LLAMA, **changes}, "some/config.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), inner, max_size=3),
)
_KEYS = [*LLAMA, "rope_scaling", "rope_parameters", "eos_token_id", "sliding_window", "use_sliding_window", "layer_types",
         "max_window_layers", "head_dim", "rms_norm_eps", "attention_bias", "hidden_act", "bos_token_id"]  # fmt: skip


@settings(max_examples=200)
@given(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4))
def test_any_json_is_a_config_or_a_value_error(architecture: str, changes: dict[str, Any]) -> None:
    try:
        config = ModelConfig.from_hf({**LLAMA, "model_type": architecture, **changes}, "config.json")
    except ValueError as error:
        assert str(error).startswith("config.json: ")
    else:
        assert len(config.sliding_windows) == config.num_layers
        assert config.num_attention_heads % config.num_kv_heads == 0


def test_not_an_object(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        ModelConfig.from_hf([], "config.json")  # type: ignore[arg-type]
