"""Mistakes that people make in the exercises, and a piece of the hint that each should get."""

from typing import NamedTuple


class Wrong(NamedTuple):
    source: str  # in place of the exercise cell
    hint: str  # what the check cell must say


def _tokens(formula: str) -> str:
    return f"def tokens_computed(prompt_tokens, output_tokens):\n    return {formula}\n"


def _blocks(body: str) -> str:
    return f"def physical_blocks(prompt_tokens, output_tokens, n, block_size):\n    {body}\n"


def _answers(cause: str, culprit: str, computed_again: str) -> str:
    return f"cause = {cause}\nculprit = {culprit}\ncomputed_again = {computed_again}\n"


_LOST = 'next(e for e in log if isinstance(e, RequestPreempted) and e.request_id == "summary").num_computed_tokens'
_FOUND = "next(e for e in log if isinstance(e, PrefixLookup) and e.recompute).num_hit_tokens"


def _nucleus(body: str) -> str:
    return f"def nucleus_size(probabilities, p):\n    {body}\n"


def _speedup(body: str) -> str:
    return f"def speedup(a, K, c, v):\n    {body}\n"


def _bits(formula: str) -> str:
    return f"def bits_per_weight(bits, group_size, scale_bits):\n    return {formula}\n"


def _padding(formula: str) -> str:
    batches = "    taken = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]\n"
    return f"def padding(lengths, batch):\n{batches}    return {formula}\n"


def _crossover(formula: str) -> str:
    return f"def crossover(peak, bandwidth, bytes_per_weight):\n    return {formula}\n"


def _merge(body: str) -> str:
    return f"import math\n\ndef merge(out_a, lse_a, out_b, lse_b):\n    return {body}\n"


WRONG: dict[str, list[Wrong]] = {
    "00_quickstart": [
        Wrong(_tokens("prompt_tokens + output_tokens"), "One too many for each"),
        Wrong(_tokens("output_tokens"), "What does the first step compute?"),
        Wrong(_tokens("prompt_tokens * output_tokens"), "without a KV cache"),
        Wrong(_tokens("42"), "add up the column"),
    ],
    "01_kv_cache": [
        Wrong(_blocks("return n * -(-(prompt_tokens + output_tokens - 1) // block_size)"), "As if nobody shared"),
        Wrong(
            _blocks(
                "s = prompt_tokens // block_size; return s + n * (-(-(prompt_tokens + output_tokens) // block_size) - s)",
            ),
            "one too many",
        ),
        Wrong(
            _blocks(
                "s = -(-prompt_tokens // block_size); return s + n * (-(-(prompt_tokens + output_tokens - 1) // block_size) - s)",
            ),
            "does not stay shared",
        ),
        Wrong(_blocks("return -(-(prompt_tokens + output_tokens - 1) // block_size)"), "what one sequence holds"),
        Wrong(_blocks("return 0"), "Draw the block tables"),
    ],
    "02_reading_a_run": [
        Wrong(_answers("'waiting for a place'", "'story'", "0"), "was it running before?"),
        Wrong(_answers("'preempted'", "'greeting'", "0"), "for whom the blocks were taken"),
        Wrong(_answers("'preempted'", "'letter'", _LOST), "not wiped"),
        Wrong(_answers("'preempted'", "'letter'", _FOUND), "left to compute again"),
        Wrong(_answers("'preempted'", "'letter'", "None"), "how many tokens were found"),
    ],
    "03_sampling": [
        Wrong(_nucleus("from itertools import accumulate; return sum(s <= p for s in accumulate(probabilities))"), "One too few"),
        Wrong(_nucleus("return sum(x >= 1 - p for x in probabilities)"), "each probability with 1 - p"),
        Wrong(_nucleus("return sum(x >= p for x in probabilities)"), "each probability with p"),
        Wrong(_nucleus("return 1"), "the engine kept"),
    ],
    "04_speculation": [
        Wrong(_speedup("return sum(a**i for i in range(1, K + 1)) / (c * K + v)"), "One token too few"),
        Wrong(_speedup("return sum(a**i for i in range(K + 1))"), "What does such a pass cost?"),
        Wrong(_speedup("return (a * K + 1) / (c * K + v)"), "only if all before it were accepted"),
        Wrong(_speedup("return sum(a**i for i in range(K + 1)) / (c * K)"), "checks the guesses is missing"),
        Wrong(_speedup("return K"), "one token for cK + v"),
    ],
    "05_quantization": [
        Wrong(_bits("bits"), "The codes alone"),
        Wrong(_bits("bits + scale_bits / group_size"), "One number a group is missing"),
        Wrong(_bits("bits + 2 * scale_bits"), "shared by the whole group"),
        Wrong(_bits("42.0"), "For (4, 32, 16)"),
    ],
    "06_batching": [
        Wrong(_padding("1 - sum(lengths) / len(lengths) / max(lengths)"), "all of them in one batch"),
        Wrong(_padding("sum(len(t) * max(t) for t in taken) / sum(lengths) - 1"), "Padding over useful tokens"),
        Wrong(_padding("1 - sum(lengths) / sum(batch * max(t) for t in taken)"), "need not be full"),
        Wrong(_padding("sum(1 - sum(t) / len(t) / max(t) for t in taken) / len(taken)"), "a long batch counts for more"),
        Wrong(
            _padding(
                "padding(sorted(lengths), batch) if lengths != sorted(lengths) else 1 - sum(lengths) / sum(len(t) * max(t) for t in taken)"
            ),
            "Sorted by length first",
        ),
        Wrong(_padding("0.5"), "with batch 2 it is"),
    ],
    "07_attention": [
        Wrong(_merge("(out_a + out_b) / 2"), "A plain mean"),
        Wrong(
            _merge("(lse_a * out_a + lse_b * out_b) / (lse_a + lse_b) if lse_a + lse_b else (out_a + out_b) / 2"),
            "the logarithms of the sums",
        ),
        Wrong(_merge("math.exp(lse_a) * out_a + math.exp(lse_b) * out_b"), "nobody has divided by the whole sum"),
        Wrong(
            _merge("(math.exp(lse_a) * out_a + math.exp(lse_b) * out_b) / (math.exp(lse_a) + math.exp(lse_b))"),
            "exp(1000) overflows",
        ),
        Wrong(_merge("42.0"), "For (1.0, 2.0, 3.0, 0.5)"),
    ],
    "08_roofline": [
        Wrong(_crossover("ceil(peak / bandwidth)"), "That is the ridge"),
        Wrong(_crossover("ceil(peak / bandwidth * bytes_per_weight)"), "two operations with each weight"),
        Wrong(_crossover("ceil(peak / bandwidth / 2)"), "how many bytes?"),
        Wrong(_crossover("ceil(peak / bandwidth / bytes_per_weight / 2)"), "the batch must grow"),
        Wrong(_crossover("42"), "on an A100 it is"),
    ],
}
