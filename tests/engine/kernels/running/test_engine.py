"""The whole engine with our kernels: its tokens are those of the torch backend on the CPU, whatever else is switched on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.engine import Engine
from engine.model import llama, low_bit
from engine.request import SamplingParams
from tests.gpu.models import engine_config, random_parts

TIE = 0.02  # of the two largest logits, in float32: below it another order of adding up may turn the choice
PROMPTS = [[7 * i % 290 + 3 for i in range(18)], [5, 6, 7, 8] * 3]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {}),
    ("tiny", {"kv_cache_dtype": "int8", "speculative": {"method": "ngram", "num_speculative_tokens": 3}}),
    ("tiny-window", {"block_size": 12, "max_num_batched_tokens": 9}),
    ("tiny-window", {"kv_cache_dtype": "fp8"}),
    ("tiny-qk-norm", {"quantization": "int4", "quantization_group_size": 32}),
]


def run(shape: str, device: str, backend: str, options: dict[str, Any]) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Tokens, and by how much each was ahead."""
    parts = random_parts(shape, device, "float32", backend)
    config = engine_config(device=device, dtype="float32", attention_backend=backend, **options)
    engine = Engine(config, parts=parts)
    assert engine.runner.attention.name == backend
    events: list[Any] = []
    engine.recorder.attach(events.append)
    engine.watch("tokens", top=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), request_id=f"r{i}")
    done: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.request is not None:
                done[output.request_id] = list(output.request.outputs[0].token_ids)
    engine.check_integrity()
    margins: dict[str, list[float]] = {}
    for event in events:
        if type(event).__name__ == "TokenSampled":
            margins.setdefault(event.request_id, []).append(event.top[0].logprob - event.top[1].logprob)
    return done, margins


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``run`` in plain torch alone: no kernel of ours anywhere, and no weight in few bits by torch's kernels, which round to bfloat16."""

    def plain(shape: str, options: dict[str, Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(llama, "run_on", lambda device: False)
            patch.setattr(low_bit, "run_on", lambda device: False)
            patch.setattr(low_bit, "int4_group", lambda quantized: 0)
            return run(shape, "cpu", "torch", options)

    yield plain


@pytest.mark.parametrize(("shape", "options"), CASES, ids=[f"{s}-{'-'.join(o) or 'plain'}" for s, o in CASES])
def test_tokens_are_those_of_the_torch_backend(
    shape: str, options: dict[str, Any], device: str, reference: Callable[..., Any]
) -> None:
    want, margins = reference(shape, options)
    got, _ = run(shape, device, "triton", options)
    for name in want:
        differ = [i for i, (a, b) in enumerate(zip(got[name], want[name], strict=True)) if a != b]
        if differ:
            assert margins[name][differ[0]] < TIE, (name, got[name], want[name], margins[name])
