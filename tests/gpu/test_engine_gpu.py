"""The engine on CUDA, with its kernels and its graphs: golden tokens are those of the torch backend on the CPU in float32."""

from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.request import SamplingParams
from tests.gpu.models import best_parts, engine_config, random_parts

pytestmark = pytest.mark.gpu
TIE = 0.02  # of the two largest logits: below it another order of adding up may turn the choice
PROMPTS = [[7 * i % 290 + 3 for i in range(61)], [5, 6, 7, 8] * 7, [9], [11 * i % 290 + 3 for i in range(130)]]
CASES: list[dict[str, Any]] = [
    {},
    {"enforce_eager": True},
    {"max_num_batched_tokens": 24, "block_size": 12},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8"},
    {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
    {"speculative": {"method": "lookahead", "num_speculative_tokens": 3}},
    {"num_kv_blocks": 24, "block_size": 8},  # preempted on the way
]


def tokens(
    parts: Any, device: str, options: dict[str, Any], count: int = 24
) -> tuple[dict[str, list[int]], dict[str, list[float]], Engine]:
    backend = "torch" if device == "cpu" else "triton"
    engine = Engine(engine_config(device=device, dtype="float32", attention_backend=backend, **options), parts=parts)
    events: list[Any] = []
    engine.recorder.attach(events.append)
    engine.watch("tokens", top=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), request_id=f"r{i}")
    done: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.request is not None:
                done[output.request_id] = list(output.request.outputs[0].token_ids)
    engine.check_integrity()
    margins: dict[str, list[float]] = {}
    for e in events:
        if type(e).__name__ == "TokenSampled":
            margins.setdefault(e.request_id, []).append(e.top[0].logprob - e.top[1].logprob)
    return done, margins, engine


def assert_equal(got: dict[str, list[int]], want: dict[str, list[int]], margins: dict[str, list[float]]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        differ = [i for i, (a, b) in enumerate(zip(got[name], want[name], strict=True)) if a != b]
        assert not differ or margins[name][differ[0]] < TIE, (name, got[name], want[name], margins[name])


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())) or "plain")
@pytest.mark.parametrize("shape", ["tiny", "tiny-window"])
def test_golden_tokens(shape: str, options: dict[str, Any]) -> None:
    want, margins, _ = tokens(random_parts(shape, "cpu", "float32", "torch"), "cpu", options)
    got, _, engine = tokens(random_parts(shape, "cuda", "float32", "triton"), "cuda", options)
    assert engine.runner.attention.name == "triton"
    assert_equal(got, want, margins)
    graphs = engine.runner.graphs
    if options.get("enforce_eager"):
        assert graphs is None
    else:
        assert graphs is not None and not graphs.failed
        assert len(graphs) > 0 or "speculative" in options


@pytest.mark.parametrize(
    "options", [{"quantization": "int4", "quantization_group_size": 32}, {"quantization": "nf4"}, {"quantization": "int8"}]
)
def test_weights_in_few_bits_by_the_kernel_and_under_graphs(options: dict[str, Any]) -> None:
    parts = random_parts("tiny", "cuda", "float32", "triton")
    graph, margins, engine = tokens(parts, "cuda", options)
    assert engine.runner.graphs is not None and not engine.runner.graphs.failed and len(engine.runner.graphs)
    assert set(parts.weights.forms) == {"dequant_kernel"}
    eager, _, _ = tokens(random_parts("tiny", "cuda", "float32", "triton"), "cuda", {**options, "enforce_eager": True})
    assert_equal(graph, eager, margins)


def test_the_default_models_shape() -> None:
    want, margins, _ = tokens(best_parts("cpu", "float32", "torch"), "cpu", {}, 12)
    got, _, _ = tokens(best_parts("cuda", "float32", "triton"), "cuda", {}, 12)
    assert_equal(got, want, margins)


def test_a_step_is_traced_with_clocks() -> None:
    engine = Engine(engine_config(device="cuda", dtype="bfloat16"), parts=random_parts("tiny", "cuda", "bfloat16"))
    engine.add_request(PROMPTS[3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    from engine.events.attention import records_of

    chunk, decode = engine.trace_attention(0), engine.trace_attention(1)
    for event, kernel in ((chunk, "flash_attention"), (decode, "paged_decode")):
        records = records_of(event)
        assert event.kernel == kernel and event.where == "cuda" and not event.dropped
        assert (records["sm"] >= 0).all() and (records["clock_end"] > records["clock_start"]).all()
        assert event.max_error < 0.02 * event.max_output and event.max_difference < 0.02 * event.max_output
        assert (event.bytes_loaded, event.bytes_stored) == (event.formula_loaded, event.formula_stored)
        assert event.kernel_ms > 0 and event.untraced_ms > 0
    assert torch.cuda.is_available()
