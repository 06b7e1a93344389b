"""Codes of few bits as 32-bit words: what a compiled product reads (``engine.model.few_rows``) and unpacking takes apart.

Words are called float32, and nothing computes with them as such: of the 32-bit types it is the one that a compiler's vectors are loaded
with at once, whatever the CPU. Loading codes byte by byte takes longer than what is computed from them.

- 8 bits: a word holds the codes of four neighbouring columns, [N, K / 4].
- 4 bits: eight codes of a row's group. Of each group the first half lies in the low bits of its bytes and the second half in the high ones, so that the
  bytes of a row hold neighbouring columns. As many rows as a vector has numbers lie side by side, since a scale belongs to
  one row and group: [N / LANES, G, group_size / 8, LANES], and as words of two float16, scale and minimum, [N / LANES, G, LANES].
"""

import torch

from engine.hardware.device import cpu_flags


def _lanes(flags: frozenset[str]) -> int:
    if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags:
        return 16
    return 8 if flags & {"avx2", "sve"} else 4


LANES = _lanes(cpu_flags())  # 32-bit numbers in a vector, as the compiler will have them


def as_words(values: torch.Tensor) -> torch.Tensor:
    """Contiguous, [..., n bytes] -> [..., n / 4], without a copy."""
    return values.view(torch.float32)


def pack_int4(codes: torch.Tensor, group_size: int) -> torch.Tensor:
    """uint8 [N, K], each below 16 -> words [N / LANES, G, group_size / 8, LANES]."""
    grouped = codes.view(codes.shape[0], -1, 2, group_size // 2)
    words = as_words(grouped[:, :, 0] | (grouped[:, :, 1] << 4))  # [N, G, group_size / 8]
    return side_by_side(words.flatten(1)).view(-1, *words.shape[1:], LANES)


def unpack_int4(words: torch.Tensor, group_size: int) -> torch.Tensor:
    """What ``pack_int4`` was given, uint8 [N, G, group_size]."""
    halves = _rows(words.flatten(1, 2)).view(torch.uint8)
    halves = halves.view(len(halves), -1, 1, group_size // 2)
    return torch.cat((halves & 15, halves >> 4), 2).flatten(2)


def pack_grids(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """float16 [N, G] each -> words [N / LANES, G, LANES]."""
    return side_by_side(as_words(torch.stack((scales, minima), -1))[..., 0])


def unpack_grids(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``pack_grids`` was given, as float32."""
    pairs = _rows(words).view(torch.float16).unflatten(1, (-1, 2)).float()
    return pairs[..., 0], pairs[..., 1]


def half(bits: torch.Tensor) -> torch.Tensor:
    """The finite float16 in the low bits of each int32 -> float32: its bits where a float32 has them, and the exponents' other zero."""
    return ((bits & 0x8000) << 16 | (bits & 0x7FFF) << 13).view(torch.float32) * 2.0**112


def side_by_side(of_rows: torch.Tensor) -> torch.Tensor:
    """[N, M] -> [N / LANES, M, LANES]."""
    return of_rows.view(-1, LANES, of_rows.shape[1]).transpose(1, 2).contiguous()


def _rows(tiles: torch.Tensor) -> torch.Tensor:
    """What ``side_by_side`` was given."""
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1])
