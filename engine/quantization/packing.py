"""Codes of 1 to 8 bits in bytes, one after another: code j of a row takes the bits j * bits and on, the lowest first.

With 4 bits that is two codes a byte, the even column in the low half. A row's last byte is filled up with zeros.
"""

import torch


def packed_width(columns: int, bits: int) -> int:
    """Bytes of a row."""
    return -(-columns * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes`` integers [N, K], each in [0, 2**bits) -> uint8 [N, ceil(K * bits / 8)]. ValueError for a code out of range."""
    _check_bits(bits)
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 1 << bits):
        raise ValueError(f"codes of {bits} bits lie in [0, {(1 << bits) - 1}], got {int(codes.min())} to {int(codes.max())}")
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes.contiguous()
    if bits == 4:
        if codes.shape[1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[:, 0::2] | (codes[:, 1::2] << 4)
    rows, columns = codes.shape
    stream = ((codes[:, :, None] >> torch.arange(bits, dtype=torch.uint8)) & 1).view(rows, -1)
    stream = torch.nn.functional.pad(stream, (0, packed_width(columns, bits) * 8 - stream.shape[1]))
    return (stream.view(rows, -1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The codes again: uint8 [N, columns]. ValueError where the width does not fit."""
    _check_bits(bits)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != packed_width(columns, bits):
        raise ValueError(
            f"{columns} codes of {bits} bits take uint8 [N, {packed_width(columns, bits)}], got {packed.dtype} {list(packed.shape)}"
        )
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).view(packed.shape[0], -1)[:, :columns]
    rows = packed.shape[0]
    stream = ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(rows, -1)[:, : columns * bits]
    return (stream.view(rows, columns, bits) << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, got {bits!r}")
