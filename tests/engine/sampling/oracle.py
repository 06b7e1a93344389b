"""A sampler written to be obviously right: float64 Python over the whole sorted vocabulary, one row at a time."""

import math
from dataclasses import dataclass

from engine.request import SamplingParams


@dataclass
class Answer:
    token_id: int
    prob: float
    kept: list[int]  # ids in order
    mass: float  # of the kept tokens, before renormalising
    logprob: float
    rank: int
    entropy: float
    margin: float  # how far u and the cuts are from an edge (relative to the mass)


def ordered(x: list[float]) -> list[int]:
    return sorted(range(len(x)), key=lambda i: (-x[i], i))


def softmax(x: list[float], temperature: float = 1.0) -> list[float]:
    top = max(x)
    if math.isinf(top):
        w = [1.0 if v == top else 0.0 for v in x]
    else:
        w = [math.exp((v - top) / temperature) for v in x]
    total = math.fsum(w)
    return [v / total for v in w]


def penalised(x: list[float], params: SamplingParams, prompt, output, rounded=lambda v: v) -> list[float]:
    """``rounded``: applied to each result; float32 rounding makes the order of near ties that of the engine."""
    x = list(x)
    for token in set(prompt) | set(output):
        v = x[token]
        v = rounded(v / params.repetition_penalty) if v > 0 else rounded(v * params.repetition_penalty)
        count = list(output).count(token)
        v = rounded(v - rounded(params.frequency_penalty * count))
        x[token] = rounded(v - (params.presence_penalty if count else 0))
    return x


def choose(raw: list[float], params: SamplingParams, u: float, prompt=(), output=(), rounded=lambda v: v) -> Answer:
    x = penalised(raw, params, prompt, output, rounded)
    order = ordered(x)
    margin = math.inf
    if params.temperature == 0:
        kept, p, token = [], [1.0 if i == order[0] else 0.0 for i in range(len(x))], order[0]
        mass = 0.0
    else:
        p = softmax(x, params.temperature)
        kept = [i for i in order if x[i] > -math.inf]
        if params.min_p:
            margin = (
                min(abs(p[i] / p[order[0]] - params.min_p) for i in kept if i != order[0] or params.min_p < 1)
                if len(kept) > 1
                else margin
            )
            kept = [i for i in kept if p[i] >= params.min_p * p[order[0]]]
        if params.top_k > 0:
            kept = kept[: params.top_k]
        if params.top_p < 1:
            total, before, nucleus = math.fsum(p[i] for i in kept), 0.0, []
            for i in kept:
                if before > 0:
                    margin = min(margin, abs(before / total - params.top_p))
                if nucleus and before / total >= params.top_p:
                    break
                nucleus.append(i)
                before += p[i]
            kept = nucleus
        mass = math.fsum(p[i] for i in kept)
        walked, token = 0.0, None
        for i in kept:
            walked += p[i] / mass
            margin = min(margin, abs(walked - u)) if walked < 1 - 1e-12 else margin
            if token is None and walked > u:
                token = i
        token = token if token is not None else [i for i in kept if p[i] > 0][-1]
        final = set(kept)
        p = [p[i] / mass if i in final else 0.0 for i in range(len(x))]
    q = softmax(raw)
    entropy = -math.fsum(v * math.log(v) for v in q if v > 0)
    return Answer(
        token, p[token], kept, mass, math.log(q[token]) if q[token] else -math.inf, ordered(raw).index(token) + 1, entropy, margin
    )
