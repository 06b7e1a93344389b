"""K chosen by the clock: as many drafted tokens as pay, by what was measured, and none where speculation is slower.

With acceptance a_i at position i and step times c(k) (draft and verification of k tokens; c(0): a plain step) a request gains
E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens in c(k) milliseconds (Leviathan et al., arXiv 2211.17192, section 3.3, with an
acceptance for each position). K is the k that maximises E(k) / c(k).

What is not tried is not known, and trying costs. Every speculative step is entered in an account: the time that plain steps would
have needed for the same tokens, less the time that it took. While the account, with an allowance of ``max_loss`` of that plain
time, has nothing left, nothing is tried; and each trial that does not pay doubles the pause before the next. So a run loses hardly
more than ``max_loss`` against K = 0, plus what it starts with: most of one step.

Pure arithmetic on what it is told: no clock and no randomness of its own.
"""

from collections.abc import Sequence

PROBED = 3  # K of a trial
_PROBE_STEPS = (3, 8)  # at least so many steps before a trial counts, at most so many
_START = 0.8  # plain steps that may be lost before any allowance has come together
_SAVED = 4.0  # and so many may be in the account: what was gained long ago is not for losing now
_PAUSE = (8, 1024)  # steps between trials
_REFRESH = 50  # speculative steps before a plain one is timed again
_NOISE = 0.1  # of a plain step: how much dearer than measured a step may turn out
_MARGIN = 1.01  # how much better than plain decoding it must be
_FADE = 0.96  # what a step's acceptance still counts for at the next
_FORGET = 0.25  # and what everything before still counts for in a new trial: the text may have changed


class StepCosts:
    """Milliseconds of a step by k, each a moving mean that a single hold-up of the machine does not spoil."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}
        self._count: dict[int, int] = {}

    def add(self, k: int, ms: float) -> None:
        n = self._count[k] = self._count.get(k, 0) + 1
        old = self._ms.get(k, ms)
        if n > 3:
            ms = min(max(ms, old / 2), old * 2)
        self._ms[k] = old + (ms - old) / min(n, 16)

    def count(self, k: int) -> int:
        return self._count.get(k, 0)

    @property
    def known(self) -> bool:
        """Whether any step but a plain one was measured."""
        return any(self._ms)

    def __getitem__(self, k: int) -> float:
        """Measured, or on the line between the nearest that are (beyond the last: on from it). KeyError before 0 is measured."""
        if k in self._ms or 0 not in self._ms:
            return self._ms[k]
        known = sorted(self._ms)
        below = max(i for i in known if i < k)
        above = [i for i in known if i > k]
        if above:
            share = (k - below) / (above[0] - below)
            return self._ms[below] * (1 - share) + self._ms[above[0]] * share
        plain = self._ms[0]
        slope = (self._ms[below] - plain) / below if below else plain / 6  # nothing is known: half as much again for 3
        return plain + max(0.0, slope) * k


class AutoK:
    """One for an engine. ``choose`` before a step, ``observe`` after it. ``most``: the largest K."""

    def __init__(self, most: int, max_loss: float = 0.0125) -> None:
        if most < 1 or not 0 < max_loss < 1:
            raise ValueError(f"most must be at least 1 and max_loss in (0, 1), got {most!r} and {max_loss!r}")
        self.most = most
        self.max_loss = max_loss
        self._costs: dict[int, StepCosts] = {}  # by the size of the batch: 1, 2, 3-4, 5-8, ...
        self._tries = [0.0] * most
        self._hits = [0.0] * most
        self._account: float | None = None  # in plain steps; None: nothing was measured yet
        self._mode = "plain"  # "plain" | "trial" | "pays"
        self._pause = 0
        self._next_pause = _PAUSE[0]
        self._steps = 0  # of the trial; and where it pays, since a plain step was timed

    def choose(self, num_requests: int = 1) -> int:
        """K of the next step, for so many requests that decode."""
        costs = self._of(num_requests)
        if self._account is None or costs.count(0) < 3:
            return 0
        if self._mode == "plain" and self._pause <= 0:
            self._begin_trial()
        if self._mode == "trial":
            k = min(PROBED, self.most) if costs.known else 1
            risk = costs[k] / costs[0] - 1 + _NOISE  # what is lost when nothing is accepted
            return k if self._account >= risk else 0
        if self._mode == "pays":
            k = self.best(num_requests)
            if k == 0 or self._account < 0:
                self._give_up()
            else:
                return k if self._steps < _REFRESH else 0
        return 0

    def observe(self, k: int, accepted: Sequence[int], step_ms: float, num_requests: int = 1) -> None:
        """A step in which nothing but decoding was done.

        ``k``: what was chosen. ``accepted``: for each request that could be drafted for, how many of its tokens were accepted
        (0 where nothing was proposed). ``step_ms``: of drafting, the pass and the commit together.
        """
        costs = self._of(num_requests)
        known = costs.count(k) >= 3
        costs.add(k, step_ms)
        if costs.count(0) == 0:
            return
        plain = costs[0]
        spent = min(step_ms, 2 * costs[k]) if known else step_ms
        if k:
            self._learn(k, accepted)
        self._enter(1 + sum(accepted) / max(1, num_requests), spent / plain, k)
        self._advance(k, num_requests)

    def best(self, num_requests: int = 1) -> int:
        """The k that gains most tokens a millisecond by what is known; 0 where none gains more than plain decoding."""
        costs = self._of(num_requests)
        best, rate = 0, _MARGIN / costs[0]
        for k in range(1, self.most + 1):
            if self.expected(k) / costs[k] > rate:
                best, rate = k, self.expected(k) / costs[k]
        return best

    def expected(self, k: int) -> float:
        """E(k): tokens that a request gains in a step."""
        tokens, reached = 1.0, 1.0
        for a in self.acceptance()[:k]:
            reached *= a
            tokens += reached
        return tokens

    def acceptance(self) -> list[float]:
        """a_i of each position, given that the one before was accepted. Where nothing is known: as at the position before."""
        out: list[float] = []
        for hits, tries in zip(self._hits, self._tries, strict=True):
            out.append((hits + 0.25) / (tries + 0.5) if tries > 0.5 or not out else out[-1])
        return out

    def _of(self, num_requests: int) -> StepCosts:
        return self._costs.setdefault(max(0, num_requests - 1).bit_length(), StepCosts())

    def _learn(self, k: int, accepted: Sequence[int]) -> None:
        for i in range(self.most):
            self._tries[i] *= _FADE
            self._hits[i] *= _FADE
        for count in accepted:
            for i in range(min(k, count + 1)):
                self._tries[i] += 1
                self._hits[i] += i < count

    def _enter(self, gained: float, spent: float, k: int) -> None:
        """In plain steps: what was gained and what it took. A plain step takes what it takes."""
        if self._account is None:
            self._account = _START
        self._account += self.max_loss * gained + (gained - spent if k else 0.0)
        self._account = min(self._account, max(_SAVED, _START))

    def _advance(self, k: int, num_requests: int) -> None:
        if self._mode == "plain":
            self._pause -= 1
        elif self._mode == "pays":
            self._steps = self._steps + 1 if k else 0
            if self._steps >= 20:
                self._next_pause = _PAUSE[0]
        elif k:
            self._steps += 1
            if self._steps >= _PROBE_STEPS[0] and self.best(num_requests):
                self._mode, self._steps = "pays", 0
            elif self._steps >= _PROBE_STEPS[1]:
                self._give_up()

    def _begin_trial(self) -> None:
        self._mode, self._steps = "trial", 0
        self._tries = [_FORGET * x for x in self._tries]
        self._hits = [_FORGET * x for x in self._hits]

    def _give_up(self) -> None:
        self._mode, self._steps = "plain", 0
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _PAUSE[1])
