"""Layer skipping against the module that is trained, and the untrained exit against transformers."""

import math

import pytest
import torch

from engine.speculation.layer_skip import LayerSkipDrafter
from tests.engine.engines import tiny_parts
from tests.engine.speculation.drafting import EXIT, Bench, Oracle


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("layer_skip")


def test_chains_while_drafts_are_accepted_and_rejected(oracle):
    bench = Bench("layer_skip")
    requests = [bench.request(f"r{i}", bench.tokens(n)) for i, n in enumerate((1, 2, 9, 40))]
    for request in requests:
        bench.prefill(request)
    _, made = tiny_parts()
    for step in range(4):
        drafts = bench.propose(requests, [4, 1, 5, 3])
        for request, draft, count in zip(requests, drafts, (4, 1, 5, 3)):
            assert len(draft) == count and draft.is_chain
            oracle.check(request.token_ids, draft)
        kept = [min((step + i) % 5, len(d)) for i, d in enumerate(drafts)]
        bench.decide(requests, drafts, [range(n) for n in kept], bench.tokens(4))
    # The KV that drafts went over is the target's own, and still right.
    (draft,) = bench.propose(requests[3:])
    bench.decide(requests[3:], [draft], [[]], [5])
    logits = bench.runner.run([_decode(bench, requests[3])])
    torch.testing.assert_close(logits[0], made.logits(requests[3].token_ids)[-1], atol=1e-4, rtol=0)


def _decode(bench, request):
    from engine.runner import Scheduled

    bench.room(request, request.num_tokens)
    return Scheduled(request, request.num_tokens - 1, 1, True)


@pytest.mark.parametrize("exit_layer", [1, 2, None])
def test_the_untrained_exit_reads_the_targets_own_norm_and_head(exit_layer):
    bench = Bench("layer_skip", trained_exit=False, exit_layer=exit_layer)
    _, made = tiny_parts()
    request = bench.request("r", bench.tokens(13))
    bench.prefill(request)
    (draft,) = bench.propose([request], 3)
    for i, token in enumerate(draft.token_ids):
        tokens = request.token_ids + draft.token_ids[:i]
        with torch.no_grad():
            states = made.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
            logits = made.model.lm_head(made.model.model.norm(states[exit_layer or 1][0, -1]))
        assert token == int(logits.argmax())
        assert abs(float(logits.softmax(-1)[token]) - draft.probs[i]) < 1e-4


def test_an_exit_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"exit_layer must lie in \[1, 2\] for this checkpoint, got 3"):
        Bench("layer_skip", exit_layer=3)
    with pytest.raises(ValueError, match=f"exit_layer must be {EXIT}, where the exit of"):
        Bench("layer_skip", exit_layer=1)
    drafter = Bench("layer_skip", exit_layer=EXIT).drafter
    assert isinstance(drafter, LayerSkipDrafter) and drafter.exit_layer == EXIT


def test_nan_harms_the_one_alone(oracle):
    bench = Bench("layer_skip")
    requests = [bench.request(f"r{i}", bench.tokens(6)) for i in range(2)]
    for request in requests:
        bench.prefill(request)
    bench.kv.layers[0][requests[0].block_ids[0] * 4] = math.nan
    drafts = bench.propose(requests, 2)
    assert drafts[0].failure == "no draft: the logits contain NaN"
    oracle.check(requests[1].token_ids, drafts[1])
