"""Drawing tokens on the device: launch and kernel.

Every filter keeps a prefix of the order (descending logit, ties by ascending id), and so does the walk that looks for the token where
the kept mass passes u. The end of a prefix is a logit and how many of the tokens that have just this logit belong to it; the logit is
found bit by bit, each bit by one look at the row (it stays in the cache): the largest threshold at or above which there is enough. 32 looks
a filter that is on, and 32 for the draw, against sorting; nothing but the row is read and nothing but the token is written.

Shapes: S rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_runs_here, check_tensor, on_device, wants_values
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED

_BLOCK = 4096


@triton.jit
def _load(row_ptr, start, vocab, BLOCK: tl.constexpr):
    """float32 [BLOCK] of the row from ``start`` on; -inf beyond its end."""
    i = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + i, mask=i < vocab, other=float("-inf")).to(tl.float32) + 0.0  # -0.0 becomes 0.0: they are equal


@triton.jit
def _keys(x):
    """int64 in [0, 2**32): ordered as the float32 numbers are."""
    bits = x.to(tl.int32, bitcast=True)
    unsigned = bits.to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits < 0, 0xFFFFFFFF - unsigned, unsigned + 0x80000000)


@triton.jit
def _weights(x, top, inverse, least):
    """exp((x - top) / temperature), 0 where that is under ``least``; 1 for the largest, also where that is inf."""
    weight = tl.where(x == top, 1.0, tl.exp((x - top) * inverse))
    return tl.where(weight >= least, weight, 0.0)


@triton.jit
def _from(row_ptr, vocab, top, inverse, least, key, BLOCK: tl.constexpr):
    """How many tokens that weigh something have keys >= ``key``, and what they weigh: two float64."""
    count, mass = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        x = _load(row_ptr, start, vocab, BLOCK)
        weight = tl.where(_keys(x) >= key, _weights(x, top, inverse, least), 0.0)
        count += tl.sum((weight > 0).to(tl.float32), 0).to(tl.float64)
        mass += tl.sum(weight, 0).to(tl.float64)
    return count, mass


@triton.jit
def _end(row_ptr, vocab, top, inverse, least, target, BY_COUNT: tl.constexpr, BEYOND: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which on there is at least ``target`` (BEYOND: more than that) of count or mass."""
    key = tl.full([], 0, tl.int64)
    for step in range(0, 32):
        trial = key + (tl.full([], 1, tl.int64) << (31 - step))
        count, mass = _from(row_ptr, vocab, top, inverse, least, trial, BLOCK)
        have = mass
        if BY_COUNT:
            have = count
        if BEYOND:
            enough = have > target
        else:
            enough = have >= target
        key = tl.where(enough, trial, key)
    return key


@triton.jit
def sample_kernel(
    logits_ptr,  # [S, V], row stride stride
    u_ptr,  # float64 [S]
    temperature_ptr,  # float32 [S]; 0: the likeliest token
    top_k_ptr,  # int32 [S]
    top_p_ptr,  # float32 [S]
    min_p_ptr,  # float32 [S], or None
    token_ptr,  # int64 [S]
    stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    greedy = temperature == 0
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    least = tl.full([], 0.0, tl.float32)
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + row)
    top_k = tl.where(greedy, 1, top_k)

    top, broken = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _load(row_ptr, start, vocab, BLOCK)
        broken += tl.sum((x != x).to(tl.float32), 0)
        top = tl.maximum(top, tl.max(x, 0))
    if (broken > 0) | (top == float("-inf")):
        tl.store(token_ptr + row, tl.full([], -1, tl.int64))
        return

    # The end of what is kept so far: all keys above ``last``, and ``ties`` of the tokens whose key it is.
    last, ties = tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64)
    count, kept = _from(row_ptr, vocab, top, inverse, least, last, BLOCK)
    if top_k < count:
        last = _end(row_ptr, vocab, top, inverse, least, top_k.to(tl.float64), True, False, BLOCK)
        above, above_mass = _from(row_ptr, vocab, top, inverse, least, last + 1, BLOCK)
        count, mass = _from(row_ptr, vocab, top, inverse, least, last, BLOCK)
        ties = top_k.to(tl.float64) - above
        kept = above_mass + ties * (mass - above_mass) / (count - above)
    if top_p < 1:
        target = top_p.to(tl.float64) * kept
        key = _end(row_ptr, vocab, top, inverse, least, target, False, False, BLOCK)
        above, above_mass = _from(row_ptr, vocab, top, inverse, least, key + 1, BLOCK)
        count, mass = _from(row_ptr, vocab, top, inverse, least, key, BLOCK)
        each = (mass - above_mass) / (count - above)
        need = tl.minimum(tl.maximum(tl.ceil((target - above_mass) / each), 1.0), count - above)
        if (key > last) | ((key == last) & (need < ties)):  # else rounding went past what top_k kept
            last, ties = key, need
            kept = above_mass + need * each

    target = tl.load(u_ptr + row) * kept
    key = _end(row_ptr, vocab, top, inverse, least, target, False, True, BLOCK)
    above, above_mass = _from(row_ptr, vocab, top, inverse, least, key + 1, BLOCK)
    count, mass = _from(row_ptr, vocab, top, inverse, least, key, BLOCK)
    each = (mass - above_mass) / tl.maximum(count - above, 1.0)
    at = tl.minimum(tl.maximum(tl.floor((target - above_mass) / each), 0.0), count - above - 1)
    if (key < last) | ((key == last) & (ties > 0) & (at >= ties)):  # rounding left the sum short of u: the last kept token
        key, at = last, ties - 1

    token, passed = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64)
    wanted = at.to(tl.int64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        same = ((_keys(_load(row_ptr, start, vocab, BLOCK)) == key) & (i < vocab)).to(tl.int32)
        turn = passed + (tl.cumsum(same, 0) - 1).to(tl.int64)
        token = tl.maximum(token, tl.max(tl.where((same == 1) & (turn == wanted), i, -1), 0).to(tl.int64))
        passed += tl.sum(same, 0).to(tl.int64)
    tl.store(token_ptr + row, token)


def sample(
    logits: torch.Tensor,
    u: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None = None,
    *,
    validate: bool | None = None,
    block: int = _BLOCK,
) -> torch.Tensor:
    """int64 [S]: the token of each row of ``logits`` [S, V] (rows contiguous) that the draw ``u`` float64 [S] in [0, 1) falls on.

    Weights exp(logit / temperature), float32 [S] (0: the likeliest token); kept are those of at least ``min_p`` float32 [S] times
    the largest (None: all), of these the ``top_k`` int32 [S] first in descending order (ties by id; V or more: all), of these as many
    as it takes to come to ``top_p`` float32 [S] of their mass; u is laid along what is left. A block's masses are added in float32, the
    blocks in float64: within about 1e-6 of an edge a token may differ from that of float64. -1: a row with NaN, or nothing above -inf.
    validate: look at the values (None: on the CPU). ValueError for what does not fit.
    """
    check_tensor("logits", logits, (None, None), FLOATS, dense=False)
    rows, vocab = logits.shape
    if not vocab:
        raise ValueError("logits must have at least one token")
    if not isinstance(block, int) or block < 16 or block & (block - 1):
        raise ValueError(f"block must be a power of two >= 16, got {block!r}")
    check_tensor("u", u, (rows,), (torch.float64,), logits)
    check_tensor("top_k", top_k, (rows,), (torch.int32,), logits)
    for name, tensor in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if tensor is not None:
            check_tensor(name, tensor, (rows,), (torch.float32,), logits)
    if rows and wants_values(logits, validate):
        for name, tensor, good, allowed in (
            ("u", u, (u >= 0) & (u < 1), "in [0, 1)"),
            ("temperature", temperature, (temperature >= 0) & (temperature < torch.inf), ">= 0"),
            ("top_k", top_k, top_k >= 1, ">= 1"),
            ("top_p", top_p, (top_p > 0) & (top_p <= 1), "in (0, 1]"),
            ("min_p", min_p, None if min_p is None else (min_p >= 0) & (min_p <= 1), "in [0, 1]"),
        ):
            if tensor is not None and good is not None and not bool(good.all()):
                raise ValueError(f"{name} must be {allowed}, got {tensor[~good][:8].tolist()}")
    check_runs_here(logits, bool(INTERPRETED.value))
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        with on_device(logits):
            sample_kernel[(rows,)](
                logits,
                u,
                temperature,
                top_k,
                top_p,
                min_p,
                tokens,
                logits.stride(0),
                vocab,
                BLOCK=block,
                num_warps=16,
                enable_fp_fusion=True,
            )
    return tokens


def sample_spec(dtype: torch.dtype = torch.float32) -> CompileSpec:
    """What ``compile_spec`` needs."""
    f32 = pointer(torch.float32)
    types = {
        "logits_ptr": pointer(dtype),
        "u_ptr": pointer(torch.float64),
        "temperature_ptr": f32,
        "top_k_ptr": pointer(torch.int32),
    }
    types |= {"top_p_ptr": f32, "min_p_ptr": f32, "token_ptr": pointer(torch.int64)}
    aligned = (*types, "stride", "vocab")
    types |= dict.fromkeys(("stride", "vocab"), TYPE_NAMES[torch.int32])
    return CompileSpec(sample_kernel, types, {"BLOCK": _BLOCK}, 16, 2, aligned)
