"""What the kernel tests share: random requests in a paged pool, and how far from float64 a result may be."""

import os
from dataclasses import dataclass
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _fused() -> bool:
    try:
        from triton._C.libtriton import interpreter
    except ImportError:
        return True
    return not INTERPRETED or hasattr(interpreter, "fma_fp32")


# Whether tl.fma rounds once, as on a GPU. The interpreter of older Tritons rounds the product, too: a large logit then loses what
# makes it differ from the largest.
FUSED = _fused()

# Largest error of an attention output, in units of the largest |V|: twice the unit roundoff, once for the probabilities that meet V
# in its dtype and once for the output; float32 and float64: what adding up costs.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2 * 2.0**-11, torch.bfloat16: 2 * 2.0**-8}
NAN = float("nan")


def assert_attention(
    out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor, largest: float, shift: float = 0.0
) -> None:
    """``out`` and ``lse`` against float64; ``largest``: of the |V|; ``shift``: how large the logits are.

    Where the product of a logit and log2(e) is rounded before the largest is taken off (see ``FUSED``), a probability is off by some units
    in the last place of the logit, 2**-24 of it each, in float32 whatever the dtype.
    """
    error = (out.double() - want).abs().max().item() if out.numel() else 0.0
    assert error <= (TOLERANCE[out.dtype] + rounded_before(shift)) * max(largest, 1), error  # NaN fails too
    seen = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert bool((lse[~seen] == -torch.inf).all())
    assert bool((out.transpose(0, 1)[~seen] == 0).all())
    step = 1e-14 if lse.dtype == torch.float64 else 3e-7
    assert bool(((lse.double() - want_lse).abs()[seen] <= step * (1 + want_lse.abs()[seen])).all())


def rounded_before(shift: float) -> float:
    """What rounding logits of this size costs a probability here, relative to it."""
    return 0.0 if FUSED else 4 * shift * 2.0**-24


@dataclass
class Paged:
    """Requests of ``q_lens`` new rows and ``kv_lens`` keys in a pool whose other slots hold NaN, blocks in random order."""

    q: torch.Tensor
    pool: torch.Tensor
    tables: torch.Tensor
    cu: torch.Tensor
    lens: torch.Tensor
    block_size: int
    scales: torch.Tensor | None = None

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.pool, self.tables, self.cu, self.lens


def paged(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str, block_size: int = 4,
    codes: torch.dtype | None = None,
) -> Paged:  # fmt: skip
    """``lengths``: (rows, keys) of each request. Unused entries of the tables point far outside. ``codes``: int8 or uint8 (e4m3)."""
    need = [-(-k // block_size) for _, k in lengths]
    blocks = sum(need) + 3
    order = torch.randperm(blocks, dtype=torch.int32)
    tables = torch.full((len(lengths), max([*need, 1])), 1 << 30, dtype=torch.int32)
    used, slots = 0, []
    for r, (n, (_, keys)) in enumerate(zip(need, lengths, strict=True)):
        tables[r, :n] = order[used : used + n]
        slots += [int(tables[r, j // block_size]) * block_size + j % block_size for j in range(keys)]
        used += n
    shape = (blocks * block_size, 2 * kv_heads, dim)
    scales: Any = None
    if codes is None:
        pool = torch.full(shape, NAN).to(dtype)
        pool[slots] = torch.randn(len(slots), *shape[1:]).to(dtype)
    else:
        scales = torch.full(shape[:2], NAN, dtype=torch.bfloat16)
        scales[slots] = (torch.rand(len(slots), shape[1]) * 2 / (127 if codes == torch.int8 else 448)).bfloat16()
        if codes == torch.int8:
            pool = torch.randint(-127, 128, shape, dtype=torch.int8)
        else:
            pool = (torch.randn(shape) * 200).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = scales.to(device)
    rows = [q for q, _ in lengths]
    cu = torch.tensor([0, *rows]).cumsum(0).int()
    q = torch.randn(sum(rows), heads, dim).to(dtype)
    lens = torch.tensor([k for _, k in lengths], dtype=torch.int32)
    return Paged(*(t.to(device) for t in (q, pool, tables, cu, lens)), block_size, scales)


def varlen(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k."""
    cu_q = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    cu_k = torch.tensor([0, *(k for _, k in lengths)]).cumsum(0).int()
    tensors = [torch.randn(int(n), h, dim).to(dtype) for n, h in ((cu_q[-1], heads), (cu_k[-1], kv_heads), (cu_k[-1], kv_heads))]
    return tuple(t.to(device) for t in (*tensors, cu_q, cu_k))
