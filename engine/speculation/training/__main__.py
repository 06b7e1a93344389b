"""Train the drafters of a model on a CPU: text, features, training, report. What is done is not done again.

python -m engine.speculation.training                    # all of it, meant to stay under two hours on two cores
python -m engine.speculation.training --only eagle       # one drafter
python -m engine.speculation.training --tokens 20000 --minutes 2 --out drafters     # a try
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.store import DEFAULT, cache_directory, resolve_model
from engine.speculation.files import REST, shipped_drafter
from engine.speculation.training.cards import write_summary
from engine.speculation.training.features import compute_features
from engine.speculation.training.generate import SHARD, generate
from engine.speculation.training.modules import METHODS, Target, check_target
from engine.speculation.training.stages import Workshop
from engine.speculation.training.train import PLANS

_VOCAB = 12288
KINDS = (REST, *METHODS)


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(
        prog="python -m engine.speculation.training", description="Train drafters for a model on text that it writes itself."
    )
    own.add_argument("--model", default=DEFAULT, help=f"a known name, a path or a Hugging Face id (default: {DEFAULT})")
    own.add_argument("--tokens", type=int, default=400_000, help="of training text, prompts included (default: %(default)s)")
    own.add_argument("--vocab", type=int, help=f"size of the draft vocabulary (default: {_VOCAB}, or all)")
    own.add_argument("--exit-layer", type=int, help="layers before the exit of layer skipping (default: a third of them)")
    own.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS), help="train these (default: all)")
    own.add_argument("--stage", choices=("all", "text", "features", "train", "report"), default="all", help="do only this")
    own.add_argument("--epochs", type=int, help="passes over the text (default: one number for each drafter)")
    own.add_argument("--minutes", type=float, help="of training at most, for each drafter")
    own.add_argument(
        "--go-on", action="store_true", help="begin at the drafters that lie in --out, instead of at parts of the target"
    )
    own.add_argument("--text-minutes", type=float, help="of making text at most")
    own.add_argument(
        "--seed", type=int, default=0, help="of the training text: another one gives other prompts (default: %(default)s)"
    )
    own.add_argument("--held-out", type=int, default=64, help="prompts that are kept for the report (default: %(default)s)")
    own.add_argument("--shard", type=int, default=SHARD, help="texts that are written at once (default: %(default)s)")
    own.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: %(default)s)")
    own.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on with what earlier runs left")
    own.add_argument(
        "--out", type=Path, default=shipped_drafter("eagle").parent, help="where the drafters go (default: %(default)s)"
    )
    own.add_argument("--directory", type=Path, help="where text, features and checkpoints are kept (default: the user's cache)")
    return own


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    """All stages that are asked for. ValueError for a model that cannot be trained for, or a number out of range."""
    checkpoint = load_checkpoint(resolve_model(options.model))
    check_target(checkpoint.config)
    layers = checkpoint.config.num_layers
    exit_layer = max(1, layers // 3) if options.exit_layer is None else options.exit_layer
    vocab = min(_VOCAB, checkpoint.config.vocab_size) if options.vocab is None else options.vocab
    for name, got, low, high in (
        ("--tokens", options.tokens, 1, 1 << 30),
        ("--vocab", vocab, 1, checkpoint.config.vocab_size),
        ("--exit-layer", exit_layer, 1, layers - 1),
        ("--held-out", options.held_out, 1, 10_000),
        ("--shard", options.shard, 1, 10_000),
        ("--epochs", options.epochs or 1, 1, 10_000),
    ):
        if not low <= got <= high:
            raise ValueError(f"{name} must lie in [{low}, {high}], got {got}")
    directory = options.directory or cache_directory() / "training" / checkpoint.checksum[:12]
    stages = ("text", "features", "train", "report") if options.stage == "all" else (options.stage,)
    if not options.resume:
        forget(directory, stages)
    target = Target(checkpoint.config, checkpoint.tensors)
    if "text" in stages:
        generate(
            target, checkpoint.tokenizer, directory, exit_layer, tokens=options.tokens, held_out=options.held_out,
            minutes=options.text_minutes, seed=options.seed, shard=options.shard,
        )  # fmt: skip
    if "features" in stages:
        compute_features(target, directory, exit_layer)
    if "train" in stages or "report" in stages:
        train_and_report(options, checkpoint, Workshop(checkpoint, target, directory, exit_layer, vocab), stages)


def forget(directory: Path, stages: tuple[str, ...]) -> None:
    """Remove what earlier runs of these stages left."""
    patterns = {"text": ("text-*", "heldout-*", "vocab-*"), "features": ("features*",), "train": ("run-*",), "report": ()}
    for pattern in [pattern for stage in stages for pattern in patterns[stage]]:
        for path in directory.glob(f"{pattern}.safetensors"):
            path.unlink()


def train_and_report(options: argparse.Namespace, checkpoint: Checkpoint, shop: Workshop, stages: tuple[str, ...]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"draft vocabulary: {len(shop.ends.vocab):,} tokens, {100 * shop.coverage:.2f}% of held-out text", flush=True)
    for method in options.only:
        path = options.out / f"{method}.safetensors"
        if method == REST:
            if "train" in stages:
                shop.write_datastore(path, options.model)
            elif path.exists():
                shop.tell(method, shop.datastore_accepted(path), shop.datastore_accepted(path, prompt_lookup=True))
        elif "train" in stages:
            plan = PLANS[method] if options.epochs is None else replace(PLANS[method], epochs=options.epochs)
            trained = shop.train(method, plan, options.minutes, path if options.go_on else None)
            shop.write(trained, path, options.model, options.go_on)
        elif path.exists():
            drafter = shop.read(path, method)
            shop.tell(method, shop.accepted(drafter), shop.accepted(drafter, prompt_lookup=True))
    print(f"untrained exit after layer {shop.exit_layer}: {shop.untrained_exit()}", flush=True)
    write_summary(options.out, checkpoint.config, checkpoint.checksum)


if __name__ == "__main__":
    sys.exit(main())
