"""GGUF files: every tensor type against an independent decoder, names and rows against transformers, damage as clear errors."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model.checkpoint import load_checkpoint
from engine.model.config import rope_frequencies
from engine.model.gguf_file import GGUFFile, dequantize
from tests.engine.model import gguf_files, tiny

UP = "model.layers.0.mlp.up_proj.weight"
RNG = np.random.default_rng(0)


def halves(count: int) -> np.ndarray:
    """float16 numbers of the size that scales have, as bytes [count, 2]."""
    return (RNG.normal(size=(count, 1)) * 0.01).astype("<f2").view(np.uint8)


def random_bytes(count: int, width: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, width), dtype=np.uint8)


def f16(block: np.ndarray, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2].tobytes(), "<f2")[0])


def scale_and_minimum(packed: list[int], j: int) -> tuple[int, int]:
    """The j-th of the eight 6-bit scales and minima that Q4_K and Q5_K pack into 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4


def decode_q8_0(block: np.ndarray) -> list[float]:
    return [f16(block, 0) * int(np.int8(q)) for q in block[2:].view(np.int8)]


def decode_q4_0(block: np.ndarray) -> list[float]:
    quants = [int(b) & 15 for b in block[2:]] + [int(b) >> 4 for b in block[2:]]
    return [f16(block, 0) * (q - 8) for q in quants]


def decode_q4_1(block: np.ndarray) -> list[float]:
    quants = [int(b) & 15 for b in block[4:]] + [int(b) >> 4 for b in block[4:]]
    return [f16(block, 0) * q + f16(block, 2) for q in quants]


def decode_q45_k(block: np.ndarray, five: bool) -> list[float]:
    packed = block[4:16].tolist()
    high = block[16:48].tolist() if five else [0] * 32
    low = block[48 if five else 16 :].tolist()
    values = []
    for j in range(8):  # sub-blocks of 32; two share 32 bytes, as low and high halves
        scale, minimum = scale_and_minimum(packed, j)
        for i in range(32):
            quant = low[32 * (j // 2) + i] >> (4 * (j % 2)) & 15
            quant += 16 * (high[i] >> j & 1)
            values.append(f16(block, 0) * scale * quant - f16(block, 2) * minimum)
    return values


def decode_q6_k(block: np.ndarray) -> list[float]:
    low, high, scales = block[:128].tolist(), block[128:192].tolist(), block[192:208].view(np.int8).tolist()
    values = []
    for i in range(256):
        half, quarter, at = i // 128, i % 128 // 32, i % 32
        quant = low[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter // 2)) & 15
        quant |= (high[32 * half + at] >> (2 * quarter) & 3) << 4
        values.append(f16(block, 208) * scales[i // 16] * (quant - 32))
    return values


# type -> (blocks of random content, given their number; decoder of one block; values a block holds)
QUANTISED: dict[str, tuple[Callable[[int], np.ndarray], Callable[[np.ndarray], list[float]], int]] = {
    "Q8_0": (lambda n: np.hstack([halves(n), random_bytes(n, 32)]), decode_q8_0, 32),
    "Q4_0": (lambda n: np.hstack([halves(n), random_bytes(n, 16)]), decode_q4_0, 32),
    "Q4_1": (lambda n: np.hstack([halves(n), halves(n), random_bytes(n, 16)]), decode_q4_1, 32),
    "Q4_K": (lambda n: np.hstack([halves(n), halves(n), random_bytes(n, 140)]), lambda b: decode_q45_k(b, False), 256),
    "Q5_K": (lambda n: np.hstack([halves(n), halves(n), random_bytes(n, 172)]), lambda b: decode_q45_k(b, True), 256),
    "Q6_K": (lambda n: np.hstack([random_bytes(n, 208), halves(n)]), decode_q6_k, 256),
}


@pytest.fixture(scope="module")
def llama() -> Any:
    """Wide enough (256) for the K types, which hold 256 numbers a block."""
    return tiny.model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=256, vocab_size=40)


@pytest.mark.parametrize("name", QUANTISED)
def test_unpacking_against_a_decoder_written_from_the_format(name: str) -> None:
    make, decode, _ = QUANTISED[name]
    blocks = make(37)
    wanted = np.array([decode(block) for block in blocks])
    np.testing.assert_allclose(dequantize(blocks.reshape(-1), name), wanted.ravel(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", QUANTISED)
def test_unpacking_gives_the_bits_of_the_gguf_library(name: str) -> None:
    blocks = QUANTISED[name][0](5000)  # more than are unpacked at a time
    wanted = gguf.quants.dequantize(blocks, Type[name])
    assert np.array_equal(dequantize(blocks.reshape(-1), name), wanted.reshape(-1))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *QUANTISED])
def test_a_file_of_each_type(name: str, llama: Any, tmp_path: Path) -> None:
    kind = Type[name]
    state = llama.state_dict()
    replaced = {}
    if name.endswith("K"):  # the library cannot write these: random blocks of the right shape
        block, width = QUANTISED[name][2], gguf.GGML_QUANT_SIZES[kind][1]
        for tensor, values in state.items():
            if values.ndim == 2:
                raw = QUANTISED[name][0](values.numel() // block)
                replaced[gguf_files.gguf_name(tensor)] = raw.reshape(values.shape[0], values.shape[1] // block * width)
    path = gguf_files.write(tmp_path / "m.gguf", llama, kind=kind, replaced=replaced)
    checkpoint = load_checkpoint(path)
    assert checkpoint.format == "gguf" and list(checkpoint.tensors) == list(checkpoint.config.tensor_shapes())
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    for tensor, shape in checkpoint.config.tensor_shapes().items():
        loaded = checkpoint.tensors[tensor]
        assert loaded.shape == shape and loaded.dtype == (plain if len(shape) == 2 else torch.float32), tensor
        target = gguf_files.gguf_name(tensor)
        if len(shape) == 1 or name == "F32":
            assert torch.equal(loaded, state[tensor]), tensor
        elif target in replaced:
            if "q_proj" not in tensor and "k_proj" not in tensor:
                assert np.array_equal(loaded.numpy(), gguf.quants.dequantize(replaced[target], kind)), tensor
        else:  # what rounding to this type does to the original; its rows are quantised one by one, in whatever order
            rounded = gguf.quants.dequantize(gguf.quants.quantize(state[tensor].numpy(), kind), kind)
            assert np.array_equal(loaded.float().numpy(), rounded), tensor


@pytest.mark.parametrize(
    "family", [name for name in tiny.FAMILIES if name not in ("mistral", "qwen2-window", "llama3", "llama-linear")]
)
def test_every_family(family: str, tmp_path: Path) -> None:
    made = tiny.model(family)
    checkpoint = load_checkpoint(gguf_files.write(tmp_path / "m.gguf", made))
    state = made.state_dict()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name
    assert set(state) - set(checkpoint.tensors) <= {"lm_head.weight"}
    config = checkpoint.config
    assert config.rms_norm_eps == pytest.approx(1e-5) and config.num_kv_heads == 2
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert config.tie_word_embeddings == made.config.tie_word_embeddings


def test_directory_with_one_gguf_file(llama: Any, tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "a.gguf", llama)
    assert load_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    gguf_files.write(tmp_path / "b.gguf", llama)
    with pytest.raises(ValueError, match=r"several GGUF files, name one: a.gguf, b.gguf"):
        load_checkpoint(tmp_path)


def test_sliding_window_and_linear_scaling(llama: Any, tmp_path: Path) -> None:
    extra = {"llama.attention.sliding_window": 9, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = load_checkpoint(gguf_files.write(tmp_path / "m.gguf", llama, metadata=extra)).config
    assert config.sliding_windows == (9,) and config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_llama3_scaling_comes_as_factors(tmp_path: Path) -> None:
    made = tiny.model("llama3", head_dim=64)
    frequencies = made.model.rotary_emb.inv_freq
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    path = gguf_files.write(tmp_path / "m.gguf", made, replaced={"rope_freqs.weight": (plain / frequencies).numpy()})
    torch.testing.assert_close(rope_frequencies(load_checkpoint(path).config), frequencies, rtol=1e-6, atol=0)
    bad = gguf_files.write(tmp_path / "bad.gguf", made, replaced={"rope_freqs.weight": np.ones(31, np.float32)})
    with pytest.raises(ValueError, match=r"bad.gguf: tensor 'rope_freqs.weight' has shape \[31\], expected \[32\]"):
        load_checkpoint(bad)


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -1.0])
def test_rope_factors_must_be_positive_numbers(factor: float, llama: Any, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", llama, replaced={"rope_freqs.weight": np.full(32, factor, np.float32)})
    with pytest.raises(ValueError, match=r"tensor 'rope_freqs.weight' must hold finite numbers above 0"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, r"general.architecture must be one of .*got 'gpt2'"),
        ({"llama.expert_count": 8}, r"llama.expert_count is 8: mixtures of experts are not supported"),
        ({"llama.block_count": None}, r"num_hidden_layers must be an integer"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope_type must be one of .*got 'yarn'"),
        ({"llama.rope.dimension_count": 32}, r"llama.rope.dimension_count must be the head size 64, got 32"),
        ({"llama.attention.head_count_kv": [1, 2]}, r"num_key_value_heads must be an integer"),
        ({"general.alignment": 24}, r"general.alignment must be a power of two, got 24"),
    ],
)  # fmt: skip
def test_metadata_that_is_not_supported(metadata: dict[str, Any], message: str, llama: Any, tmp_path: Path) -> None:
    if "general.architecture" in metadata:
        path = gguf_files.write(tmp_path / "m.gguf", llama)
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gpt2 ", 1))
        message = message.replace("'gpt2'", "'gpt2 '")
    else:
        path = gguf_files.write(tmp_path / "m.gguf", llama, metadata=metadata)
    with pytest.raises(ValueError, match=rf"m.gguf: .*{message}"):
        load_checkpoint(path)


def test_tensor_that_is_missing_unknown_or_of_another_shape(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, llama, replaced={"blk.0.ffn_up.weight": None})
    with pytest.raises(ValueError, match=rf"m.gguf: tensor '{UP}' missing"):
        load_checkpoint(path)
    gguf_files.write(path, llama, replaced={"blk.0.ffn_up.weight": np.zeros((255, 256), np.float32)})
    with pytest.raises(
        ValueError, match=r"m.gguf: tensor 'blk.0.ffn_up.weight' has shape \[255, 256\], but .* asks for \[256, 256\]"
    ):
        load_checkpoint(path)
    gguf_files.write(path, llama, replaced={"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)})
    with pytest.raises(ValueError, match=r"m.gguf: tensor 'blk.0.ffn_gate_inp.weight' is not known in a llama model"):
        load_checkpoint(path)
    gguf_files.write(path, llama, replaced={"blk.1.ffn_up.weight": np.zeros((256, 256), np.float32)})
    with pytest.raises(ValueError, match=r"m.gguf: tensor 'blk.1.ffn_up.weight' has no place"):
        load_checkpoint(path)


def test_tensor_type_that_is_not_supported(llama: Any, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", llama, kind=Type.Q5_0)
    with pytest.raises(
        ValueError, match=r"m.gguf: tensor '[\w.]+' has type Q5_0, which is not supported; supported: BF16, .*Q8_0"
    ):
        load_checkpoint(path)


def test_truncated_file(llama: Any, tmp_path: Path) -> None:
    content = gguf_files.write(tmp_path / "whole.gguf", llama).read_bytes()
    path = tmp_path / "m.gguf"
    for size in (0, 3, 10, 24, 100, 1000, len(content) // 2, len(content) - 200):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"m.gguf: "):
            load_checkpoint(path)
    with pytest.raises(ValueError, match=r"tensor '[\w.]+' ends at byte \d+, but the file has \d+: truncated or damaged"):
        load_checkpoint(path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, message in ((b"x" * 100, "not a GGUF file"), (b"GGUF" + bytes([0, 0, 0, 3]) + bytes(100), "GGUF version")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"m.gguf: {message}"):
            load_checkpoint(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole GGUF file, as small as can be, so that random damage often meets its header."""
    made = tiny.model("llama", num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8, num_attention_heads=2)
    return gguf_files.write(tmp_path_factory.mktemp("small") / "m.gguf", made).read_bytes()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_a_value_error_or_harmless(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Random bytes, huge numbers and cuts: an error that names the file, or tensors of the right shapes; never much memory."""
    content = bytearray(small)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(content) - 8))
        content[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        if data.draw(st.booleans()):
            content[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, b"\xff\xff\xff\x7f\0\0\0\0", bytes(8)]))
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 100]))])
    tracemalloc.start()
    try:
        checkpoint = load_checkpoint(path)
        for name, shape in checkpoint.config.tensor_shapes().items():
            assert tuple(checkpoint.tensors[name].shape) == shape
    except ValueError as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 10_000_000


def test_huge_counts_take_no_memory(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for at in (8, 16):  # number of tensors, of metadata values
        for count in (1 << 63, 1 << 32, 100_000):
            content = bytearray(small)
            content[at : at + 8] = count.to_bytes(8, "little")
            path.write_bytes(content)
            tracemalloc.start()
            with pytest.raises(ValueError, match=r"m.gguf: "):
                GGUFFile(path)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
            tracemalloc.stop()


@pytest.mark.model
@pytest.mark.long
def test_the_default_model_is_what_transformers_reads(model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    checkpoint = load_checkpoint(model_path)
    state = theirs.state_dict()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name].float()), name
    assert checkpoint.config.num_parameters() == sum(parameter.numel() for parameter in theirs.parameters()) == 134_515_008
    assert (checkpoint.config.num_layers, checkpoint.config.num_kv_heads, checkpoint.config.head_dim) == (30, 3, 64)
