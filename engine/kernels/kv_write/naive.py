"""What ``kv_write`` does, token by token."""

import torch


def naive_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of x [heads, D], element i paired with i + D / 2; cos, sin [D / 2]."""
    a, b = x.double().chunk(2, -1)
    cos, sin = cos.double(), sin.double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def naive_quantize(x: torch.Tensor, codes: torch.dtype, scales: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [heads, D] -> codes (int8, or uint8 of float8_e4m3fn) and one scale a head, chosen as it is held."""
    largest = 127.0 if codes == torch.int8 else 448.0
    held = (x.float().abs().amax(-1) / largest).clamp(max=torch.inf if codes == torch.int8 else 128.0).to(scales)
    ratio = torch.where(held[:, None] > 0, x.float() / held.float()[:, None], 0.0).clamp(-largest, largest)
    if codes == torch.int8:
        return ratio.round().to(torch.int8), held
    return ratio.to(torch.float8_e4m3fn).view(torch.uint8), held


def naive_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """As ``kv_write``: in place in ``qkv`` (queries), ``kv_pool`` and ``kv_scales``."""
    kv_heads = kv_pool.shape[1] // 2
    heads = qkv.shape[1] - 2 * kv_heads
    for t, slot in enumerate(slots.tolist()):
        k = naive_rotate(qkv[t, heads : heads + kv_heads], cos[t], sin[t])
        qkv[t, :heads] = naive_rotate(qkv[t, :heads], cos[t], sin[t]).to(qkv.dtype)
        if slot < 0:
            continue
        kv = torch.cat([k, qkv[t, heads + kv_heads :].double()])
        if kv_scales is None:
            kv_pool[slot] = kv.to(kv_pool.dtype)
        else:
            kv_pool[slot], kv_scales[slot] = naive_quantize(kv, kv_pool.dtype, kv_scales.dtype)
