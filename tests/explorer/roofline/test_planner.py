"""The planner's tab: pasted configurations, good and bad, and the plan beside what an engine holds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.hardware.gpus import gpu
from explorer.roofline.planner import LONGEST, Model, checks, pasted, planned, running_work
from explorer.roofline.planning import checks_html, plan_html, pool_html, times_html
from explorer.roofline.rules import rules_html
from explorer.roofline.whatif import workload
from tests.engine.hardware.facts import LLAMA3_8B
from tests.explorer.roofline.made import MODEL, memory, started

LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_pasted_config_is_that_model() -> None:
    model = pasted(json.dumps(LLAMA3))
    assert model.facts["num_parameters"] == LLAMA3_8B["num_parameters"] == 8_030_261_248
    assert (model.dtype, model.bits, model.name) == ("bfloat16", 16, "pasted config.json (llama)")
    assert pasted(json.dumps({**LLAMA3, "torch_dtype": "float32", "_name_or_path": "x/<b>"})).bits == 32
    found = planned(model, gpu("a100-80gb"), workload(batch=1, context=4096, bits=0, running=model.bits, dtype=model.dtype))
    assert found.weights.value == 2 * 8_030_261_248 and found.kv_cache.value == 4096 * 128 * 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "This is not JSON"), ("hello", "This is not JSON"), ("[" * 5000, "This is not JSON"), ("[]", "expected a JSON object"),
        ("3", "expected a JSON object"), ("null", "expected a JSON object"), ("{}", "model_type must be one of"),
        (json.dumps({**LLAMA3, "model_type": "gpt2"}), "model_type must be one of .* got 'gpt2'"),
        (json.dumps({**LLAMA3, "hidden_size": -3}), "hidden_size must be an integer"),
        (json.dumps({**LLAMA3, "num_key_value_heads": 5}), "num_key_value_heads must be a divisor"),
        (json.dumps({k: v for k, v in LLAMA3.items() if k != "vocab_size"}), "vocab_size must be"),
        (json.dumps({**LLAMA3, "hidden_act": "gelu"}), "hidden_act must be 'silu'"), ("x" * (LONGEST + 1), "a few thousand"),
        (json.dumps({**LLAMA3, "num_hidden_layers": "32"}), "num_hidden_layers must be"), ('{"model_type": NaN}', "model_type must be"),
    ],
)  # fmt: skip
def test_what_is_no_config_gets_one_clear_message(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        pasted(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
)


@given(
    st.dictionaries(
        st.sampled_from([*LLAMA3, "head_dim", "rope_scaling", "tie_word_embeddings", "_name_or_path", "dtype"]), _VALUES
    )
)
def test_whatever_stands_in_a_config_is_a_model_or_a_value_error(changes: dict[str, Any]) -> None:
    try:
        model = pasted(json.dumps({**LLAMA3, **changes}))
    except ValueError:
        return
    assert model.facts["num_parameters"] > 0 and model.name and model.bits in (16, 32)


def test_plan_beside_allocation() -> None:
    by_name = {c.name: c for c in checks(MODEL, memory())}
    assert by_name["weights"].ratio == by_name["KV pool"].ratio == by_name["logits"].ratio == 1
    assert by_name["activations of 256 tokens"].planned == 256 * (2 * 576 + 3 * 1536) * 4
    assert by_name["activations of 256 tokens"].ratio == pytest.approx(1.011, abs=1e-3)
    linear = 106_168_320 + 30 * 4 * (2 * 576 + 2 * 192 + 2 * 1536 + 576)  # codes, and a float32 scale a row
    rounded = checks(MODEL, memory(method="int8", linear_bytes=linear))
    assert rounded[0].ratio == pytest.approx(1, rel=0.01) and rounded[0].why
    nothing = checks(MODEL, memory(activation_bytes=0))
    assert nothing[2].ratio is None and "–" in checks_html(nothing, memory())
    with pytest.raises(ValueError, match="lack"):
        checks({"hidden_size": 3}, memory())


def test_running_work_of_methods() -> None:
    assert running_work(memory(method="int4", group_size=32)).bits_per_weight == 5
    assert running_work(memory(method="int8")).bits_per_weight == pytest.approx(8, abs=0.01)
    assert running_work(memory()).bits_per_weight == 32


def test_the_plan_in_words() -> None:
    model = Model("<b>m</b>", MODEL, "float32", 32)
    work = workload(batch=1, context=1024, bits=0, running=32, dtype="float32")
    body = plan_html(model, planned(model, gpu("h100-sxm"), work), gpu("h100-sxm"), 1)
    assert "&lt;b&gt;m&lt;/b&gt; fits: 581 MiB" in body and "<b>m</b>" not in body and "80 GB of H100 SXM × 0.9" in body
    assert "made for 8,192 tokens" in body and "1 request × 1,024 tokens × 46,080 B" in body
    big = Model("big", LLAMA3_8B, "bfloat16", 16)
    work = workload(batch=1024, context=4096, bits=0, running=16, dtype="bfloat16")
    body = plan_html(big, planned(big, gpu("h100-sxm"), work), gpu("h100-sxm"), 1)
    assert "does not fit" in body and "At this context" in body
    tiny = plan_html(
        big, planned(big, gpu("l4"), workload(batch=1, context=4096, bits=32, running=16, dtype="bfloat16")), gpu("l4"), 1
    )
    assert "The weights alone are too large" in tiny
    said = times_html(planned(big, gpu("h100-sxm"), workload(batch=8, context=1024, bits=0, running=16, dtype="bfloat16")), 8)
    assert "max(" in said and "memory: moving" in said and "arithmetic: it takes" in said and "tokens/s for each request" in said


def test_pool_and_rules_in_words() -> None:
    assert "512 blocks × 737,280 B = 360 MiB planned, 360 MiB allocated" in pool_html(started(), 16, 512)
    from engine.hardware.planner import Workload
    from engine.hardware.rules import rules_of_thumb

    body = rules_html(rules_of_thumb(MODEL, Workload(context=1024, prompt=1024)))
    assert body.count("rf-rule") == 6 and "12 L d²" in body and "3.0 times too much" in body
