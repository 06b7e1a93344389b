"""A datastore against counting everything, its file against damage, and the text looked up first."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine import SamplingParams
from engine.events.types import DraftProposed
from engine.speculation.base import Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.datastore import END, LONGEST, Datastore, read_datastore, write_datastore
from engine.speculation.files import shipped_drafter
from engine.speculation.speculator import create_drafter
from tests.engine.engines import Checked, tiny_engine, tiny_parts
from tests.engine.speculation.drafting import drafter_file, folder
from tests.engine.test_engine import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [prompt(i, n, shared=min(n - 1, 9)) for i, n in enumerate((1, 3, 5, 11, 17, 40, 8))]


def store_of(texts) -> Datastore:
    tokens = [token for text in texts for token in [*text, END]][:-1]
    return Datastore(np.array(tokens, dtype=np.int32))


def counted(texts, context):
    """The token that most often follows the longest suffix, by looking everywhere."""
    for n in range(min(LONGEST, len(context)), 0, -1):
        wanted = list(context[-n:])
        counts = Counter(t[i + n] for t in texts for i in range(len(t) - n) if t[i : i + n] == wanted)
        if counts:
            token = max(counts, key=lambda t: (counts[t], -t))
            return token, counts[token] / (counts.total() + 1)
    return None


texts_of = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=6)


@given(texts_of, st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 8), st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=300, deadline=None)
def test_against_counting(texts, context, count, confidence):
    store = store_of(texts)
    tokens, shares = store.follow(context, count, confidence)
    want, seen, product = [], list(context), 1.0
    while len(want) < count and product >= confidence and (found := counted(texts, seen)):
        want.append(found)
        seen.append(found[0])
        product *= found[1]
    assert list(zip(tokens, shares, strict=True)) == want


def test_many_occurrences_are_sampled_over_all_of_them():
    texts = [[1, 2, 3]] * 700 + [[1, 2, 4]] * 1400
    token, share = store_of(texts).find([1, 2])
    assert token == 4 and abs(share - 2 / 3) < 0.02


def facts():
    parts, _ = tiny_parts()
    return {"config": parts.model_config, "target": "tiny", "target_sha256": parts.model_facts["sha256"]}


def read(path):
    parts, _ = tiny_parts()
    return read_datastore(path, parts.model_config, parts.model_facts["sha256"])


@pytest.fixture(scope="module")
def path():
    """Of what the tiny target writes after other prompts than those of the tests, and half of what it writes after those."""
    engine = tiny_engine()
    outputs = engine.generate([*PROMPTS, *[prompt(50 + i, 7) for i in range(10)]], PARAMS)
    made = folder() / "rest-tiny.safetensors"
    write_datastore(made, [o.token_ids for o in outputs[3:]], **facts(), card="a card")
    return made


def test_file(path, tmp_path):
    store = read(path)
    assert store.card == "a card" and (store.tokens == END).sum() == 13 and store.tokens.max() < 320
    for texts, message in (([], "needs text"), ([[]], "needs text"), ([[1, 320]], r"\[0, 320\)"), ([[-2]], r"\[0, 320\)")):
        with pytest.raises(ValueError, match=message):
            write_datastore(tmp_path / "a", texts, **facts())
    assert not list(tmp_path.iterdir())
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 5):
        (tmp_path / "b").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            read(tmp_path / "b")
    with pytest.raises(ValueError, match="no such datastore"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match="another target"):
        read(shipped_drafter("rest"))
    with pytest.raises(ValueError, match="of method 'eagle'"):
        read(drafter_file("eagle"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": torch.zeros(4)}, "must be int32"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int32)}, "one dimension"),
        ({"tokens": torch.zeros(0, dtype=torch.int32)}, "not empty"),
        ({"tokens": torch.full((3,), 320, dtype=torch.int32)}, r"\[0, 320\)"),
        ({"tokens": torch.full((3,), -5, dtype=torch.int32)}, r"\[0, 320\)"),
        ({"tokens": torch.zeros(3, dtype=torch.int32), "more": torch.zeros(1)}, "has one tensor"),
    ],
)
def test_a_file_with_something_else_in_it(tensors, message, tmp_path):
    parts, _ = tiny_parts()
    metadata = {
        "format": "cutaway-drafter", "version": "1", "method": "rest", "target_sha256": parts.model_facts["sha256"],
        "hidden_size": str(parts.model_config.hidden_size),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a", metadata)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a")


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("blocks", "budget"), [(64, 512), (18, 19)])
def test_the_text_is_that_of_plain_decoding(path, lookup, temperature, blocks, budget):
    params = PARAMS.changed(temperature=temperature, seed=5)
    plain = tiny_engine().generate(PROMPTS, params)
    config = SpeculativeConfig("rest", model=str(path), num_speculative_tokens=5, prompt_lookup=lookup, draft_confidence=0.0)
    checked = Checked(tiny_engine(num_kv_blocks=blocks, max_num_batched_tokens=budget, speculative=config))
    ids = [checked.engine.add_request(p, params) for p in PROMPTS]
    done = checked.run()
    assert [done[i].token_ids for i in ids] == [o.token_ids for o in plain]
    drafts = [e for e in checked.events if isinstance(e, DraftProposed) and e.nodes]
    assert drafts and not any(e.sampled for e in drafts)
    if not temperature:
        assert any(e.found_at >= 0 for e in drafts) == (lookup and blocks == 64)
        assert checked.engine.metrics()["vllm:spec_decode_num_accepted_tokens"] > 30


@pytest.mark.parametrize(
    ("method", "tree"),
    [*((name, None) for name in ("eagle", "draft_model", "layer_skip", "medusa")), ("eagle", (3, 3, 2)), ("medusa", (2, 3))],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_drafter_after_the_text_itself(method, tree, temperature):
    """What was copied and what was drafted alternate, and the drafter's own KV misses nothing: with ``check_drafts`` elsewhere it
    is right, here the text is that of plain decoding, also where drafts are drawn with the target's numbers."""
    params = PARAMS.changed(temperature=temperature, seed=5)
    loops = [[*p, *p, *p[:2]] for p in PROMPTS if len(p) > 4]
    plain = tiny_engine().generate(loops, params)
    config = SpeculativeConfig(
        method, model=str(drafter_file(method)), tree=tree, prompt_lookup=True, prompt_lookup_min=1, acceptance="coupled"
    )
    checked = Checked(tiny_engine(speculative=config))
    ids = [checked.engine.add_request(p, params) for p in loops]
    done = checked.run()
    assert [done[i].token_ids for i in ids] == [o.token_ids for o in plain]
    drafts = [e for e in checked.events if isinstance(e, DraftProposed) and e.nodes]
    kinds = {e.found_at >= 0 for e in drafts}
    assert all(len(e.nodes) <= (config.num_speculative_tokens if tree is None else len(tree)) for e in drafts if e.found_at >= 0)
    assert kinds == {True, False} and {e.method for e in checked.events if isinstance(e, DraftProposed)} == {method}


@pytest.mark.parametrize(("confidence", "most"), [(1.0, 1), (0.0, 4)])
def test_a_draft_ends_where_it_is_unsure(confidence, most):
    config = SpeculativeConfig("draft_model", model=str(drafter_file("draft_model")), draft_confidence=confidence)
    checked = Checked(tiny_engine(speculative=config))
    for p in PROMPTS:
        checked.engine.add_request(p, PARAMS)
    checked.run()
    assert {len(e.nodes) for e in checked.events if isinstance(e, DraftProposed) and e.num_wanted == 4} == {most}


def test_the_lookup_comes_first():
    engine = tiny_engine()
    drafter = create_drafter(SpeculativeConfig("draft_model", model=str(drafter_file("draft_model")), prompt_lookup=True), engine)
    asked = []
    drafter.other.propose = lambda wanted: asked.extend(wanted) or [SimpleNamespace() for _ in wanted]
    requests = [SimpleNamespace(request_id=str(i), token_ids=t) for i, t in enumerate(([1, 2, 3, 1, 2], [1, 2, 3, 4, 5]))]
    first, _ = drafter.propose([Wanted(r, 2) for r in requests])
    assert first.token_ids == [3, 1] and [w.request.request_id for w in asked] == ["1"]
