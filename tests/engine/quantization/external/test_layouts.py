"""Every layout against the library that defines it, against naive packers one code at a time, and what does not fit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.quantization import packing
from engine.quantization.external import read_layout
from tests.engine.quantization.external import layouts
from tests.engine.quantization.external.layouts import NAME, read

FILES = ("gptq_matrices.safetensors", "compressed_matrices.safetensors", "compressed_act_order.safetensors")
CASES = {case: found for file in FILES for case, found in layouts.cases(file).items()}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def compressed(weights: dict[str, Any], format: str = "pack-quantized", **group: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


INT4 = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 16}


class Random:
    """Codes, zero points, scales and groups of a weight [rows, columns] of ``bits`` bits."""

    def __init__(self, rows: int, columns: int, group: int, bits: int, act_order: bool = False, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        groups = -(-columns // group)
        self.codes = rng.integers(0, 1 << bits, (rows, columns))
        self.zeros = rng.integers(0, 1 << bits, (rows, groups))
        self.scales = rng.uniform(0.01, 1, (rows, groups))
        self.groups = np.arange(columns) // group
        if act_order:
            self.groups = rng.permutation(self.groups)
        self.expected = layouts.dequantized(self.codes, self.zeros, self.scales, self.groups)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_library(case: str, tmp_path: Path) -> None:
    config, tensors, expected = CASES[case]
    assert expected.shape == (32, 64)
    assert torch.equal(read(tmp_path, tensors, config, (32, 64)).dequantize(), expected)


def test_cases_hold_zero_points_of_zero_where_the_conventions_of_v1_differ(tmp_path: Path) -> None:
    for bits in (2, 4, 8):
        config, held, expected = CASES[f"gptqmodel_{bits}_v1"]
        weight = read(tmp_path, held, config, (32, 64))
        assert weight.zero_points is not None and bool((weight.zero_points == 0).any())
        # Without the maker's name each field wraps by itself, and the neighbours of those zeros would come out wrong.
        assert not torch.equal(read(tmp_path, held, {**config, "meta": {}}, (32, 64)).dequantize(), expected)


@PROPERTY
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    rows=st.integers(1, 40),
    columns=st.integers(1, 96),
    group=st.sampled_from((16, 24, 32, 96)),
    act_order=st.booleans(),
    v2=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gptq(tmp_path: Path, bits: int, rows: int, columns: int, group: int, act_order: bool, v2: bool, seed: int) -> None:
    made = Random(rows, columns, group, bits, act_order, seed)
    config = {**GPTQ, "bits": bits, "group_size": group, "desc_act": act_order, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    tensors = layouts.gptq(made.codes, made.zeros, made.scales, made.groups, bits, v2)
    weight = read(tmp_path, tensors, config, made.codes.shape)
    assert np.array_equal(weight.unpacked().numpy(), made.codes)
    assert torch.equal(weight.dequantize(), made.expected)
    assert (weight.group_of_column is None) == np.array_equal(made.groups, np.arange(columns) // group)


@PROPERTY
@given(rows=st.integers(1, 5), columns=st.integers(1, 50), group=st.sampled_from((-1, 7, 16)), seed=st.integers(0, 1000))
def test_awq(tmp_path: Path, rows: int, columns: int, group: int, seed: int) -> None:
    made = Random(8 * rows, columns, group if group > 0 else columns, 4, seed=seed)
    weight = read(tmp_path, layouts.awq(made.codes, made.zeros, made.scales), {**AWQ, "group_size": group}, made.codes.shape)
    assert np.array_equal(weight.unpacked().numpy(), made.codes)
    assert torch.equal(weight.dequantize(), made.expected)


@PROPERTY
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    group=st.sampled_from((8, 24, 70)),
    act_order=st.booleans(),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed(
    tmp_path: Path, bits: int, rows: int, columns: int, group: int, act_order: bool, symmetric: bool, seed: int
) -> None:
    made = Random(rows, columns, group, bits, act_order, seed)
    zeros = np.full_like(made.zeros, 1 << (bits - 1)) if symmetric else made.zeros
    tensors = layouts.packed(made.codes, None if symmetric else zeros, made.scales, bits)
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": group}
    if act_order:
        weights["actorder"] = "group"
        tensors["weight_g_idx"] = torch.from_numpy(made.groups.astype(np.int32))
    weight = read(tmp_path, tensors, compressed(weights), made.codes.shape)
    assert np.array_equal(weight.unpacked().numpy(), made.codes)
    assert torch.equal(weight.dequantize(), layouts.dequantized(made.codes, zeros, made.scales, made.groups))


@pytest.mark.parametrize(("bits", "columns"), [(2, 21), (3, 7), (4, 13), (8, 5)])
def test_what_lies_behind_the_last_code_is_not_kept(bits: int, columns: int, tmp_path: Path) -> None:
    made = Random(4, columns, columns, bits)
    tensors = layouts.packed(made.codes, made.zeros, made.scales, bits)
    behind = 32 - columns * bits % 32
    tensors["weight_packed"][:, -1] |= -1 << (32 - behind)
    weight = read(
        tmp_path, tensors, compressed({**INT4, "num_bits": bits, "strategy": "channel", "group_size": None}), (4, columns)
    )
    assert torch.equal(weight.codes, packing.pack(torch.from_numpy(made.codes), bits))


def test_symmetric_zero_points_are_not_held(tmp_path: Path) -> None:
    made = Random(8, 32, 16, 4)
    zeros = np.full_like(made.zeros, 8)
    for v2 in (False, True):
        config = {**GPTQ, "sym": True, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
        assert (
            read(tmp_path, layouts.gptq(made.codes, zeros, made.scales, made.groups, 4, v2), config, (8, 32)).zero_points is None
        )


@pytest.mark.parametrize("v2", [False, True])
def test_symmetric_zeros_of_the_other_convention_are_noticed(v2: bool, tmp_path: Path) -> None:
    made = Random(8, 32, 16, 4)
    tensors = layouts.gptq(made.codes, np.full_like(made.zeros, 8), made.scales, made.groups, 4, v2)
    config = {**GPTQ, "sym": True, "checkpoint_format": "gptq" if v2 else "gptq_v2"}
    with pytest.raises(
        ValueError, match=rf"tensor '{NAME}.qzeros' gives zero point {9 if v2 else 7} everywhere .* other convention"
    ):
        read(tmp_path, tensors, config, (8, 32))


def test_widths_by_layer(tmp_path: Path) -> None:
    config = {**GPTQ, "dynamic": {r"+:.*q_proj": {"bits": 8, "group_size": 32}}}
    for bits, group in ((8, 32), (2, 64), (3, 16)):
        made = Random(16, 64, group, bits)
        tensors = layouts.gptq(made.codes, made.zeros, made.scales, made.groups, bits, False)
        weight = read(tmp_path, tensors, config, (16, 64))
        assert (weight.bits, weight.group_size) == (bits, group)
        assert torch.equal(weight.dequantize(), made.expected)


def test_scales_that_float16_cannot_hold_stay_float32(tmp_path: Path) -> None:
    made = Random(8, 32, 16, 4)
    tensors = layouts.gptq(made.codes, made.zeros, made.scales, made.groups, 4, False)
    exact = read(tmp_path, {**tensors, "scales": tensors["scales"].float()}, GPTQ, (8, 32))
    assert exact.scales.dtype == torch.float16 and torch.equal(exact.dequantize(), made.expected)
    tiny = (tensors["scales"].float() * 2.0**-30).to(torch.bfloat16)
    kept = read(tmp_path, {**tensors, "scales": tiny}, GPTQ, (8, 32))
    assert kept.scales.dtype == torch.float32 and torch.equal(kept.scales, tiny.t().float())


def test_blocks_that_do_not_divide_the_matrix(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.normal(size=(20, 50)).astype(np.float32)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(rng.uniform(0.5, 2, (2, 3)).astype(np.float32))
    config = compressed({"type": "float", "strategy": "block", "block_structure": [16, 24]}, "float-quantized")
    read_back = read(tmp_path, {"weight": weight, "weight_scale": scale}, config, (20, 50)).dequantize()
    for n, k in np.ndindex(20, 50):
        assert read_back[n, k] == weight[n, k].float() * scale[n // 16, k // 24]


def test_static_activations(tmp_path: Path) -> None:
    _, tensors, _ = CASES["int_8_tensor"]
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    weights = {"num_bits": 8, "symmetric": True, "strategy": "tensor"}
    held = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"], "input_scale": torch.tensor([0.25]).half()}
    config = compressed(weights, "int-quantized", input_activations=inputs)
    weight = read(tmp_path, held, config, (32, 64))
    assert (weight.method, weight.activation_bits, weight.activation_scale) == ("int8_w8a8", 8, 0.25)
    held.pop("input_scale")
    with pytest.raises(ValueError, match="input_scale' missing beside"):
        read(tmp_path, held, config, (32, 64))
    with pytest.raises(ValueError, match=r"input_scale' must be positive and finite, got 0\.0"):
        read(tmp_path, {**held, "input_scale": torch.zeros(1)}, config, (32, 64))
    whole_batch = compressed(weights, "int-quantized", input_activations={**inputs, "dynamic": True})
    assert read(tmp_path, held, whole_batch, (32, 64)).activation_bits is None
    asymmetric = compressed(weights, "int-quantized", input_activations={**inputs, "symmetric": False})
    weight = read(
        tmp_path,
        {**held, "input_scale": torch.ones(1), "input_zero_point": torch.ones(1, dtype=torch.int8)},
        asymmetric,
        (32, 64),
    )
    assert (weight.method, weight.activation_bits, weight.activation_scale) == ("int8", None, None)


def test_scales_of_a_kv_cache_are_left_out(tmp_path: Path) -> None:
    config, tensors, _ = CASES["packed_4_symmetric"]
    held = {**tensors, "output_scale": torch.ones(1)}
    name = "model.layers.0.self_attn.k_proj"
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    read(tmp_path, held, {**config, "kv_cache_scheme": scheme}, (32, 64), name)
    with pytest.raises(AssertionError, match="output_scale"):  # left over: no place in the model
        read(tmp_path, held, {**config, "kv_cache_scheme": None}, (32, 64), name)


def test_groups_of_layers(tmp_path: Path) -> None:
    """A name wins over an expression, both over the class; ignored layers belong to none."""
    made = Random(8, 32, 16, 4)
    tensors = layouts.packed(made.codes, made.zeros, made.scales, 4)
    other = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
    for targets in ([NAME], [r"re:.*self_attn\.q_proj$"]):
        config = compressed(other)
        config["config_groups"]["group_1"] = {"targets": targets, "weights": INT4, "format": "pack-quantized"}
        assert torch.equal(read(tmp_path, tensors, config, (8, 32)).dequantize(), made.expected)
    for ignore in ([NAME], ["re:.*q_proj"], ["Linear"]):
        with pytest.raises(ValueError, match="belongs to no group of config_groups"):
            read(tmp_path, tensors, {**compressed(INT4), "ignore": ignore}, (8, 32))


def wrong(tensors: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {key: value for key, value in {**tensors, **changes}.items() if value is not None}


def bad_gptq() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]]:
    made = Random(16, 64, 16, 4)
    good = layouts.gptq(made.codes, made.zeros, made.scales, made.groups, 4, False)
    as_awq = layouts.awq(made.codes, made.zeros, made.scales)
    order = {**GPTQ, "desc_act": True}
    return {
        "AWQ's order": (as_awq, GPTQ, "qweight' has shape [64, 2], expected [8, 16] for a weight of [16, 64]: wrong pack order"),
        "transposed": (wrong(good, qweight=good["qweight"].t()), GPTQ, "wrong pack order, the matrix is transposed"),
        "other width": (wrong(good, qweight=good["qweight"][:4]), GPTQ, "qweight' has shape [4, 16], expected [8, 16]"),
        "words of 64 bits": (wrong(good, qweight=good["qweight"].long()), GPTQ, "qweight' has dtype I64, expected I32"),
        "scales transposed": (wrong(good, scales=good["scales"].t()), GPTQ, "scales' has shape [16, 4], expected [4, 16]"),
        "other group size": (good, {**GPTQ, "group_size": 32}, "scales' has shape [4, 16], expected [2, 16]"),
        "scales as integers": (
            wrong(good, scales=good["scales"].to(torch.int32)),
            GPTQ,
            "scales' has dtype I32, expected F16 or",
        ),
        "zeros cut off": (wrong(good, qzeros=good["qzeros"][:, :1]), GPTQ, "qzeros' has shape [4, 1], expected [4, 2]"),
        "no order": (wrong(good, g_idx=None), order, "g_idx' missing beside"),
        "order cut off": (wrong(good, g_idx=good["g_idx"][:32]), order, "g_idx' has shape [32], expected [64]"),
        "group too high": (wrong(good, g_idx=good["g_idx"] + 1), order, "g_idx' names groups 1 to 4, there are 0 to 3"),
        "group below 0": (wrong(good, g_idx=good["g_idx"] - 1), order, "g_idx' names groups -1 to 2, there are 0 to 3"),
        "uneven groups": (
            wrong(good, scales=good["scales"][:3]),
            {**GPTQ, "dynamic": {"-:.*o_proj": {}}},
            "makes no equal",
        ),
    }


def bad_awq() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]]:
    made = Random(16, 64, 16, 4)
    good = layouts.awq(made.codes, made.zeros, made.scales)
    as_gptq = layouts.gptq(made.codes, made.zeros, made.scales, made.groups, 4, True)
    del as_gptq["g_idx"]
    nan = good["scales"].clone()
    nan[0, 0] = float("nan")
    return {
        "GPTQ's order": (as_gptq, AWQ, "qweight' has shape [8, 16], expected [64, 2] for a weight of [16, 64]: wrong pack order"),
        "transposed": (wrong(good, qweight=good["qweight"].t()), AWQ, "qweight' has shape [2, 64], expected [64, 2]"),
        "no scales": (wrong(good, scales=None), AWQ, "scales' missing beside"),
        "no zeros": (wrong(good, qzeros=None), AWQ, "qzeros' missing beside"),
        "no codes": (wrong(good, qweight=None), AWQ, "qweight' missing beside"),
        "scales transposed": (wrong(good, scales=good["scales"].t()), AWQ, "wrong pack order, scales are [groups, outputs]"),
        "other group size": (good, {**AWQ, "group_size": 64}, "scales' has shape [4, 16], expected [1, 16]"),
        "NaN": (wrong(good, scales=nan), AWQ, "scales' has 1 scales that are inf or NaN, of 64"),
    }


def bad_compressed() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]]:
    made = Random(16, 64, 16, 4)
    good, config = layouts.packed(made.codes, made.zeros, made.scales, 4), compressed(INT4)
    int8 = {"weight": torch.full((16, 64), -9, dtype=torch.int8), "weight_scale": torch.ones(16, 1)}
    four = compressed({"num_bits": 4, "symmetric": True, "strategy": "channel"}, "naive-quantized")
    eight = compressed({"num_bits": 8, "symmetric": True, "strategy": "channel"}, "int-quantized")
    fp8 = compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized")
    nan = torch.full((16, 64), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    symmetric = compressed({**INT4, "symmetric": True})
    return {
        "transposed": (
            wrong(good, weight_packed=good["weight_packed"].t()),
            config,
            "weight_packed' has shape [8, 16], expected [16, 8] for a weight of [16, 64]: wrong pack order, the matrix is transposed",
        ),
        "along outputs": (
            wrong(good, weight_packed=good["weight_packed"].reshape(64, 2)),
            config,
            "wrong pack order, codes lie along",
        ),
        "no scales": (wrong(good, weight_scale=None), config, "weight_scale' missing beside"),
        "no zeros": (wrong(good, weight_zero_point=None), config, "weight_zero_point' missing beside"),
        "no shape": (wrong(good, weight_shape=None), config, "weight_shape' missing beside"),
        "other shape": (
            wrong(good, weight_shape=torch.tensor([64, 16])),
            config,
            "weight_shape' says [64, 16], but the model asks",
        ),
        "zeros by rows": (
            wrong(good, weight_zero_point=good["weight_zero_point"].t()),
            config,
            "weight_zero_point' has shape [4, 2]",
        ),
        "no order": (good, compressed({**INT4, "actorder": "group"}), "weight_g_idx' missing beside"),
        "zeros of symmetric weights": (good, symmetric, "weight_zero_point' moves the zero, but the configuration says"),
        "int8 without scales": (wrong(int8, weight_scale=None), eight, "weight_scale' missing beside"),
        "int8 out of 4 bits": (int8, four, "weight' holds integers from -9 to -9, but 4 bits hold -8 to 7"),
        "int8 under fp8": (int8, fp8, "weight' has dtype I8, expected F8_E4M3"),
        "fp8 under int8": (wrong(int8, weight=nan), eight, "weight' has dtype F8_E4M3, expected I8"),
        "fp8 NaN": (wrong(int8, weight=nan), fp8, "weight' has 1,024 values that are NaN, of 1,024"),
        "inf": (
            wrong(int8, weight_scale=torch.full((16, 1), float("inf"))),
            eight,
            "weight_scale' has 16 scales that are inf or NaN",
        ),
        "scales of the matrix": (
            wrong(int8, weight_scale=torch.ones(1)),
            eight,
            "weight_scale' has shape [1], expected [16, 1] or [16]",
        ),
    }


BAD = {
    f"{tool}: {name}": case
    for tool, made in (("gptq", bad_gptq()), ("awq", bad_awq()), ("compressed", bad_compressed()))
    for name, case in made.items()
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_names_file_and_tensor(name: str, tmp_path: Path) -> None:
    tensors, config, message = BAD[name]
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(tmp_path))}/model.safetensors: tensor '{NAME}\..*{re.escape(message)}"
    ):
        read(tmp_path, tensors, config, (16, 64))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["group", "re:a", "int"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "targets", "a"]), inner, max_size=3),
    max_leaves=6,
)


@given(
    good=st.sampled_from([GPTQ, {**AWQ, "meta": {}}, compressed(INT4), compressed(INT4)["config_groups"]["group_0"], INT4]),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_a_configuration_or_a_value_error(good: dict[str, Any], data: st.DataObject) -> None:
    keys = [*sorted(good), "checkpoint_format", "dynamic", "actorder", "input_activations", "sparsity_config", "meta", "version"]
    changed = {**good, data.draw(st.sampled_from(keys)): data.draw(JSON)}
    if "weights" in good:
        changed = {**compressed(INT4), "config_groups": {"group_0": changed}}
    elif "num_bits" in good:
        changed = compressed(changed)
    try:
        layout = read_layout({"quantization_config": changed}, Path("config.json"), [])
    except ValueError as error:
        assert str(error).startswith("config.json: quantization_config")
    else:
        assert layout is None or json.dumps(layout.facts())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed(INT4, "nvfp4-pack-quantized"), "format must be one of 'pack-quantized', .*, got 'nvfp4-pack-quantized'"),
        (compressed(INT4, "dense"), "format must be one of .*, got 'dense'"),
        (compressed(INT4, "mixed-precision"), "config_groups.group_0.format must be one of .*, got None"),
        ({**compressed(INT4), "config_groups": {}}, "config_groups must be an object with at least one group"),
        ({**compressed(INT4), "config_groups": {"W8A8": ["Linear"]}}, "config_groups.W8A8 must be a JSON object"),
        ({**compressed(INT4), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config must be empty"),
        ({**compressed(INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config must be empty or dense"),
        ({**compressed(INT4), "ignore": ["re:("]}, r"ignore must be a regular expression after re: \(.*\), got 're:\('"),
        ({**compressed(INT4), "ignore": "lm_head"}, "ignore must be a list of names"),
        (compressed({**INT4, "num_bits": 6}), "weights.num_bits must be one of 2, 3, 4, 8, got 6"),
        (compressed({**INT4, "strategy": "tensor_group"}), "weights.strategy must be one of .*, got 'tensor_group'"),
        (compressed({**INT4, "group_size": None}), "weights.group_size must be a positive integer with the strategy"),
        (compressed({**INT4, "dynamic": True}), "weights.dynamic must be false"),
        (compressed({**INT4, "type": "float"}), "weights.type must be what 'pack-quantized' holds, got 'float'"),
        (compressed({"num_bits": 4, "type": "float"}, "float-quantized"), "weights.num_bits must be one of 8, got 4"),
        (compressed({"type": "float", "symmetric": False}, "float-quantized"), "weights.symmetric must be true for float8"),
        (compressed({"strategy": "block", "block_structure": [0, 2]}, "int-quantized"), r"weights.block_structure must be \[rows, col"),
        (compressed(INT4, output_activations={"num_bits": 8}), "output_activations must be null"),
    ],
)  # fmt: skip
def test_a_configuration_of_compressed_tensors_that_is_not_supported(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}/config.json: quantization_config\..*{message}"):
        read(tmp_path, {"weight": torch.ones(1)}, config, (16, 64))
