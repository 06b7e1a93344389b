"""EngineConfig: every range, every value that is known but not built, and what the messages say."""

import copy
import dataclasses
import math
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.config import DRAINING_KNOBS, LIVE_KNOBS, EngineConfig
from engine.speculation.config import SpeculativeConfig

NAN, INF = math.nan, math.inf

GOOD: list[tuple[str, Any]] = [
    ("model", "smollm2-135m"),
    ("model", "owner/name"),
    ("device", "auto"),
    ("device", "cpu"),
    ("device", "cuda"),
    ("device", "cuda:1"),
    ("dtype", "auto"),
    ("dtype", "float32"),
    ("dtype", "bfloat16"),
    ("dtype", "float16"),
    ("max_num_seqs", 1),
    ("max_num_seqs", 4096),
    ("max_num_batched_tokens", 1),
    ("max_num_batched_tokens", 1 << 20),
    ("max_model_len", None),
    ("max_model_len", 1),
    ("max_model_len", 1 << 24),
    ("block_size", 1),
    ("block_size", 1024),
    ("num_kv_blocks", None),
    ("num_kv_blocks", 1),
    ("num_kv_blocks", 1 << 24),
    ("gpu_memory_utilization", 0.001),
    ("gpu_memory_utilization", 1),
    ("swap_space", 0),
    ("swap_space", 0.0),
    ("swap_space", 0.5),
    ("swap_space", 4),
    ("enable_prefix_caching", False),
    ("enable_chunked_prefill", False),
    *(("prefix_index", value) for value in ("hash", "radix")),
    *(("batching", value) for value in ("continuous", "static", "dynamic")),
    *(("batching_timeout_ms", value) for value in (0, 12.5, 60_000)),
    *(("scheduling_policy", value) for value in ("fcfs", "priority")),
    *(("watermark", value) for value in (0, 0.01, 0.999)),
    *(("max_num_waiting", value) for value in (None, 1, 1 << 24)),
    *(("preemption_mode", value) for value in ("recompute", "swap")),
    *(("kv_cache_dtype", value) for value in ("auto", "int8", "int4", "fp8")),
    *(("quantization", m) for m in (None, "int8", "int8_w8a8", "int4", "int3", "int2", "nf4", "fp8", "gptq", "awq")),
    ("quantization_group_size", None),
    ("quantization_options", None),
    ("quantization_options", {}),
    ("speculative", None),
    ("attention_backend", "auto"),
    ("attention_backend", "torch"),
    ("attention_backend", "triton"),
    ("enforce_eager", True),
    ("seed", 0),
    ("seed", 2**64 - 1),
]

# name, value, what the message says is allowed
BAD: list[tuple[str, Any, str]] = [
    ("model", "", "a name, a path"),
    ("model", None, "a name, a path"),
    ("model", 7, "a name, a path"),
    ("model", b"bytes", "a name, a path"),
    ("device", "", "'auto', 'cpu'"),
    ("device", "gpu", "'auto', 'cpu'"),
    ("device", "cuda:", "'auto', 'cpu'"),
    ("device", "cuda:x", "'auto', 'cpu'"),
    ("device", " cpu", "'auto', 'cpu'"),
    ("device", 0, "'auto', 'cpu'"),
    ("dtype", "bf16", "bfloat16"),
    ("dtype", None, "bfloat16"),
    ("dtype", ["float32"], "bfloat16"),
    *((name, value, "[1, 4096]") for name in ("max_num_seqs",) for value in (0, -1, 4097, True, 8.0, "8", None, NAN)),
    *(("max_num_batched_tokens", value, "[1, 1048576]") for value in (0, -1, (1 << 20) + 1, True, 512.0, "512", None, INF)),
    *(("block_size", value, "[1, 1024]") for value in (0, -16, 1025, True, 16.0, "16", None, NAN)),
    *(("max_model_len", value, "[1, 16777216]") for value in (0, -1, (1 << 24) + 1, True, 2048.0, "2048", NAN)),
    *(("num_kv_blocks", value, "[1, 16777216]") for value in (0, -1, (1 << 24) + 1, True, 64.0, "64", NAN)),
    *(("seed", value, "[0, 18446744073709551615]") for value in (-1, 2**64, True, 1.0, "0", None)),
    *(("gpu_memory_utilization", value, "(0, 1]") for value in (0, -0.1, 1.0001, NAN, INF, True, "0.9", None)),
    *(("swap_space", value, "GiB >= 0") for value in (-1, NAN, INF, False, True, "4", None)),
    *(("enable_prefix_caching", value, "a bool") for value in (0, 1, "yes", None)),
    *(("enable_chunked_prefill", value, "a bool") for value in (0, 1, "no", None)),
    *(("prefix_index", value, "'radix'") for value in ("trie", None, 1)),
    *(("batching", value, "'dynamic'") for value in ("Continuous", None, 1)),
    *(("batching_timeout_ms", value, "[0, 60000]") for value in (-1, 60_001, NAN, INF, True, "50", None)),
    *(("watermark", value, "[0, 1)") for value in (-0.1, 1, NAN, True, "0.1", None)),
    *(("max_num_waiting", value, "[1, 16777216]") for value in (0, -1, (1 << 24) + 1, True, 8.0, "8")),
    *(("scheduling_policy", value, "'priority'") for value in ("lifo", None, 1)),
    *(("preemption_mode", value, "'swap'") for value in ("drop", None, 1)),
    *(("kv_cache_dtype", value, "'int8'") for value in ("int2", None, 1)),
    *(("quantization", value, "int8_w8a8") for value in ("int5", "", 4, True, ["int8"])),
    ("quantization_group_size", 32, "goes with a quantization"),
    *(("quantization_options", value, "a dict") for value in ("head", ["head"], 1)),
    ("quantization_options", {"head": True}, "goes with a quantization"),
    *(("attention_backend", value, "'triton'") for value in ("flash", None, 1)),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_in_range_is_kept(name: str, value: Any) -> None:
    assert getattr(EngineConfig(**{name: value}), name) == value


@pytest.mark.parametrize("value", [0, -1, True, 32.0, "32"])
def test_a_group_size_is_a_number_of_columns(value: Any) -> None:
    with pytest.raises(ValueError, match="groups of 1 column or more"):
        EngineConfig(quantization="int4", quantization_group_size=value)
    assert EngineConfig(quantization="int4", quantization_group_size=64).quantization_group_size == 64


def test_every_field_has_a_good_value_above() -> None:
    assert {name for name, _ in GOOD} == {f.name for f in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_value_out_of_range_says_what_was_got_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    for make in (lambda: EngineConfig(**{name: value}), lambda: EngineConfig().changed(**{name: value})):
        with pytest.raises(ValueError) as error:
            make()
        text = str(error.value)
        assert text.startswith(name) and f"got {value!r}" in text and allowed in text, text


def test_an_unknown_field_lists_the_known_ones() -> None:
    for make in (lambda: EngineConfig(max_seqs=4), lambda: EngineConfig().changed(max_seqs=4)):  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"unknown EngineConfig field 'max_seqs'; known: model, .*max_num_seqs"):
            make()


def test_a_path_is_taken_as_the_model(tmp_path: Path) -> None:
    assert EngineConfig(model=tmp_path).model == str(tmp_path)  # type: ignore[arg-type]


def test_frozen_and_comparable() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert config == EngineConfig() and hash(config) == hash(EngineConfig())
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_changed_leaves_the_original_alone() -> None:
    config = EngineConfig(max_num_seqs=2)
    other = config.changed(max_num_seqs=3, block_size=32)
    assert (config.max_num_seqs, config.block_size) == (2, 16)
    assert (other.max_num_seqs, other.block_size) == (3, 32)
    assert other.as_dict() == {**config.as_dict(), "max_num_seqs": 3, "block_size": 32}


def test_the_knobs_are_fields() -> None:
    names = {f.name for f in dataclasses.fields(EngineConfig)}
    assert set(LIVE_KNOBS) <= names and set(DRAINING_KNOBS) <= names and not set(LIVE_KNOBS) & set(DRAINING_KNOBS)


def test_speculation_is_configured_by_an_object_or_by_its_fields() -> None:
    config = SpeculativeConfig("ngram", num_speculative_tokens=3)
    assert EngineConfig(speculative=config) == EngineConfig(speculative=asdict(config))
    assert EngineConfig(**EngineConfig(speculative=config).as_dict()).speculative == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("ngram", "speculative must be None, a SpeculativeConfig or a dict with its method, got 'ngram'"),
        ({}, "a dict with its method"),
        ({"method": "magic"}, r"method must be one of .*, got 'magic'"),
        ({"method": "ngram", "foo": 1}, "unknown SpeculativeConfig field 'foo'"),
        (
            {"method": "ngram", "num_speculative_tokens": 17},
            r"num_speculative_tokens must be an integer in \[0, 16\] or 'auto', got 17",
        ),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "model": "x"}, "model must be None for ngram"),
        ({"method": "eagle", "acceptance": "typical"}, "acceptance must be 'rejection' or 'coupled' but for medusa"),
        ({"method": "draft_model", "tree": (2, 1)}, "tree must be None for draft_model"),
        ({"method": "medusa", "tree": 3}, "tree must be None or a sequence of integers, got 3"),
        ({"method": "medusa", "tree": (0,)}, r"tree must be integers in \[1, 16\], at most 64 together"),
        ({"method": "medusa", "tree": (16,) * 5}, "at most 64 together"),
        ({"method": "ngram", "prompt_lookup_min": 5}, r"prompt_lookup_min must be at most prompt_lookup_max \(4\), got 5"),
        ({"method": "eagle", "exit_layer": 3}, "exit_layer must be None, or for layer_skip an integer >= 1"),
    ],
)
def test_speculation_that_makes_no_sense_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative=fields)
