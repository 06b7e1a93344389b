"""Models' facts for the planner's tests."""

from typing import Any


def facts(*, hidden: int, ff: int, layers: int, heads: int, kv: int, head_dim: int, vocab: int, tied: bool) -> dict[str, Any]:
    q, width = heads * head_dim, kv * head_dim
    layer = hidden * (2 * q + 2 * width + 3 * ff) + 2 * hidden
    return {
        "hidden_size": hidden, "intermediate_size": ff, "num_layers": layers, "num_attention_heads": heads, "num_kv_heads": kv,
        "head_dim": head_dim, "vocab_size": vocab, "tie_word_embeddings": tied, "sliding_windows": [None] * layers,
        "num_parameters": layers * layer + hidden + vocab * hidden * (1 if tied else 2),
    }  # fmt: skip


LLAMA2_7B = facts(hidden=4096, ff=11008, layers=32, heads=32, kv=32, head_dim=128, vocab=32000, tied=False)
LLAMA3_8B = facts(hidden=4096, ff=14336, layers=32, heads=32, kv=8, head_dim=128, vocab=128256, tied=False)
SMOL = facts(hidden=576, ff=1536, layers=30, heads=9, kv=3, head_dim=64, vocab=49152, tied=True)
