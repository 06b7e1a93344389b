"""The probes on models whose scores are known: one that looks up the answer, one that knows none, one that is right half the time."""

import re

import pytest
import torch

from engine.quantization.quality import probes
from tests.engine.quantization.quality.models import Bytes

LENGTHS = (800, 1100)


class Oracle:
    """Predicts the token that follows in ``right`` (a prompt's ids), by ``margin``; or a wrong digit where ``wrong(position)``."""

    def __init__(self, prompts, margin: float = 2.0, wrong=lambda t: False) -> None:
        self.prompts = [list(p.token_ids) for p in prompts]
        self.margin, self.wrong = margin, wrong

    def __call__(self, ids: list[int]) -> torch.Tensor:
        assert ids in self.prompts
        rows = torch.zeros(len(ids), 256)
        for t in range(1, len(ids)):
            rows[t - 1, 32 if self.wrong(t) else ids[t]] = self.margin
        return rows


def retrieval():
    return [probes.retrieval_prompt(Bytes(), n, seed) for n in LENGTHS for seed in (0, 1)]


def test_retrieval_prompts_ask_for_what_they_planted():
    for prompt, length in zip(retrieval(), (800, 800, 1100, 1100)):
        text = Bytes().decode(prompt.token_ids)
        assert length - 70 < len(prompt.token_ids) <= length  # filler to the last sentence that fits
        told, asked = text.split("What are the numbers?")
        planted = dict(re.findall(r"The number of the (\w+) is (\d{5})\.", told))
        answered = re.findall(r"The number of the (\w+) is (\d{5})\.", asked)
        assert len(planted) == 8 and dict(answered) == planted and [p for p, _ in answered] != list(planted)
        scored = ["".join(Bytes().decode([prompt.token_ids[t]]) for t in a.positions) for a in prompt.answers]
        assert scored == [number for _, number in answered]
        order = list(planted)
        assert [a.parts for a in prompt.answers] == [
            (f"{length} tokens", ("1st", "2nd", "3rd", "4th")[order.index(place) // 2] + " quarter") for place, _ in answered
        ]
    assert retrieval() == retrieval() and len({p.token_ids for p in retrieval()}) == 4


@pytest.mark.parametrize("digits", [1, 2])
def test_additions_are_right_and_each_is_there_once(digits):
    prompt = probes.arithmetic_prompt(Bytes(), digits, 5)
    lines = Bytes().decode(prompt.token_ids).splitlines()
    found = [re.fullmatch(r"(\d\d) \+ (\d+) = (\d+)", line).groups() for line in lines]
    assert all(int(a) + int(b) == int(c) and len(b) == digits for a, b, c in found)
    assert len(set(lines)) == len(lines) == 32 and len(prompt.answers) == 24
    scored = ["".join(Bytes().decode([prompt.token_ids[t]]) for t in a.positions) for a in prompt.answers]
    assert scored == [c for _, _, c in found[8:]]
    assert prompt == probes.arithmetic_prompt(Bytes(), digits, 5) != probes.arithmetic_prompt(Bytes(), digits, 6)


def test_known_scores():
    prompts = retrieval()
    told = []
    right = probes.run_probe(Oracle(prompts), Bytes(), "retrieval", prompts, lambda *a: told.append(a))
    assert right.total.share == right.total.exact == 1.0 and right.total.mean_margin == pytest.approx(2.0)
    assert (right.total.answers, right.total.tokens, right.total.chance) == (32, 160, pytest.approx(0.1))
    assert right.total.mean_nll == pytest.approx(float(torch.tensor([2.0] + [0.0] * 255).double().logsumexp(0)) - 2)
    assert [p.name for p in right.parts] == ["800 tokens", "1100 tokens", *(f"{q} quarter" for q in ("1st", "2nd", "3rd", "4th"))]
    assert [p.answers for p in right.parts] == [16, 16, 8, 8, 8, 8]
    assert told[-1] == (sum(len(p.token_ids) for p in prompts),) * 2 and len(told) == 4
    wrong = probes.run_probe(Oracle(prompts, wrong=lambda t: True), Bytes(), "retrieval", prompts)
    assert wrong.total.share == wrong.total.exact == 0.0 and wrong.total.mean_margin == pytest.approx(-2.0)


def test_one_wrong_digit_makes_an_answer_wrong():
    prompt = probes.retrieval_prompt(Bytes(), 800, 0)
    missed = prompt.answers[3].positions[2]
    got = probes.run_probe(Oracle([prompt], wrong=lambda t: t == missed), Bytes(), "retrieval", [prompt])
    assert (got.total.right, got.total.answers, got.total.right_tokens, got.total.tokens) == (7, 8, 39, 40)
    assert got.total.mean_margin == pytest.approx((39 * 2 - 2) / 40)
    assert sum(p.right for p in got.parts if "quarter" in p.name) == 7


def test_wilson():
    """Against the interval's definition: the shares p with |share - p| <= z sqrt(p (1 - p) / n), found by bisection."""

    def bound(share: float, n: int, inside: float, outside: float) -> float:
        for _ in range(80):
            middle = (inside + outside) / 2
            ok = abs(share - middle) <= 1.96 * (middle * (1 - middle) / n) ** 0.5
            inside, outside = (middle, outside) if ok else (inside, middle)
        return inside

    for right, of in ((3, 10), (50, 96), (1, 144)):
        share = right / of
        assert probes.wilson(right, of) == pytest.approx((bound(share, of, share, 0.0), bound(share, of, share, 1.0)), abs=1e-9)
    assert probes.wilson(0, 5)[0] == 0.0 and probes.wilson(5, 5)[1] == 1.0
    with pytest.raises(ValueError, match="got 1 of 0"):
        probes.wilson(1, 0)


def test_bad_input():
    with pytest.raises(ValueError, match="need more than 100 tokens"):
        probes.retrieval_prompt(Bytes(), 100, 0)
    with pytest.raises(ValueError, match=r"keys must lie in \[1, 12\], got 13"):
        probes.retrieval_prompt(Bytes(), 2000, 0, keys=13)
    with pytest.raises(ValueError, match="must be 1 or 2, got 3"):
        probes.arithmetic_prompt(Bytes(), 3, 0)
    with pytest.raises(ValueError, match="810 lines at most"):
        probes.arithmetic_prompt(Bytes(), 1, 0, scored=1000)
    with pytest.raises(ValueError, match="no prompts"):
        probes.run_probe(lambda ids: torch.zeros(len(ids), 256), Bytes(), "arithmetic", [])
    prompt = probes.arithmetic_prompt(Bytes(), 1, 0)
    with pytest.raises(ValueError, match="arithmetic: 256 of 256 logits that predict token"):
        probes.run_probe(lambda ids: torch.full((len(ids), 256), float("nan")), Bytes(), "arithmetic", [prompt])
