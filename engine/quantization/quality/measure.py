"""One measurement of a model's quality: perplexity on two texts, divergence from a reference on the same pass, two probes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.quantization.quality import texts
from engine.quantization.quality.divergence import TOP_P, Accumulator, Divergence
from engine.quantization.quality.perplexity import STRIDE, WINDOW, Perplexity, Progress, Watch, cost, perplexity
from engine.quantization.quality.probes import ProbeResult, Prompt, arithmetic_prompt, retrieval_prompt, run_probe
from engine.quantization.quality.reference import POSITIONS, Reference, fingerprint
from engine.quantization.quality.rows import Logits, Tokenizing

RETRIEVAL, ARITHMETIC = "retrieval", "arithmetic"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much is measured. The defaults read some 20,000 tokens. Numbers of two models can be compared under equal budgets only."""

    tokens: int = texts.TOKENS  # of each text, at most
    window: int = WINDOW
    stride: int = STRIDE
    positions: int = POSITIONS  # at which divergence is measured, over all texts
    top_p: float = TOP_P  # of the nuclei that are compared
    retrieval: tuple[int, ...] = (256, 256, 512, 512, 1024, 1024)  # tokens of each prompt; (): no such probe
    arithmetic: int = 4  # prompts of 24 scored additions, of one and of two digits by turns; 0: no such probe
    seed: int = 0  # of the probes

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model is given."""
        return max(self.window, *self.retrieval, 512 if self.arithmetic else 0)


@dataclass(frozen=True, eq=False, slots=True)
class Quality:
    """What was measured. ``perplexities`` and ``probes`` by name; ``seconds``: what each part took.

    ``divergence``: from the reference; None where there was none. ``facts``: what the texts are (they differ by Python version).
    """

    budget: Budget
    perplexities: Mapping[str, Perplexity]
    divergence: Divergence | None
    probes: Mapping[str, ProbeResult]
    seconds: Mapping[str, float]
    tokens_read: int
    facts: Mapping[str, str]


def measure_quality(
    logits: Logits,
    tokenizer: Tokenizing,
    reference: Reference | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Measure a model. ``reference``: what ``measure_reference`` gave for the 16-bit model under the same budget.

    ``progress(done, total)`` counts tokens that the model has read. The same model gives the same numbers, but for its own rounding.
    ValueError: a reference of other texts or windows, and see ``perplexity`` and ``run_probe``.
    """
    plan = _Plan(tokenizer, budget or Budget())
    if reference is None:
        return plan.run(logits, None, lambda text: None, progress)
    plan.check(reference)
    found = Accumulator(plan.budget.top_p, reference.held)
    return plan.run(logits, found, lambda text: reference.comparer(text, found), progress)


def measure_reference(
    logits: Logits, tokenizer: Tokenizing, budget: Budget | None = None, progress: Progress | None = None
) -> tuple[Quality, Reference]:
    """Measure the model that others are compared with, and keep its logits at ``budget.positions`` positions (25 MB for 256)."""
    plan = _Plan(tokenizer, budget or Budget())
    reference = plan.reference()
    return plan.run(logits, None, reference.recorder, progress), reference


class _Plan:
    """The texts and prompts of a budget, as tokens."""

    def __init__(self, tokenizer: Tokenizing, budget: Budget) -> None:
        self.tokenizer = tokenizer
        self.budget = budget
        self.texts = texts.evaluation_tokens(tokenizer, budget.tokens)
        seeds = [f"{budget.seed} {i}" for i in range(max(len(budget.retrieval), budget.arithmetic))]
        asked = {
            RETRIEVAL: [retrieval_prompt(tokenizer, n, seed) for n, seed in zip(budget.retrieval, seeds)],
            ARITHMETIC: [arithmetic_prompt(tokenizer, 1 + i % 2, seed) for i, seed in enumerate(seeds[: budget.arithmetic])],
        }
        self.prompts: dict[str, list[Prompt]] = {name: prompts for name, prompts in asked.items() if prompts}

    def reference(self) -> Reference:
        return Reference(self.texts, self.budget.window, self.budget.stride, self.budget.positions)

    def check(self, reference: Reference) -> None:
        if reference.fingerprint != fingerprint(self.texts, self.budget.window, self.budget.stride):
            raise ValueError(
                f"the reference was made from other texts, tokens or windows than these ({self.budget.tokens} tokens of each text, "
                f"window {self.budget.window}, stride {self.budget.stride}): measure it again"
            )
        if not reference.complete:
            raise ValueError("the reference is not complete: its measurement did not run to the end")

    def run(
        self, logits: Logits, found: Accumulator | None, watch: Callable[[str], Watch | None], progress: Progress | None
    ) -> Quality:
        budget = self.budget
        read = {name: cost(len(ids), budget.window, budget.stride) for name, ids in self.texts.items()}
        read |= {name: sum(len(prompt.token_ids) for prompt in prompts) for name, prompts in self.prompts.items()}
        total, seconds = sum(read.values()), {}
        perplexities, probes = {}, {}
        for name in read:
            before = sum(list(read.values())[: list(read).index(name)])
            told = None if progress is None else (lambda done, _, before=before: progress(before + done, total))
            start = time.perf_counter()
            if name in self.texts:
                perplexities[name] = perplexity(
                    logits, self.texts[name], window=budget.window, stride=budget.stride,
                    text=name, watch=watch(name), progress=told,
                )  # fmt: skip
            else:
                probes[name] = run_probe(logits, self.tokenizer, name, self.prompts[name], told)
            seconds[name] = time.perf_counter() - start
        divergence = None if found is None else found.result()
        return Quality(budget, perplexities, divergence, probes, seconds, total, texts.facts())
