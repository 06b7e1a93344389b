"""What a drafter's file says of how it was made, and the summary beside the files."""

from pathlib import Path

import torch

from engine.model.config import ModelConfig
from engine.speculation.datastore import read_datastore
from engine.speculation.files import METHODS, REST, read_drafter
from engine.speculation.training.evaluate import Acceptance
from engine.speculation.training.modules import Drafter
from engine.speculation.training.train import Trainer

_WHAT = {
    "eagle": "EAGLE layer: one decoder layer over the target's last feature and the next token's embedding; begun at the target's last layer.",
    "draft_model": "Draft model: {num_layers} decoder layers of the target's width under its embedding and head; begun at the target's first {num_layers}.",
    "medusa": "Medusa: {num_heads} heads, one residual block each, begun at zero.",
    "layer_skip": "Exit after the target's first {exit_layer} layers: a norm and a residual linear adapter, begun at the target's final norm and zero.",
}


def card_of(
    drafter: Drafter,
    trainer: Trainer,
    accepted: Acceptance,
    looked_up: Acceptance,
    *,
    tokens: int,
    vocab: int,
    coverage: float,
    held_out: int,
    target: str,
    gone_on: bool = False,
) -> str:
    """One paragraph of plain text. ``gone_on``: the run began at a drafter that was trained before."""
    heads = len(drafter.heads) if hasattr(drafter, "heads") else 0  # type: ignore[arg-type]
    what = _WHAT[drafter.method].format(**{"num_heads": heads, **drafter.settings()})
    plan = trainer.plan
    threads = "one thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    depth = f", draft depths 1 to {plan.depth}" if plan.depth > 1 else ""
    features = f", smooth L1 on features with weight {plan.feature_loss:g}" if plan.feature_loss else ""
    return (
        f"{what} Trained on {tokens:,} tokens that {target} wrote itself (temperatures 0, 0.7 and 1, half through its chat template), "
        f"{trainer.step:,} steps of about {plan.batch_tokens:,} tokens ({trainer.step / trainer.steps_an_epoch:.1f} passes), "
        f"{trainer.seconds / 60:.0f} minutes on a CPU with {threads}; float32, AdamW, learning rate "
        f"{plan.learning_rate:g} falling along a cosine{' (going on from an earlier run, on text made the same way)' if gone_on else ''}; loss: KL divergence to the target's distribution over a draft vocabulary of "
        f"{vocab:,} tokens ({100 * coverage:.1f}% of held-out text){depth}{features}. "
        f"{reached(accepted, looked_up, held_out)}"
    )


def reached(accepted: Acceptance, looked_up: Acceptance, held_out: int) -> str:
    return (
        f"Greedy drafts of {len(accepted.per_position)} on the text that the target wrote greedily for {held_out} held-out prompts: "
        f"{accepted}; where the text so far is looked up first (prompt_lookup), {looked_up.mean_accepted:.2f}."
    )


def datastore_card(accepted: Acceptance, looked_up: Acceptance, *, tokens: int, held_out: int, target: str) -> str:
    return (
        f"Datastore: {tokens:,} tokens that {target} wrote itself (temperatures 0, 0.7 and 1, half through its chat template), "
        f"prompts included. {reached(accepted, looked_up, held_out)}"
    )


def write_summary(directory: Path, config: ModelConfig, sha256: str) -> None:
    """CARD.md: what lies in the directory, out of the files themselves."""
    lines = [
        "# Drafters",
        "",
        "Made by `python -m engine.speculation.training`; derived from the target's weights, whose licence they carry. The figures",
        "are those of `engine/speculation/training/evaluate.py`, which says exactly what is counted.",
        "",
    ]
    for method in METHODS:
        path = directory / f"{method}.safetensors"
        if path.exists():
            file = read_drafter(path, method, config, sha256)
            lines += [f"## {path.name}", "", f"{path.stat().st_size / 1e6:.1f} MB, for {file.target}. {file.card}", ""]
    path = directory / f"{REST}.safetensors"
    if path.exists():
        card = read_datastore(path, config, sha256).card
        lines += [f"## {path.name}", "", f"{path.stat().st_size / 1e6:.1f} MB. {card}", ""]
    (directory / "CARD.md").write_text("\n".join(lines), encoding="utf-8")
