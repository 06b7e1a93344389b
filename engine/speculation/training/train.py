"""Stage 3: one drafter learns the target's distribution. A run that was stopped goes on from its last checkpoint."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from engine.speculation.files import write_atomically
from engine.speculation.training.features import Example, ExampleBatch
from engine.speculation.training.modules import Drafter, Eagle

_SAVE_SECONDS = 60.0
_PRINT_SECONDS = 15.0
_VECTORS = 3.0  # norms and biases, whose entries are larger than those of matrices, learn that much faster


@dataclass(frozen=True)
class Plan:
    """How a drafter is trained. The learning rate rises over ``warmup`` steps and falls to zero along a cosine."""

    epochs: int
    learning_rate: float
    depth: int = 1  # draft depths that are trained; EAGLE's own predictions are fed back for those beyond the first
    decay: float = 0.8  # weight of each further depth, relative to the one before
    feature_loss: float = 0.0  # weight of the smooth L1 distance between predicted and true feature
    batch_tokens: int = 1024
    frequent: int = 1536  # of the draft vocabulary, the tokens that every step's loss sees (beside those of the batch),
    sampled: int = 1024  # and how many of the others, drawn anew for each step and weighted up
    warmup: int = 30
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0


# Few passes: with 200,000 tokens, EAGLE's first draft token was accepted 57% of the time on training text after four of them and 35% on
# held-out text. More text is worth more than more passes.
PLANS = {
    "eagle": Plan(epochs=5, learning_rate=1e-3, depth=3, feature_loss=0.5),
    "draft_model": Plan(epochs=4, learning_rate=1e-3),
    "medusa": Plan(epochs=3, learning_rate=1e-3, depth=4),
    "layer_skip": Plan(epochs=2, learning_rate=1e-3),
}


@dataclass(frozen=True)
class TargetEnds:
    """What a drafter shares with its target: embedding [vocab_size, E] and the head's rows of the draft vocabulary [V, E]."""

    embedding: torch.Tensor
    head: torch.Tensor
    vocab: torch.Tensor  # int64 [V], ascending


class Trainer:
    """One training run. The same examples, plan and number of steps give the same weights, with or without a break between."""

    def __init__(self, drafter: Drafter, ends: TargetEnds, examples: list[Example], plan: Plan, checkpoint: Path) -> None:
        if not examples:
            raise ValueError("there are no examples to train on: make text and features first")
        self.drafter, self.ends, self.examples, self.plan, self.checkpoint = drafter, ends, examples, plan, checkpoint
        self.parameters = dict(drafter.named_parameters())
        decayed = [p for p in self.parameters.values() if p.dim() > 1]
        others = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": plan.weight_decay, "times": 1.0},
            {"params": others, "weight_decay": 0.0, "times": _VECTORS},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))
        self.step = 0
        self.seconds = 0.0  # of training, over all sittings
        sample = torch.cat([example.features for example in examples[:32]]).float()
        self.scale = 1 / float(
            sample.square().mean().sqrt()
        )  # of features, so that their distance has the same meaning everywhere
        self.row_of = torch.full((len(ends.embedding),), -1).index_put((ends.vocab,), torch.arange(len(ends.vocab)))
        tokens = torch.cat([example.token_ids for example in examples])
        counts = tokens.bincount(minlength=len(ends.embedding))[ends.vocab]
        self.by_frequency = counts.argsort(descending=True, stable=True)  # rows of the head
        if checkpoint.exists():
            self.load()

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.plan.epochs * self.steps_an_epoch

    @property
    def steps_an_epoch(self) -> int:
        return len(list(self._batches(0)))

    def run(self, minutes: float | None = None, last_step: int | None = None) -> None:
        """Train to the end, or for ``minutes`` in all (the learning rate then falls to zero by that time), or up to ``last_step``."""
        steps = self.steps
        mean: dict[str, float] = {}
        began, printed, saved = time.monotonic() - self.seconds, 0.0, time.monotonic()
        for rows in self._remaining(steps):
            progress = self.step / steps
            if minutes is not None:
                progress = max(progress, self.seconds / (60 * minutes) if minutes > 0 else 1.0)
            if progress >= 1 or self.step == last_step:
                break
            for name, value in self._train(rows, progress).items():
                mean[name] = value if name not in mean else 0.95 * mean[name] + 0.05 * value
            self.step += 1
            now = time.monotonic()
            self.seconds = now - began
            if now - printed > _PRINT_SECONDS:
                printed = now
                self._print(progress, mean)
            if now - saved > _SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()
        self._print(1.0 if last_step is None else self.step / steps, mean)

    def _remaining(self, steps: int) -> Iterator[list[int]]:
        """Batches from the current step on. Epochs differ a little in how many they have."""
        first = epoch = 0
        while self.step < steps:
            batches = list(self._batches(epoch))
            yield from batches[max(0, self.step - first) :]
            first += len(batches)
            epoch += 1

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        """Examples of similar length together, mixed anew in every epoch."""
        generator = torch.Generator().manual_seed(self.plan.seed * 1000 + epoch)
        lengths = [len(example.token_ids) for example in self.examples]
        noisy = torch.tensor(lengths) + 32 * torch.rand(len(lengths), generator=generator)
        batches: list[list[int]] = [[]]
        longest = 0
        for i in noisy.argsort().tolist():
            longest = max(longest, lengths[i])
            if batches[-1] and (len(batches[-1]) + 1) * longest > self.plan.batch_tokens:
                batches.append([])
                longest = lengths[i]
            batches[-1].append(i)
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]

    def _train(self, rows: list[int], progress: float) -> dict[str, float]:
        rate = self.plan.learning_rate * min(1.0, (self.step + 1) / self.plan.warmup) * (1 + math.cos(math.pi * progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["times"]
        loss, parts = self.loss(ExampleBatch.of([self.examples[i] for i in rows]), self.depth_at(progress))
        if not loss.isfinite():
            raise RuntimeError(f"the loss of {self.drafter.method} is {float(loss.detach())} at step {self.step}")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.plan.clip)
        self.optimizer.step()
        return parts

    def depth_at(self, progress: float) -> int:
        """EAGLE learns one draft step first, and later to go on from its own predictions."""
        if not isinstance(self.drafter, Eagle):
            return self.plan.depth
        return min(self.plan.depth, 1 + int(progress / 0.3))

    def rows(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's rows that this step's loss sees, int64 [R], and what is added to their logits, float32 [R].

        The whole vocabulary would be most of the work. The frequent tokens and those of the batch are always there; the rest is
        represented by a sample, with weight (rest / sample) in every sum over the vocabulary, so that the sums are right on average.
        """
        count = len(self.ends.vocab)
        if count <= self.plan.frequent + self.plan.sampled:
            return torch.arange(count), torch.zeros(count)
        always = torch.zeros(count, dtype=torch.bool)
        always[self.by_frequency[: self.plan.frequent]] = True
        present = self.row_of[token_ids.flatten()]
        always[present[present >= 0]] = True
        others = (~always).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + self.step)
        drawn = others[torch.randperm(len(others), generator=generator)[: self.plan.sampled]]
        chosen = torch.cat((always.nonzero()[:, 0], drawn))
        added = torch.zeros(len(chosen))
        if len(drawn):
            added[-len(drawn) :] = math.log(len(others) / len(drawn))
        return chosen, added

    def loss(self, batch: ExampleBatch, depth: int) -> tuple[torch.Tensor, dict[str, float]]:
        """KL(target || drafter) over the draft vocabulary, in nats, averaged over positions and summed over depths (weighted), and
        the distance of features. Also returned apart, the first as ``kl1``, ``kl2``, ... by depth."""
        features = batch.features
        chosen, added = self.rows(batch.token_ids)
        head = self.ends.head[chosen]
        with torch.no_grad():
            logits = features @ head.t() + added
            expected = logits.softmax(-1) @ head  # sum of p_v times row v: with it, sum of p_v z_v is one dot product
            constant = (features * expected).sum(-1) - logits.logsumexp(-1)  # sum of p_v (log p_v - added_v)
        length = features.shape[1]
        positions = torch.arange(length)
        total, parts = features.new_zeros(()), {}
        predictions = self.drafter.predict(features, self.ends.embedding[batch.token_ids], batch.left, depth)
        for i, predicted in enumerate(predictions):
            ahead = self.drafter.ahead(i)  # position j is judged by the feature at j + ahead
            first = self.drafter.first(i)
            if length - ahead <= first:
                continue
            mask = (positions + ahead < batch.lengths[:, None])[:, first : length - ahead]
            z, f, m = predicted[:, first : length - ahead], features[:, first + ahead :], expected[:, first + ahead :]
            kl = constant[:, first + ahead :] + (z @ head.t() + added).logsumexp(-1) - (z * m).sum(-1)
            kl = (kl * mask).sum() / mask.sum()
            parts[f"kl{i + 1}"] = float(kl.detach())
            loss = kl
            if self.plan.feature_loss:
                distance = F.smooth_l1_loss(z * self.scale, f * self.scale, reduction="none").mean(-1)
                distance = (distance * mask).sum() / mask.sum()
                parts[f"l{i + 1}"] = float(distance.detach())
                loss = loss + self.plan.feature_loss * distance
            total = total + self.plan.decay**i * loss
        return total, parts

    def _print(self, progress: float, mean: dict[str, float]) -> None:
        left = self.seconds * (1 - progress) / max(progress, 1e-3)
        losses = " ".join(f"{name} {value:.3f}" for name, value in mean.items())
        print(
            f"{self.drafter.method}: {100 * progress:3.0f}%, step {self.step} of {self.steps}, {losses}, {left / 60:.1f} min to go",
            flush=True,
        )

    def save(self) -> None:
        """Weights and the optimizer's state, in one file."""
        tensors = {}
        for name, parameter in self.parameters.items():
            tensors[f"weight.{name}"] = parameter.detach()
            state = self.optimizer.state.get(parameter)
            if state:
                tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        progress = {"step": self.step, "seconds": self.seconds}
        write_atomically(self.checkpoint, tensors, {"progress": json.dumps(progress)})

    def load(self) -> None:
        """Go on where ``save`` was called."""
        with safe_open(self.checkpoint, framework="pt") as file:
            progress = json.loads(file.metadata()["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        self.step, self.seconds = progress["step"], progress["seconds"]
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weight.{name}"])
            if f"exp_avg.{name}" in tensors:
                moments = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **moments}
