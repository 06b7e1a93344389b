"""What accepting a draft costs at a vocabulary of 49,152: ``python -m tests.bench.bench_verify [threads]``.

One request with K = 4, next to sampling its one token (plain decoding) and five rows; then what a drafter without a model costs on
2,000 and more tokens. CPU time of a call, least and median of many; on a busy machine only the least means something. Logits are
those of ``bench_sampling``: rows from sharp to flat as the default model's are; the drafter's are near the target's.
"""

import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from engine.request import SamplingParams
from engine.sampling.sampler import Sampler, SampleRow
from engine.speculation.base import Draft, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draw import DraftSampler
from engine.speculation.lookahead import LookaheadDrafter
from engine.speculation.ngram import NgramDrafter
from engine.speculation.verify import Asked, verify
from tests.bench.bench_sampling import VOCAB, logits

K, ROWS = 4, (4, 10, 16, 22, 28)  # which rows of bench_sampling follow each other
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(temperature=1),
    "temperature 1, top_p 0.9": SamplingParams(temperature=1, top_p=0.9),
}


def measure(run: Callable[[], object], count: int = 40) -> tuple[float, float]:
    """Least and median CPU milliseconds of a call."""
    ms = []
    for _ in range(count):
        start = time.process_time()
        run()
        ms.append(1e3 * (time.process_time() - start))
    return min(ms[5:]), float(np.median(ms[5:]))


def show(name: str, run: Callable[[], object]) -> None:
    least, median = measure(run)
    print(f"  {name:44s} {least:6.2f} {median:6.2f} ms")


def acceptance(params: SamplingParams) -> None:
    sampler = Sampler(VOCAB)
    target = logits()[list(ROWS)]
    near = target + 0.3 * torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(params, 3, 0, 5 + i) for i in range(K + 1)]
    tokens = [s.token_id for s in sampler.sample(target, rows)]
    right, wrong = Draft.chain(tokens[:K]), Draft.chain([(token + 1) % VOCAB for token in tokens[:K]])
    show("plain: sample 1 row", lambda: sampler.sample(target[:1], rows[:1]))
    show("sample 5 rows", lambda: sampler.sample(target, rows))
    for name, draft in (("all right", right), ("all wrong", wrong)):
        show(f"draw rule, {name}", lambda draft=draft: verify([Asked(draft, rows[0], 0)], target, sampler))
        show("  observed, top 20", lambda draft=draft: verify([Asked(draft, rows[0], 0)], target, sampler, 20))
    drawer = DraftSampler(VOCAB)
    small = DraftSampler(VOCAB, torch.arange(0, VOCAB, 6))
    show("draw 1 token of 8,192", lambda: small.draw(near[:1, ::6], rows[:1]))
    if params.temperature == 0:
        return
    drawn = [drawer.draw(near[i : i + 1], rows[i : i + 1])[0] for i in range(K)]
    draft = Draft.chain([one.token_ids[0] for one in drawn], q=torch.stack([one.q for one in drawn]))
    accepted = len(verify([Asked(draft, rows[0], 0)], target, sampler)[0].path)
    show("the target's distributions, 5 rows", lambda: sampler.distributions(target, rows))
    show(f"rejection, {accepted} of {K} accepted", lambda: verify([Asked(draft, rows[0], 0)], target, sampler))
    show("  observed, top 20", lambda: verify([Asked(draft, rows[0], 0)], target, sampler, 20))


def proposing(length: int) -> None:
    """Text that repeats its input two tokens a step."""
    rng = random.Random(1)
    text = [rng.randrange(3000) for _ in range(length)]
    text += text[:400]
    for drafter in (NgramDrafter(SpeculativeConfig("ngram")), LookaheadDrafter(SpeculativeConfig("lookahead"))):
        request = SimpleNamespace(request_id="r", token_ids=text[:length], seed=1)
        ms = []
        for end in range(length, length + 400, 2):
            request.token_ids = text[:end]
            start = time.process_time()
            drafter.propose([Wanted(request, K, drafter.num_window)])
            ms.append(1e3 * (time.process_time() - start))
        name = f"{drafter.method} on {length:,} tokens"
        print(f"  {name:44s} {min(ms[1:]):6.3f} {float(np.median(ms[1:])):6.3f} ms, the first time {ms[0]:.1f} ms")


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for name, params in CASES.items():
        print(f"{name} (least, median)")
        acceptance(params)
    print("proposing (least, median)")
    for length in (2000, 8000):
        proposing(length)


if __name__ == "__main__":
    main()
