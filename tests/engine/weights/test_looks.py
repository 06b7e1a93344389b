"""What is observed of weights and KV: each number against a plain computation of its own."""

import math

import pytest
import torch

from engine.events.quantization import LayerQuantized, MatrixObserved, QualityMeasured, QuantizationProbed, WeightsChanged
from engine.loading import make_kv_cache, make_runner
from engine.quantization.methods import quantize
from engine.quantization.quality.forward import ModelLogits
from engine.quantization.quality.texts import calibration_tokens
from engine.weights.build import Source
from engine.weights.original import WINDOW, WINDOWS
from engine.weights.plan import MATRICES
from tests.engine.engines import tiny_parts
from tests.engine.greedy import GREEDY, prompt
from tests.engine.weights.test_change import observed, settle


def array(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).double()


@pytest.mark.parametrize("method", ["int8", "nf4", "int4", "int8_w8a8"])
def test_the_errors_of_every_matrix(make, parts, method):
    engine = make(quantization=method)
    events = observed(engine)
    assert [(e.layer, e.name) for e in events] == [(layer, name) for layer in range(3) for name in MATRICES]
    source = Source(parts.checkpoint.tensors)
    for e in events:
        # Stacked matrices have rows that know nothing of each other, so each can be rounded alone.
        original = source.matrix(e.layer, e.name)
        error = quantize(original, method).dequantize().double() - original.double()
        sqnr = 10 * math.log10(float(original.double().square().sum() / error.square().sum()))
        assert e.sqnr_db == pytest.approx(sqnr, abs=0.35 if method == "nf4" else 0.05), (
            e.layer,
            e.name,
        )  # NF4 rounds scales together
        assert e.max_error == pytest.approx(float(error.abs().max()), rel=0.1)
        assert sum(e.weight_counts) == sum(e.error_counts) == original.numel() == e.rows * e.columns
        assert 0 < e.output_error < 0.5 and e.method == method and e.form in parts.weights.forms
        if method != "nf4":  # its scales of scales are shared by the stacked matrices
            assert e.bits_per_weight == pytest.approx(quantize(original, method).bits_per_weight, rel=1e-6), (e.layer, e.name)


def test_weights_as_they_are_lose_nothing_in_float32(make):
    assert all(e.sqnr_db > 120 and e.method == "" and e.form == "plain" for e in observed(make()))


def test_whoever_watches_late_is_told_what_runs(make):
    engine = make(quantization="int4")
    with engine.record() as log:
        engine.watch("weights")
        told = [e for e in log if isinstance(e, WeightsChanged)]
        assert [e.method for e in told] == ["int4"] and told[0].group_size == 32
        engine.reconfigure(quantization="int8")
        settle(engine)
        engine.unwatch("weights")
    last = [e for e in log if isinstance(e, LayerQuantized)][-21:]
    assert {e.method for e in last} == {"int8"}


def test_a_matrix_and_its_inputs(make, parts):
    engine = make(quantization="int3")
    seen = engine.observe_matrix(1, "up_proj")
    original = Source(parts.checkpoint.tensors).matrix(1, "up_proj")
    assert isinstance(seen, MatrixObserved) and (seen.rows, seen.columns) == tuple(original.shape)
    weight = array(seen.weight, seen.dtype).view(original.shape)
    assert torch.allclose(weight, original.double(), rtol=1e-3)
    ran = array(seen.running, seen.running_dtype).view(original.shape)
    assert torch.allclose(ran, quantize(original, "int3").dequantize().double(), atol=2e-3 * float(original.abs().max()))
    # What comes into the layer, by transformers.
    length = min(WINDOW, parts.model_config.max_position_embeddings)
    windows = calibration_tokens(parts.tokenizer, length * WINDOWS, length, seed=1)
    model, found = tiny_parts("llama-bias")[1].model, []
    hook = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda _m, inputs: found.append(inputs[0].double()))
    with torch.no_grad():
        model(input_ids=torch.tensor(windows))
    hook.remove()
    x = found[0].flatten(0, 1)
    hessian = 2 * x.T @ x / len(x)
    got = array(seen.hessian, "float32").view(hessian.shape)
    # The text came through float16 on its way between the layers.
    assert float((got - hessian).norm() / hessian.norm()) < 2e-3 and seen.calibration_tokens == len(x)
    assert torch.allclose(array(seen.input_abs_max, "float32"), x.abs().amax(0), rtol=0.02)
    assert array(seen.inputs, "float16").numel() == seen.input_rows * seen.columns


def test_from_the_error_to_the_token(make, parts):
    engine = make()
    text = "The cat sat on the mat and looked at the river."
    with engine.record() as log:
        found = engine.probe_quantization(method="int2", group_size=16, only=["1", "2.down_proj"], text=text, probe_id="a")
    assert isinstance(found, QuantizationProbed) and [e.probe_id for e in log if isinstance(e, QuantizationProbed)] == ["a"]
    assert found.layer_errors[0] == 0 and found.layer_errors[1] > 0.01 and len(found.layer_errors) == 3
    ids = parts.tokenizer.encode(text)
    before = logits(engine, ids)
    other = make(quantization="int2", quantization_group_size=16, quantization_options={"only": ["1", "2.down_proj"]})
    after = logits(other, ids)
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(torch.tensor(found.kl).double(), kl, rtol=0.02, atol=1e-5)
    greedy = other.generate([ids], GREEDY.changed(max_tokens=24, ignore_eos=True))[0].token_ids
    assert found.continuation_changed == [parts.tokenizer.decode([t]) for t in greedy]
    at = found.positions[0]
    assert at == int(kl.argmax())
    shifted = {s.token_id: (s.before, s.after) for s in found.top}
    assert all(b == pytest.approx(float(p[at, t].exp()), rel=0.05, abs=1e-6) for t, (b, _) in shifted.items())
    source = Source(parts.checkpoint.tensors)
    taken = [(1, name) for name in MATRICES] + [(2, "down_proj")]
    changed = sum(int((quantize(w := source.matrix(*m), "int2", 16).dequantize() != w).sum()) for m in taken)
    assert found.changed_weights == changed


def logits(engine, ids):
    config = engine.config.changed(num_kv_blocks=32)
    return ModelLogits(make_runner(engine.parts, make_kv_cache(engine.parts, config), config))(ids).double()


@pytest.mark.parametrize(("options", "message"), [
    ({"method": "gptq"}, "without calibration"), ({"method": "int9"}, "int8_w8a8"), ({"method": "int4", "only": ["7"]}, "layers of 3"),
    ({"method": "int4", "text": "x" * 5000}, "tokens"), ({"method": "int4", "top_p": 0}, "top_p"),
    ({"method": "int4", "error_between": [2.0, 1.0]}, "low, high"),
])  # fmt: skip
def test_a_probe_that_cannot_be(make, options, message):
    with pytest.raises(ValueError, match=message):
        make().probe_quantization(**options)


def test_keys_and_values_by_channel(make, parts):
    engine = make()
    seen = engine.observe_kv(2)
    channels = parts.model_config.num_kv_heads * parts.model_config.head_dim
    assert len(seen.key_abs_max) == len(seen.value_abs_mean) == channels
    assert all(a >= b for a, b in zip(seen.key_abs_max, seen.key_abs_mean))
    assert 0 < seen.key_errors["int8"] < seen.key_errors["int4"] < 0.3 and 0 < seen.value_errors["int8"] < 0.02
    assert seen.bytes_per_token["int8"] < 0.4 * seen.bytes_per_token["auto"]
    for wrong in (-1, 3, True, "0"):
        with pytest.raises(ValueError, match="layer must be"):
            engine.observe_kv(wrong)
    with pytest.raises(ValueError, match="down_proj"):
        engine.observe_matrix(0, "gate")


def test_quality_is_measured_against_the_checkpoint(make):
    engine = make(max_model_len=256, num_kv_blocks=80)
    own = engine.measure_quality()
    assert isinstance(own, QualityMeasured) and own.kl_mean == 0 and own.top1_agreement == 1 and own.method == ""
    engine.reconfigure(quantization="int2")
    worse = engine.measure_quality()
    assert worse.kl_mean > 0.001 and worse.top1_agreement < 1 and worse.bits_per_weight < 5
    assert all(worse.perplexity[name] != own.perplexity[name] for name in own.perplexity) and worse.decode_tokens_per_s > 0


def test_studies_wait_for_their_turn_and_steps_go_on(make):
    engine = make()
    with engine.record() as log:
        engine.observe_matrix(0, "o_proj", wait=False)
        engine.observe_kv(1, wait=False)
        done = engine.generate([prompt(0, 8)], GREEDY)
        settle(engine)
    assert done[0].token_ids and [type(e).__name__ for e in log if "Observed" in type(e).__name__] == [
        "MatrixObserved",
        "KvObserved",
    ]
