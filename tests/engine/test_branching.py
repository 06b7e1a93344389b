"""Branches: another token at some position, all else as it was."""

import random
from typing import Any

import pytest

from engine import SamplingParams
from engine.branching import MAX_REMEMBERED
from engine.events.types import PrefixLookup, RequestBranched
from tests.engine.engines import Checked, tiny_engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, presence_penalty=0.8, frequency_penalty=0.3)


def prompt(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def finish(checked: Checked) -> dict[str, Any]:
    return checked.run()


def test_a_greedy_branch_is_what_the_prefix_gives():
    engine = tiny_engine()
    checked = Checked(engine)
    source = engine.add_request(prompt(0), GREEDY)
    first = finish(checked)[source]
    branch = engine.branch(source, 9 + 5, 77)
    output = finish(checked)[branch]
    forced = [*prompt(0), *first.token_ids[:5], 77]
    want = tiny_engine().generate([forced], GREEDY)[0]
    assert output.token_ids == [*first.token_ids[:5], 77, *want.token_ids]  # max_tokens counts from the forced token on
    assert output.prompt_token_ids == prompt(0)
    (event,) = [e for e in checked.events if isinstance(e, RequestBranched)]
    assert (event.request_id, event.source_id, event.position, event.token_id, event.source_token_id) == (
        branch, source, 14, 77, first.token_ids[5],
    )  # fmt: skip
    assert event.output_token_ids == [*first.token_ids[:5], 77]
    view = checked.state.requests[branch]
    assert (view.branched_from, view.branched_at) == (source, 14) and view.output_token_ids == output.token_ids


def test_its_prefix_comes_from_the_cache():
    engine = tiny_engine(block_size=4)
    checked = Checked(engine)
    source = engine.add_request(prompt(0), GREEDY)
    finish(checked)
    branch = engine.branch(source, 9 + 6, 77)
    finish(checked)
    lookup = next(e for e in checked.events if isinstance(e, PrefixLookup) and e.request_id == branch)
    assert (lookup.num_tokens, lookup.num_hit_tokens) == (16, 12)  # the block of the forced token is its own


def test_the_same_token_gives_the_same_text():
    """Penalties see the output before the position as output, and the draws are those of its positions: nothing else differs."""
    engine = tiny_engine()
    for n, index in ((1, 0), (3, 2)):
        source = engine.generate([prompt(1)], DRAWN.changed(n=n))[0]
        name = source.request_id + (f"#{index}" if index else "")
        whole = source.outputs[index].token_ids
        for at in (0, 1, 6, 11):
            branch = engine.branch(name, 9 + at, whole[at])
            done = {}
            while engine.has_unfinished():
                done |= {o.request_id: o.request for o in engine.step() if o.request is not None}
            assert done[branch].token_ids[:12] == whole, (n, at)


def test_from_a_running_request_which_goes_on():
    engine = tiny_engine()
    checked = Checked(engine)
    source = engine.add_request(prompt(2), GREEDY)
    for _ in range(6):
        checked.step()
    branch = engine.branch(source, 9 + 2, 33)
    done = finish(checked)
    assert done[source].token_ids == tiny_engine().generate([prompt(2)], GREEDY)[0].token_ids
    want = tiny_engine().generate([[*prompt(2), *done[source].token_ids[:2], 33]], GREEDY)[0].token_ids
    assert done[branch].token_ids == [*done[source].token_ids[:2], 33, *want]


def test_in_the_prompt_it_is_another_prompt():
    engine = tiny_engine()
    checked = Checked(engine)
    source = engine.add_request(prompt(3), GREEDY)
    finish(checked)
    branch = engine.branch(source, 4, 99)
    output = finish(checked)[branch]
    assert output.prompt_token_ids == [*prompt(3)[:4], 99]
    assert output.token_ids == tiny_engine().generate([[*prompt(3)[:4], 99]], GREEDY)[0].token_ids


def test_a_branch_of_a_branch_and_of_a_beam():
    engine = tiny_engine()
    checked = Checked(engine)
    source = engine.add_request(prompt(0), SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=8, ignore_eos=True))
    beams = finish(checked)[source]
    branch = engine.branch(f"{source}#1", 9 + 3, 50)
    first = finish(checked)[branch]
    assert first.token_ids[:4] == [*beams.outputs[1].token_ids[:3], 50] and len(first.token_ids) == 12
    again = engine.branch(branch, 9 + 5, 60)
    assert finish(checked)[again].token_ids[:6] == [*first.token_ids[:5], 60]


def test_pieces_join_to_the_text():
    engine = tiny_engine()
    source = engine.generate([prompt(4)], DRAWN)[0]
    branch = engine.branch(source.request_id, 9 + 4, 65)
    text, tokens, output = "", [], None
    while engine.has_unfinished():
        for o in engine.step():
            text += o.new_text
            tokens += o.new_token_ids
            output = o.request or output
    assert output is not None and output.request_id == branch
    assert (text, tokens) == (output.text, output.token_ids)


def test_logprobs_of_a_branch():
    engine = tiny_engine()
    source = engine.generate([prompt(4)], DRAWN.changed(logprobs=2))[0]
    engine.branch(source.request_id, 9 + 4, 65)
    output = engine.step()
    while engine.has_unfinished():
        output = engine.step()
    request = output[-1].request
    assert [t.token_id for t in request.logprobs] == request.token_ids
    assert request.logprobs[:4] == source.logprobs[:4]
    assert request.logprobs[4].logprob != request.logprobs[4].logprob  # NaN: nobody computed it
    assert all(t.logprob <= 0 for t in request.logprobs[5:])


def test_a_preempted_branch_keeps_its_output():
    engine = tiny_engine(num_kv_blocks=12, block_size=4, max_num_seqs=4)
    checked = Checked(engine)
    source = engine.add_request(prompt(5), GREEDY)
    first = finish(checked)[source]
    engine.add_request(prompt(6, 12), GREEDY.changed(max_tokens=18))
    branch = engine.branch(source, 9 + 8, 44)
    output = finish(checked)[branch]
    want = tiny_engine().generate([[*prompt(5), *first.token_ids[:8], 44]], GREEDY)[0].token_ids
    assert output.token_ids == [*first.token_ids[:8], 44, *want]
    assert checked.state.requests[branch].num_preemptions + checked.state.requests["req-1"].num_preemptions >= 1


@pytest.mark.parametrize(("position", "token", "message"), [
    (21, 5, r"position must be an integer in \[0, 20\] to branch from req-0, got 21"), (-1, 5, "position must be"), (1.0, 5, "position must be"),
    (True, 5, "position must be"), (None, 5, "position must be"), (10, 320, r"token_id must be an integer in \[0, 319\]"), (10, -1, "token_id must be"),
    (10, "a", "token_id must be"),
])  # fmt: skip
def test_a_position_or_token_that_is_not_there(position, token, message):
    engine = tiny_engine()
    engine.generate([prompt(0)], GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.branch("req-0", position, token)
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_what_else_cannot_be_branched():
    engine = tiny_engine()
    params = GREEDY.changed(ignore_eos=False, stop="GG")
    engine.generate([prompt(0)], params)
    tokens = engine.tokenizer.encode("G")
    with pytest.raises(ValueError, match="token 2 at position 12 ends the text"):
        engine.branch("req-0", 12, 2)
    first = engine.branch("req-0", 12, tokens[0])
    with pytest.raises(ValueError, match="ends the text"):
        engine.branch(first, 12, 2)
    for bad in ("nobody", "req-0#1", "", 5, None):
        with pytest.raises(ValueError, match="request"):
            engine.branch(bad, 3, 5)
    with pytest.raises(ValueError, match="one sequence"):
        engine.branch("req-0", 12, 9, GREEDY.changed(n=2))
    with pytest.raises(ValueError, match="one sequence"):
        engine.branch("req-0", 12, 9, GREEDY.changed(beam_width=2))
    with pytest.raises(ValueError, match="SamplingParams"):
        engine.branch("req-0", 12, 9, {"temperature": 0})
    with pytest.raises(ValueError, match="branch_id must be unused"):
        engine.branch("req-0", 12, 9, branch_id=first)


def test_no_room_behind_the_position():
    engine = tiny_engine(max_model_len=20)
    output = engine.generate([prompt(0)], GREEDY.changed(max_tokens=50))[0]
    assert len(output.token_ids) == 11
    with pytest.raises(ValueError, match="position 19 is too late for a branch: max_model_len"):
        engine.branch(output.request_id, 19, 5)
    engine.branch(output.request_id, 18, 5)
    assert engine.step()


def test_only_the_last_that_ended_are_remembered():
    engine = tiny_engine()
    for _ in range(MAX_REMEMBERED + 1):
        engine.abort(engine.add_request(prompt(0, 3), GREEDY))
    engine.take_outputs()
    with pytest.raises(ValueError, match=f"no request 'req-0' to branch from; the last {MAX_REMEMBERED}"):
        engine.branch("req-0", 1, 5)
    engine.branch("req-1", 1, 5)
