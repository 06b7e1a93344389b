"""A draft model against its module, and against transformers; and what it remembers of which block."""

import json

import pytest

import engine.speculation.draft_model as draft_model
from engine.events.recorder import Recorder
from engine.kvcache.pool import BlockPool
from engine.speculation.draft_kv import Filled
from engine.speculation.draft_model import DraftModelDrafter
from tests.engine.engines import tiny_parts, write_byte_tokenizer
from tests.engine.model import tiny
from tests.engine.speculation.drafting import Bench, Oracle, drafter_file


class Counted(Bench):
    """Counts the rows that the draft model computes."""

    def fresh(self) -> None:
        super().fresh()
        assert isinstance(self.drafter, DraftModelDrafter)
        self.rows: list[int] = []
        run = self.drafter.passes.run

        def counted(token_ids, runs):
            self.rows.append(len(token_ids))
            return run(token_ids, runs)

        self.drafter.passes.run = counted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("draft_model")


def test_chains_while_drafts_are_accepted_and_rejected(oracle):
    bench = Counted("draft_model")
    requests = [bench.request(f"r{i}", bench.tokens(n)) for i, n in enumerate((1, 2, 9, 40))]
    for request in requests:
        bench.prefill(request)
    for step in range(5):
        drafts = bench.propose(requests, [4, 1, 5, 3])
        for request, draft, count in zip(requests, drafts, (4, 1, 5, 3)):
            assert len(draft) == count and draft.is_chain and draft.q is None
            oracle.check(request.token_ids, draft)
        kept = [min((step + i) % 5, len(d)) for i, d in enumerate(drafts)]
        bench.decide(requests, drafts, [range(n) for n in kept], bench.tokens(4))


def test_what_was_accepted_is_not_computed_again(oracle):
    bench = Counted("draft_model")
    request = bench.request("r", bench.tokens(30))
    bench.prefill(request)
    passes = [([30, 1, 1, 1], 4), ([2, 1, 1, 1], 2), ([1, 1, 1, 1], 0), ([1, 1, 1, 1], 3), ([1, 1, 1, 1], 1)]
    for rows, kept in passes:
        bench.rows.clear()
        (draft,) = bench.propose([request], 4)
        assert bench.rows == rows  # all four accepted: the last of them was never read
        oracle.check(request.token_ids, draft)
        bench.decide([request], [draft], [range(kept)], [5])


def test_it_catches_up_when_it_is_switched_on_late(oracle, monkeypatch):
    monkeypatch.setattr(draft_model, "_CATCH_UP", 8)
    bench = Counted("draft_model")
    requests = [bench.request("a", bench.tokens(29)), bench.request("b", bench.tokens(3))]
    for request in requests:
        bench.prefill(request)
    bench.fresh()
    for request, draft in zip(requests, bench.propose(requests, 2)):
        oracle.check(request.token_ids, draft)
    assert bench.rows == [8, 8, 8, 5 + 3, 2]


def test_prefixes_siblings_and_preemption(oracle):
    bench = Counted("draft_model")
    first = bench.request("a", bench.tokens(22))
    bench.prefill(first)
    bench.propose([first], 2)
    assert bench.drafter.covers(first.block_ids[:5]) == 5  # it could catch up on any
    second = bench.request("b", first.token_ids[:20] + bench.tokens(5))
    second.block_ids, second.num_computed_tokens = list(first.block_ids[:5]), 20
    bench.pool.share("b", 0, second.block_ids)
    bench.prefill(second)
    bench.rows.clear()
    oracle.check(second.token_ids, bench.propose([second], 2)[0])
    assert bench.rows == [5, 1]
    third = bench.request("c", list(second.token_ids))
    third.block_ids, third.num_computed_tokens = list(second.block_ids), second.num_computed_tokens
    bench.pool.share("c", 0, third.block_ids)
    last = second.num_computed_tokens // 4
    src = second.block_ids[last]
    second.block_ids[last] = bench.pool.copy_on_write("b", last, src)
    bench.kv.copy_blocks([src], [second.block_ids[last]])
    bench.drafter.copy_blocks([src], [second.block_ids[last]])
    bench.rows.clear()
    drafts = bench.propose([second, third], 3)
    assert bench.rows[0] == 2  # the copy holds what its source held
    for request, draft in zip((second, third), drafts):
        oracle.check(request.token_ids, draft)
    bench.decide([second, third], drafts, [range(3), range(1)], [4, 6])
    bench.release(second)
    bench.prefill(second)
    for request, draft in zip((second, third), bench.propose([second, third], 3)):
        oracle.check(request.token_ids, draft)


def test_any_checkpoint_with_the_same_tokenizer(tmp_path):
    made = tiny.make("qwen2", tmp_path, seed=3, num_hidden_layers=2, hidden_size=32, vocab_size=330)  # a table that is padded
    write_byte_tokenizer(tmp_path)
    bench = Bench("draft_model", model=str(tmp_path))
    requests = [bench.request("a", bench.tokens(17)), bench.request("b", bench.tokens(4))]
    for request in requests:
        bench.prefill(request)
    for kept in (2, 0):
        drafts = bench.propose(requests, 3)
        for request, draft in zip(requests, drafts):
            for i, token in enumerate(draft.token_ids):
                logits = made.logits(request.token_ids + draft.token_ids[:i])[-1, :320]
                assert token == int(logits.argmax())
                assert abs(float(logits.softmax(-1)[token]) - draft.probs[i]) < 1e-4
        bench.decide(requests, drafts, [range(kept)] * 2, [5, 6])


def test_another_tokenizer_is_refused(tmp_path):
    tiny.make("llama", tmp_path, num_hidden_layers=1)
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["AA"] = 259
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"another: token 'AA' is in one of them only \(260 tokens there, 259 here\)"):
        Bench("draft_model", model=str(tmp_path))
    del vocab["AA"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"another: token 'A' is {vocab['A']} there and {vocab['B']} here"):
        Bench("draft_model", model=str(tmp_path))


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa", "layer_skip"])
def test_a_file_that_does_not_fit_is_refused(method, tmp_path):
    parts, _ = tiny_parts()
    with pytest.raises(ValueError, match="no such drafter file"):
        Bench(method, model=str(tmp_path / "none.safetensors"))
    other = "medusa" if method != "medusa" else "eagle"
    with pytest.raises(ValueError, match=f"a drafter of method '{other}'"):
        Bench(method, model=str(drafter_file(other)))
    with pytest.raises(ValueError, match="made for another target"):
        Bench(method, model=str(drafter_file(method, "llama-tied")))
    assert parts.model_facts["sha256"] != tiny_parts("llama-tied")[0].model_facts["sha256"]


def test_tied_embeddings_and_the_head_of_their_rows():
    bench, oracle = Bench("draft_model", "llama-tied"), Oracle("draft_model", "llama-tied")
    bench.prefill(request := bench.request("r", bench.tokens(12)))
    oracle.check(request.token_ids, bench.propose([request], 4)[0])


def test_marks_of_blocks():
    pool = BlockPool(6, 4, Recorder())
    table = pool.allocate("a", 0, 4)
    filled = Filled(pool)
    assert filled.leading(table) == 0 and filled.trailing(table, 9) == 9
    filled.mark(table, 0, 6)
    filled.mark(table, 6, 9)
    assert filled.leading(table) == 9
    assert [filled.trailing(table, end) for end in (9, 7, 0, 10)] == [0, 0, 0, 10]
    filled.mark(table, 11, 15)  # a gap at 9 and 10: the third block keeps only what is new
    assert filled.leading(table) == 8
    assert filled.trailing(table, 15) == 11 and filled.trailing(table, 9) == 9
    assert filled.last(table, 2, 16) == 15 and filled.last(table, 2, 11) == 8 and filled.last(table, 8, 11) == 8
    pool.free("a", table[2:])
    again = pool.allocate("b", 0, 2)
    assert set(again) == set(table[2:]) and filled.leading(again) == 0
    assert filled.leading(table[:2]) == 8
    filled.copy([table[1]], [again[0]])
    assert filled.leading(again) == 4
    pool.generations[again[0]] += 1
    assert filled.leading(again) == 0
