"""What the stages after the features share: the examples, the draft vocabulary, and the drafters in the making."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.model.checkpoint import Checkpoint
from engine.speculation.datastore import read_datastore, write_datastore
from engine.speculation.files import REST, read_drafter, write_atomically, write_drafter
from engine.speculation.training.cards import card_of, datastore_card
from engine.speculation.training.evaluate import Acceptance, acceptance, datastore_acceptance
from engine.speculation.training.features import Example, coverage, draft_vocabulary, read_examples, special_ids
from engine.speculation.training.generate import HELD_OUT, TRAINING, read_texts
from engine.speculation.training.initial import drafter_from_file, initial_drafter
from engine.speculation.training.modules import Drafter, Target
from engine.speculation.training.train import Plan, TargetEnds, Trainer

_DTYPE = torch.float16


class Workshop:
    """Everything that is needed to train a drafter for one target, kept in ``directory``."""

    def __init__(self, checkpoint: Checkpoint, target: Target, directory: Path, exit_layer: int, vocab: int) -> None:
        self.checkpoint, self.target, self.directory = checkpoint, target, directory
        self.exit_layer, self.vocab = exit_layer, vocab

    @cached_property
    def examples(self) -> list[Example]:
        """For training."""
        return read_examples(self.directory, TRAINING, self.exit_layer)

    @cached_property
    def held_out(self) -> list[Example]:
        return read_examples(self.directory, HELD_OUT, self.exit_layer)

    @cached_property
    def ends(self) -> TargetEnds:
        """With the draft vocabulary, which is chosen once."""
        path = self.directory / f"vocab-{self.vocab}.safetensors"
        if not path.exists():
            special = special_ids(self.checkpoint.tokenizer)
            texts = read_texts(self.directory, TRAINING)
            write_atomically(path, {"vocab": draft_vocabulary(texts, self.vocab, self.checkpoint.config.vocab_size, special)})
        vocab = load_file(path)["vocab"].long()
        return TargetEnds(self.target.embed_tokens.weight, self.target.head[vocab].contiguous(), vocab)

    @cached_property
    def coverage(self) -> float:
        """Share of the held-out text that the draft vocabulary has."""
        return coverage(read_texts(self.directory, HELD_OUT), self.ends.vocab)

    @property
    def training_tokens(self) -> int:
        return sum(len(example.token_ids) for example in self.examples)

    def train(self, method: str, plan: Plan, minutes: float | None = None, begin: Path | None = None) -> Trainer:
        """Train one drafter to the end of its plan, going on from its checkpoint where there is one. ``begin``: the drafter file
        that a new run begins at; None: at parts of the target."""
        if not self.examples:
            raise ValueError(f"{self.directory}: no features of any text: run the stages text and features first")
        sample = torch.cat([example.features for example in self.examples[:32]])
        drafter = initial_drafter(method, self.target, sample, exit_layer=self.exit_layer)
        if begin is not None:
            drafter.load_state_dict(self.read(begin, method).state_dict())
        name = f"{method}{self.exit_layer}" if method == "layer_skip" else method
        trainer = Trainer(drafter, self.ends, self.examples, plan, self.directory / f"run-{name}.safetensors")
        trainer.run(minutes)
        return trainer

    def write(self, trainer: Trainer, path: Path, target: str, gone_on: bool = False) -> Acceptance:
        """Round the weights as the file holds them, measure, and write file and card."""
        drafter = trainer.drafter
        with torch.no_grad():
            tensors = {name: value.to(_DTYPE).float() for name, value in drafter.state_dict().items()}
            kept = {name: value.clone() for name, value in drafter.state_dict().items()}
            drafter.load_state_dict(tensors)
        accepted, looked_up = self.accepted(drafter), self.accepted(drafter, prompt_lookup=True)
        drafter.load_state_dict(kept)
        card = card_of(
            drafter, trainer, accepted, looked_up, tokens=self.training_tokens, vocab=len(self.ends.vocab), coverage=self.coverage,
            held_out=len(self.held_out), target=target, gone_on=gone_on,
        )  # fmt: skip
        write_drafter(
            path, drafter.method, tensors, self.ends.vocab, config=self.checkpoint.config, target=target,
            target_sha256=self.checkpoint.checksum, settings=drafter.settings(), card=card, dtype=_DTYPE,
        )  # fmt: skip
        self.tell(drafter.method, accepted, looked_up)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
        return accepted

    def read(self, path: Path, method: str) -> Drafter:
        """A drafter that was written before. ValueError where the file is not one for this target."""
        return drafter_from_file(
            read_drafter(path, method, self.checkpoint.config, self.checkpoint.checksum), self.checkpoint.config
        )

    def accepted(self, drafter: Drafter, prompt_lookup: bool = False) -> Acceptance:
        return acceptance(drafter, self.ends, self.held_out, prompt_lookup=prompt_lookup)

    def write_datastore(self, path: Path, target: str) -> Acceptance:
        """All training text, measured and written with its card."""
        texts = [text.token_ids for text in read_texts(self.directory, TRAINING)]
        facts: dict[str, Any] = {
            "config": self.checkpoint.config, "target": target, "target_sha256": self.checkpoint.checksum
        }  # fmt: skip
        write_datastore(path, texts, **facts)
        accepted, looked_up = self.datastore_accepted(path), self.datastore_accepted(path, prompt_lookup=True)
        tokens = sum(len(text) for text in texts)
        card = datastore_card(accepted, looked_up, tokens=tokens, held_out=len(self.held_out), target=target)
        write_datastore(path, texts, **facts, card=card)
        self.tell(REST, accepted, looked_up)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
        return accepted

    def datastore_accepted(self, path: Path, prompt_lookup: bool = False) -> Acceptance:
        datastore = read_datastore(path, self.checkpoint.config, self.checkpoint.checksum)
        return datastore_acceptance(datastore, self.held_out, prompt_lookup=prompt_lookup)

    @staticmethod
    def tell(method: str, accepted: Acceptance, looked_up: Acceptance) -> None:
        print(f"{method}: {accepted}; {looked_up.mean_accepted:.2f} where the text is looked up first", flush=True)

    def untrained_exit(self) -> Acceptance:
        """Of the target's own norm and whole head after its first layers, nothing trained."""
        drafter = initial_drafter("layer_skip", self.target, torch.empty(0), exit_layer=self.exit_layer)
        whole = TargetEnds(self.target.embed_tokens.weight, self.target.head, torch.arange(self.checkpoint.config.vocab_size))
        return acceptance(drafter, whole, self.held_out)
