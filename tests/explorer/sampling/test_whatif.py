"""What-ifs against the engine's own choices, and against arithmetic in numpy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.events.types import Candidate, LogitsRecorded, TokenSampled
from engine.request import SamplingParams
from engine.sampling.processors import ORDER, TRANSFORMERS_ORDER, TokenCounts, process, removed_by
from engine.sampling.sampler import Sampler, SampleRow
from explorer.sampling.choice import outcome_choice, recorded_choice
from explorer.sampling.whatif import Basis, Orders, landing, orders_differ, params_of, recompute

VOCAB = 96
PROMPT, OUTPUT = [3, 5, 5], [7, 7, 9]
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.3, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 200]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    seed=st.integers(0, 2**32),
)


def logits_of(seed: int, scale: float = 2.0) -> np.ndarray:
    """float32 [VOCAB] that 16 bits hold exactly: multiples of 1/64 within 16 of the largest, with equal ones among them."""
    rng = np.random.default_rng(seed)
    return (np.clip(np.round(rng.normal(0, scale, VOCAB) * 64), -400, 400) / 64).astype(np.float32)


def chosen(logits: np.ndarray, params: SamplingParams, position: int = 6, top: int = 20) -> tuple[TokenSampled, LogitsRecorded]:
    """What the engine records when its own sampler takes a token from these logits."""
    row = SampleRow(params, params.seed or 0, 0, position, PROMPT, OUTPUT)
    (s,) = Sampler(VOCAB).sample(torch.from_numpy(logits).unsqueeze(0), [row], observe_top=top)
    listed = [Candidate(c[0], f" t{c[0]}", c[1], c[2], c[3], c[4], c[5]) for c in s.candidates]
    token = TokenSampled(
        step=1, time_ns=0, request_id="r", position=position, index=3, token_id=s.token_id, text=f" t{s.token_id}", logprob=s.logprob,
        rank=s.rank, u=s.u, prob=s.prob, nucleus_size=s.nucleus_size, nucleus_mass=s.nucleus_mass, entropy=s.entropy, top=listed,
        kept_sizes=s.kept_sizes, kept_masses=s.kept_masses,
    )  # fmt: skip
    largest = logits.max()
    recorded = LogitsRecorded(
        step=1, time_ns=0, request_id="r", position=position, dtype="float16", logits=(logits - largest).astype("<f2").tobytes(),
        max_logit=float(largest),
    )  # fmt: skip
    return token, recorded


@given(seed=st.integers(0, 10_000), params=params_strategy)
def test_the_dart_lands_on_the_token_that_the_engine_chose(seed: int, params: SamplingParams) -> None:
    token, recorded = chosen(logits_of(seed), params)
    out = recompute(Basis.of_logits(recorded, (PROMPT, OUTPUT)), params, token.u)
    assert out.token_id == token.token_id
    assert out.final[out.landing] == pytest.approx(token.prob, abs=1e-6)
    assert out.exact and out.full
    if token.u is not None:
        assert (out.left["top_p"], out.left["top_k"], out.left["min_p"]) == (
            token.nucleus_size,
            token.kept_sizes[1],
            token.kept_sizes[0],
        )


@given(seed=st.integers(0, 10_000), params=params_strategy)
def test_the_recorded_picture_puts_the_dart_on_the_chosen_piece(seed: int, params: SamplingParams) -> None:
    token, _recorded = chosen(logits_of(seed), params)
    choice = recorded_choice(token, params, VOCAB, {*PROMPT, *OUTPUT})
    assert choice.landing == token.token_id
    assert sum(p for _t, p in choice.segments) + choice.rest == pytest.approx(
        1.0, abs=1e-6
    )  # the engine's exponentials are float32
    row = next(row for row in choice.rows if row.token_id == token.token_id)
    assert row.chosen and row.lands and not row.removed_by
    if token.u is not None:
        at = 0.0
        for piece, p in choice.segments:
            if at + 1e-6 < token.u < at + p - 1e-6:
                assert piece == token.token_id
            at += p


@given(seed=st.integers(0, 10_000), params=params_strategy, other=params_strategy)
def test_candidates_alone_give_the_same_whenever_they_are_said_to_be_exact(
    seed: int, params: SamplingParams, other: SamplingParams
) -> None:
    token, recorded = chosen(logits_of(seed, 3.0), params)
    other = other.changed(repetition_penalty=1.0)
    history = (PROMPT, OUTPUT)
    part = recompute(Basis.of_candidates(token, history), other, token.u)
    if part.exact:
        whole = recompute(Basis.of_logits(recorded, history), other, token.u)
        assert part.token_id == whole.token_id and part.kept == whole.kept
        assert sorted(part.final[part.final > 0]) == pytest.approx(sorted(whole.final[whole.final > 0]), abs=1e-5)


def brute_force(logits: np.ndarray, params: SamplingParams, order: tuple[str, ...]) -> np.ndarray:
    """The probabilities after all processors, in numpy and loops, from the definitions. float64 [VOCAB]."""
    x = logits.astype(np.float64)
    for token in {*PROMPT, *OUTPUT}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = OUTPUT.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    by_logit = sorted(range(VOCAB), key=lambda t: (-np.float32(x[t]), t))
    if params.temperature == 0:
        return np.eye(VOCAB)[by_logit[0]]
    w = np.exp((x - x.max()) / params.temperature)
    kept = list(by_logit)
    for name in order[2:]:
        total = sum(w[t] for t in kept)
        if name == "min_p":
            kept = [t for t in kept if w[t] >= params.min_p * w[kept[0]] * (1 - 1e-9)]
        elif name == "top_k" and params.top_k > 0:
            kept = kept[: params.top_k]
        elif name == "top_p" and params.top_p < 1:
            before, stay = 0.0, []
            for t in kept:
                if stay and before >= params.top_p * total:
                    break
                stay.append(t)
                before += w[t]
            kept = stay
    out = np.zeros(VOCAB)
    out[kept] = w[kept]
    return out / out.sum()


@pytest.mark.parametrize("order", [ORDER, TRANSFORMERS_ORDER])
@given(seed=st.integers(0, 10_000), params=params_strategy)
def test_every_probability_is_that_of_the_definitions(order: tuple[str, ...], seed: int, params: SamplingParams) -> None:
    logits = logits_of(seed)
    _token, recorded = chosen(logits, SamplingParams())
    out = recompute(Basis.of_logits(recorded, (PROMPT, OUTPUT)), params, 0.5, order)
    got = np.zeros(VOCAB)
    got[out.token_ids] = out.final
    np.testing.assert_allclose(got, brute_force(logits, params, order), atol=2e-6)
    raw = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    np.testing.assert_allclose(out.raw, raw[out.token_ids], atol=1e-12)


def test_who_removed_a_token_is_told() -> None:
    logits = np.full(VOCAB, -6.0, np.float32)
    logits[:6] = [4, 3.5, 3, 2.5, 2, 1.5]
    _token, recorded = chosen(logits, SamplingParams())
    params = SamplingParams(min_p=0.2, top_k=3, top_p=0.6)
    out = recompute(Basis.of_logits(recorded, ([], [])), params, 0.0)
    names = {int(t): out.order[i] if i >= 0 else "" for t, i in zip(out.token_ids, out.removed_by, strict=True)}
    assert [names[t] for t in range(6)] == ["", "", "top_p", "top_k", "min_p", "min_p"]
    choice = outcome_choice(out, params, 0, 0.0, VOCAB)
    assert choice.columns == ["raw", "min_p", "top_k", "top_p"]
    assert [row.removed_by for row in choice.rows[:6]] == ["", "", "top_p", "top_k", "min_p", "min_p"]
    gone = choice.rows[3].shares
    assert gone[0] > 0 and gone[1] > 0 and gone[2:] == [0.0, 0.0]


def test_a_repetition_penalty_makes_a_negative_logit_smaller_too() -> None:
    logits = np.full(VOCAB, -4.0, np.float32)
    logits[[3, 7, 20]] = [2.0, -1.0, 0.5]  # 3 is in the prompt, 7 in the output
    _token, recorded = chosen(logits, SamplingParams())
    before = recompute(Basis.of_logits(recorded, (PROMPT, OUTPUT)), SamplingParams(), 0.5)
    after = recompute(Basis.of_logits(recorded, (PROMPT, OUTPUT)), SamplingParams(repetition_penalty=2.0), 0.5)

    def odds(out: Any, token: int) -> float:
        at = {int(t): i for i, t in enumerate(out.token_ids)}
        return float(np.log(out.stages["penalties"][at[token]] / out.stages["penalties"][at[20]]))

    assert odds(before, 3) == pytest.approx(1.5) and odds(after, 3) == pytest.approx(0.5)
    assert odds(before, 7) == pytest.approx(-1.5) and odds(after, 7) == pytest.approx(-2.5)


def test_candidates_refuse_a_repetition_penalty_and_other_settings_say_that_they_are_not_exact() -> None:
    token, _recorded = chosen(logits_of(1), SamplingParams(seed=1))
    basis = Basis.of_candidates(token, (PROMPT, OUTPUT))
    with pytest.raises(ValueError, match="repetition penalty needs the full logits"):
        recompute(basis, SamplingParams(repetition_penalty=1.1), 0.5)
    assert not recompute(basis, SamplingParams(temperature=1.4), 0.5).exact
    assert recompute(basis, SamplingParams(temperature=1.4, top_k=5), 0.5).exact
    assert not recompute(basis, SamplingParams(temperature=1.4, top_k=25), 0.5).exact
    with pytest.raises(ValueError, match="no candidates were recorded"):
        Basis.of_candidates(chosen(logits_of(1), SamplingParams(seed=1), top=0)[0], ([], []))


def test_where_the_two_orders_keep_different_sets() -> None:
    logits = np.full(VOCAB, -12.0, np.float32)
    logits[:4] = np.log([0.5, 0.3, 0.15, 0.05]).astype(np.float32)
    _token, recorded = chosen(logits, SamplingParams())
    basis = Basis.of_logits(recorded, ([], []))

    # min_p first leaves 0.5, 0.3, 0.15, of which the first two are 0.842: no third. Without it they are 0.8, so top_p takes a third.
    def differ(**settings: Any) -> Orders | None:
        params = SamplingParams(**settings)
        return orders_differ(basis, params, recompute(basis, params, None))

    assert differ(min_p=0.25, top_p=0.83) == Orders(2, 3, [], [2])
    assert differ(min_p=0.25, top_p=0.75) is None  # two either way
    assert differ(min_p=0.25) is None and differ(top_p=0.83) is None


def test_a_dart_beyond_the_sum_falls_on_the_last_one() -> None:
    assert landing(np.array([0.5, 0.25, 0.25, 0.0]), 0.9999999999) == 2
    assert landing(np.array([0.5, 0.25, 0.25]), 0.5) == 1
    assert landing(np.array([0.5, 0.25, 0.25]), 0.0) == 0
    assert landing(np.array([0.2, 0.8]), None) == 0


def test_settings_of_a_log_are_checked() -> None:
    assert params_of({"temperature": 0.5, "seed": 3, "n": 2}, top_k=4) == SamplingParams(temperature=0.5, top_k=4)
    with pytest.raises(ValueError, match="top_p must be"):
        params_of({}, top_p=0.0)
    assert math.isclose(params_of({"min_p": 0.1}).min_p, 0.1)


@given(
    st.lists(st.sampled_from([-math.inf, *range(-4, 5)]), min_size=2, max_size=30).filter(lambda x: max(x) > -math.inf),
    params_strategy,
    st.sampled_from([None, 1.0]),
    st.sampled_from([ORDER, TRANSFORMERS_ORDER]),
)
def test_prefixes_of_the_walk_are_what_the_processors_leave(logits, params, min_p, order) -> None:
    """The engine's definitions, each applied to all tokens; with ties, tokens of no mass, and equals of the likeliest at min_p 1."""
    params = params if min_p is None else params.changed(min_p=min_p)
    history = [0, 1, 1]
    basis = Basis(np.arange(len(logits)), np.array(logits, dtype=np.float32), True, (history, []))
    out = recompute(basis, params, 0.5, order)
    rows = torch.tensor([logits], dtype=torch.float32)
    counts = TokenCounts(history)
    stages = dict(process(rows, params, counts, order))
    for name in order[1:]:
        want = stages[name][0].softmax(-1).numpy()
        np.testing.assert_allclose(out.stages[name], want[out.token_ids], atol=1e-12)
        assert out.left[name] == int((stages[name] > -math.inf).sum())
    gone = removed_by(rows, params, counts, order)[0].numpy()[out.token_ids]
    seen = np.array(logits)[out.token_ids] > -math.inf
    assert (out.removed_by[seen] == gone[seen]).all()
