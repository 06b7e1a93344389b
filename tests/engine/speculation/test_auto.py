"""Auto K on made-up drafters: what it loses is bounded at every moment, and what can be gained is found."""

import random

import pytest

from engine.speculation.auto import AutoK, StepCosts

PLAIN = 25.0


class Run:
    """An engine with made-up costs and acceptance. ``draft``, ``row``: ms for each drafted token."""

    def __init__(self, acceptance, draft=1.0, row=1.5, noise=0.1, batch=1, most=8, seed=0):
        self.draft, self.row, self.noise, self.batch = draft, row, noise, batch
        self.acceptance = acceptance  # of every position, or of the first and the others
        self.auto, self.random, self.most = AutoK(most), random.Random(seed), most
        self.ms = self.plain_ms = self.tokens = 0.0
        self.chosen, self.worst = [], 0.0

    def at(self, position):
        return self.acceptance[min(position, 1)] if isinstance(self.acceptance, tuple) else self.acceptance

    def cost(self, k):
        return PLAIN + (self.draft + self.row) * k + (4.0 if k else 0.0)

    def step(self):
        k = self.auto.choose(self.batch)
        accepted = []
        for _ in range(self.batch if k else 0):
            n = 0
            while n < k and self.random.random() < self.at(n):
                n += 1
            accepted.append(n)
        ms = self.cost(k) * self.random.uniform(1 - self.noise, 1 + self.noise)
        self.auto.observe(k, accepted, ms, self.batch)
        gained = 1 + sum(accepted) / self.batch
        self.chosen.append(k)
        self.ms += self.cost(k)
        self.plain_ms += gained * PLAIN
        self.tokens += gained
        if self.tokens >= 60:
            self.worst = max(self.worst, self.ms / self.plain_ms - 1)

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    def ideal(self):
        """ms a token of the best fixed K."""

        def tokens(k):
            return 1 + sum(self.acceptance**i for i in range(1, k + 1))

        return min(self.cost(k) / tokens(k) for k in range(self.most + 1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("acceptance, row", [(0.0, 1.5), (0.05, 6.0), (0.2, 8.0), (0.5, 30.0)])
def test_where_it_never_pays_no_more_than_3_percent_is_lost_at_any_time(acceptance, row, batch, seed):
    run = Run(acceptance, row=row, batch=batch, seed=seed).steps(600)
    assert run.worst <= 0.03
    assert any(run.chosen), "nothing was ever tried"
    assert run.chosen[300:].count(0) > 280, "trials become rare"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("acceptance, row", [(0.6, 1.0), (0.8, 1.5), (0.9, 0.5)])
def test_where_it_pays_most_of_the_gain_is_had(acceptance, row, seed):
    run = Run(acceptance, row=row, seed=seed).steps(400)
    assert run.ms / run.tokens < PLAIN / 1.1, "the case is none"
    gain, possible = PLAIN - run.ms / run.tokens, PLAIN - run.ideal()
    assert gain > 0.8 * possible
    assert run.worst <= 0.03


@pytest.mark.parametrize("seed", range(5))
def test_text_that_stops_paying(seed):
    """What was gained before is no licence: the loss after the change is bounded by itself."""
    run = Run(0.85, seed=seed).steps(200)
    assert run.ms < 0.7 * run.plain_ms
    run.acceptance, run.row, before = 0.0, 6.0, (run.ms, run.plain_ms)
    run.steps(600)
    assert (run.ms - before[0]) / (run.plain_ms - before[1]) <= 1.03
    assert run.chosen[-200:].count(0) > 180


@pytest.mark.parametrize("seed", range(5))
def test_text_that_begins_to_pay(seed):
    run = Run(0.0, row=1.0, seed=seed).steps(300)
    run.acceptance, before = 0.85, (run.ms, run.tokens)
    run.steps(600)
    assert (run.ms - before[0]) / (run.tokens - before[1]) < 0.75 * PLAIN
    assert run.worst <= 0.03


def test_it_finds_the_best_k():
    """Cheap rows and sure tokens want a large K, dear rows a small one."""
    assert min(Run(0.95, draft=0.1, row=0.1, seed=1).steps(200).chosen[100:], key=lambda k: k or 99) >= 6
    dear = [k for k in Run((0.9, 0.1), seed=1).steps(300).chosen[100:] if k]
    assert len(dear) > 180 and sorted(dear)[len(dear) // 2] == 1


def test_drafts_that_seldom_come_cost_nothing_and_are_kept():
    """An n-gram drafter that finds something in one step of ten, and is right then: a step without costs what a plain one does."""
    auto, rng = AutoK(4), random.Random(3)
    ms = plain = 0.0
    for _ in range(400):
        k = auto.choose()
        n = k if rng.random() < 0.1 else 0
        step = PLAIN + (2.0 if n else 0.05 if k else 0.0)
        auto.observe(k, [n] if k else [], step)
        ms, plain = ms + step, plain + (1 + n) * PLAIN
    assert ms < 0.85 * plain


def test_a_hold_up_of_the_machine_changes_nothing():
    run = Run(0.8, seed=2).steps(100)
    k = run.auto.best()
    run.auto.observe(k, [k], 100 * PLAIN)
    assert run.auto.best() > 0 and run.auto.choose() > 0


def test_nothing_is_tried_before_plain_steps_are_timed():
    """Of this size of batch."""
    auto = AutoK(4)
    for _ in range(3):
        assert auto.choose() == 0
        auto.observe(0, [], PLAIN)
    assert auto.choose() == 1, "the first trial is a cautious one"
    auto.observe(1, [0], 1.05 * PLAIN)
    assert auto.choose() == 3
    assert auto.choose(16) == 0
    assert AutoK(2).most == 2


def test_expected_tokens_are_those_of_the_formula():
    auto = AutoK(3)
    auto._tries, auto._hits = [1e9, 1e9, 1e9], [8e8, 5e8, 2.5e8]
    assert auto.acceptance() == pytest.approx([0.8, 0.5, 0.25])
    assert auto.expected(0) == 1
    assert auto.expected(3) == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.25)


def test_costs_between_and_beyond_what_was_measured():
    costs = StepCosts()
    with pytest.raises(KeyError):
        _ = costs[0]
    costs.add(0, 20.0)
    assert costs[3] == 30.0 and not costs.known
    costs.add(4, 28.0)
    assert (costs[2], costs[6]) == (24.0, 32.0)
    for _ in range(20):
        costs.add(4, 1000.0 if _ == 10 else 28.0)
    assert costs[4] < 30


@pytest.mark.parametrize("kw", [{"most": 0}, {"most": 3, "max_loss": 0}, {"most": 3, "max_loss": 1}], ids=str)
def test_values_out_of_range(kw):
    with pytest.raises(ValueError, match="got"):
        AutoK(**kw)
