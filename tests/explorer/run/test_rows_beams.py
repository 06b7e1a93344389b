"""Tokens on the screen of beams and branches: the rows against the sequences that an engine really had."""

import math
import random

import pytest

from engine import SamplingParams
from explorer.run.rows import RunRows
from tests.engine.engines import tiny_engine


def prompt(seed: int, length: int = 7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


@pytest.mark.parametrize("seed", range(3))
def test_every_beam_shows_the_tokens_it_has(seed):
    """After every step, told as a screen is told: what is new, or everything again where a beam took another one's place."""
    engine, rows = tiny_engine(), RunRows()
    engine.recorder.attach(lambda event: rows.feed([event]))
    engine.watch("tokens", top=0)
    request_id = engine.add_request(
        prompt(seed), SamplingParams(temperature=0, beam_width=4, n=2, max_tokens=12, stop_token_ids=(115, 43))
    )
    screen: dict[str, list] = {}
    retold, output = 0, None
    while engine.has_unfinished():
        for o in engine.step():
            output = o.request or output
        live = engine._requests.get(request_id, [])
        for row in rows.requests.values():
            if row.request_id in rows.retold:
                screen[row.request_id] = list(row.tokens)
            else:
                screen.setdefault(row.request_id, []).extend(rows.new_tokens.get(row.request_id, []))
        retold += len(rows.retold)
        rows.taken()
        for beam in live:
            assert [t.token_id for t in screen[beam.request_id]] == beam.output_token_ids
            assert [t.position for t in screen[beam.request_id]] == list(range(7, beam.num_tokens))
    assert retold > 2 and output is not None
    for index, name in enumerate((request_id, f"{request_id}#1")):
        assert [t.token_id for t in screen[name]] == output.outputs[index].token_ids
        end = len(screen[name]) - (output.outputs[index].finish_reason == "stop")  # no beam ever held an end token
        assert [math.isfinite(t.logprob) for t in screen[name][: end - 1]] == [True] * (end - 1)


def test_a_branch_shows_what_it_kept():
    engine, rows = tiny_engine(), RunRows()
    engine.recorder.attach(lambda event: rows.feed([event]))
    engine.watch("tokens", top=0)
    source = engine.generate([prompt(1)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    branch = engine.branch(source.request_id, 7 + 3, 70)
    assert [t.token_id for t in rows.requests[branch].tokens] == [*source.token_ids[:3], 70] and branch in rows.retold
    assert [math.isfinite(t.logprob) for t in rows.requests[branch].tokens] == [True, True, True, False]
    while engine.has_unfinished():
        engine.step()
    assert len(rows.requests[branch].tokens) == 4 + 8 and rows.requests[branch].before == 0
