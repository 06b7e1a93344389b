"""Training of drafters on a tiny random target: the modules against independent formulas, learning, and going on after a break."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.checkpoint import load_checkpoint
from engine.speculation.datastore import Datastore, read_datastore
from engine.speculation.files import read_drafter, tensor_shapes
from engine.speculation.training import __main__ as command
from engine.speculation.training import modules
from engine.speculation.training.evaluate import acceptance, datastore_acceptance, looking_up, proposals, walk
from engine.speculation.training.features import Example, ExampleBatch, draft_vocabulary, features_of
from engine.speculation.training.generate import TEMPERATURES, Text, make_shard, temperature_of
from engine.speculation.training.initial import drafter_from_file, initial_drafter
from engine.speculation.training.modules import METHODS, Drafter, Eagle, Exit, Medusa, Target
from engine.speculation.training.prompts import TOPICS, prompts, split, words_of
from engine.speculation.training.train import Plan, TargetEnds, Trainer
from engine.speculation.training.writer import draw, write_texts
from tests.engine.engines import tiny_parts

EXIT = 1


@pytest.fixture(scope="module")
def target() -> Target:
    parts, _ = tiny_parts()
    return Target(parts.model_config, load_checkpoint(parts.path).tensors)


@pytest.fixture(scope="module")
def ends(target: Target) -> TargetEnds:
    vocab = torch.arange(0, 320, 2)
    return TargetEnds(target.embed_tokens.weight, target.head[vocab], vocab)


@pytest.fixture(scope="module")
def examples(target: Target) -> list[Example]:
    """Sequences in which the target chose each token after the third."""
    torch.manual_seed(1)
    out = []
    for length in (9, 17, 17, 23, 30, 31):
        ids = torch.randint(3, 320, (1, 3))
        while ids.shape[1] < length:
            features, _ = target(ids, EXIT)
            ids = torch.cat((ids, (features[:, -1] @ target.head.t()).argmax(-1, keepdim=True)), 1)
        features, left = features_of(target, [ids[0].tolist()], EXIT)
        out.append(Example(ids[0], 3, features[0], left[0]))
    return out


def drafter(method: str, target: Target, examples: list[Example], noise: float = 0.0) -> Drafter:
    made = initial_drafter(method, target, examples[0].features, exit_layer=EXIT)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return made


def test_the_target_is_the_model(target: Target) -> None:
    """Features times head are transformers' logits; the exit's input is its hidden state there."""
    made = tiny_parts()[1]
    ids = torch.tensor([[5, 17, 200, 3, 42, 42, 319, 8]])
    with torch.no_grad():
        features, left = target(ids, EXIT)
        oracle = made.model(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(features @ target.head.t(), oracle.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(left, oracle.hidden_states[EXIT], atol=1e-4, rtol=1e-4)


def test_features_do_not_depend_on_the_batch(target: Target) -> None:
    ids = [list(range(3, 3 + n)) for n in (2, 40, 7, 39)]
    together, left = features_of(target, ids, EXIT)
    for i, each in enumerate(ids):
        alone, left_alone = features_of(target, [each], EXIT)
        assert together[i].shape == (len(each), 64)
        torch.testing.assert_close(together[i], alone[0], atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(left[i], left_alone[0], atol=4e-3, rtol=4e-3)


def test_texts_written_in_lockstep(target: Target) -> None:
    """Greedy rows of different length are what each alone would be; features are those of a pass over the finished text."""
    made = tiny_parts()[1]
    prompts_ = [[5, 17, 200], [3, 42, 42, 319, 8, 77], [9, 9, 9, 9]]
    written = write_texts(target, prompts_, [0.0, 0.0, 1.0], 12, EXIT, seed=3)
    for prompt, each in zip(prompts_, written, strict=True):
        assert each.token_ids[: len(prompt)] == prompt and len(each.token_ids) == len(prompt) + 12
        features, left = features_of(target, [each.token_ids[:-1]], EXIT)
        torch.testing.assert_close(each.features, features[0], atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(each.left, left[0], atol=4e-3, rtol=4e-3)
    for each, prompt in zip(written[:2], prompts_):
        for at in range(len(prompt), len(each.token_ids)):
            assert each.token_ids[at] == int(made.logits(each.token_ids[:at])[-1].argmax())
    warm = [write_texts(target, prompts_, [0.0, 0.0, 1.0], 12, EXIT, seed=seed)[2].token_ids for seed in (3, 4)]
    assert warm[0] == written[2].token_ids != warm[1]
    with pytest.raises(ValueError, match="must not be empty"):
        write_texts(target, [[1], []], [0.0, 0.0], 2, EXIT, 0)


def test_drawing_at_a_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(20_000, 3)
    heat = torch.full((20_000, 1), 0.5)
    heat[10_000:] = 0
    drawn = draw(logits, heat, torch.Generator().manual_seed(0))
    want = (logits[0] / 0.5).softmax(-1) * 10_000
    for token, count in enumerate(drawn[:10_000].bincount(minlength=3).tolist()):
        assert abs(count - want[token]) < 5 * want[token] ** 0.5
    assert (drawn[10_000:] == 0).all()


def test_shards(target: Target) -> None:
    """A window's shards have its prompts between them, each once, and texts end where the target ended them, but for some."""
    tokenizer = tiny_parts()[0].tokenizer
    shards = [make_shard(target, tokenizer, number, 2, EXIT) for number in range(8)]
    given = [tuple(text.token_ids[: text.num_prompt_tokens]) for texts, _ in shards for text in texts]
    assert sorted(given) == sorted(
        tuple(tokenizer.encode(p.text)) for p in itertools.islice(prompts(0, words=words_of(tokenizer.vocabulary())), 16)
    )
    assert [len(ids) for ids in given] == sorted(len(ids) for ids in given)
    for texts, written in shards:
        for text, each in zip(texts, written, strict=True):
            assert text.token_ids == each.token_ids and len(each.features) == len(each.left) == len(text.token_ids)
    held_out, _ = make_shard(target, tokenizer, 0, 3, EXIT, held_out=True)
    assert [text.temperature for text in held_out] == [0.0] * 3
    assert {len(text.token_ids) - text.num_prompt_tokens for text in held_out} == {127}


def eagle_one_by_one(
    eagle: Eagle, features: torch.Tensor, embeddings: torch.Tensor, anchor: int, steps: int
) -> list[torch.Tensor]:
    """The formulas taken word by word: true entries up to ``anchor``, then the draft's own; one position at a time."""
    config, layer = eagle.config, eagle.layers[0]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    before, out = torch.zeros(config.hidden_size), []
    for j in range(anchor + steps):
        x = eagle.fc.weight @ torch.cat((before, embeddings[j]))
        h = layer.input_layernorm(x)
        cos, sin = (part[j] for part in modules.rotation(config, j + 1))

        def heads(weight: torch.Tensor, turn: bool, h=h, cos=cos, sin=sin) -> torch.Tensor:
            y = (weight @ h).view(-1, config.head_dim)
            return y * cos + y.roll(config.head_dim // 2, -1) * sin if turn else y

        attention = layer.self_attn
        keys.append(heads(attention.k_proj.weight, True))
        values.append(heads(attention.v_proj.weight, False))
        attended = []
        for i, q in enumerate(heads(attention.q_proj.weight, True)):
            kv = i // (config.num_attention_heads // config.num_kv_heads)
            probs = (torch.stack(keys)[:, kv] @ q / config.head_dim**0.5).softmax(0)
            attended.append(probs @ torch.stack(values)[:, kv])
        x = x + attention.o_proj.weight @ torch.cat(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        predicted = eagle.norm(x)
        if j >= anchor:
            out.append(predicted)
        before = features[j] if j < anchor else predicted
    return out


def test_eagle_drafts_at_all_positions_at_once(target: Target, examples: list[Example]) -> None:
    """``predict`` computes a draft from every position in one go; here each is drafted alone."""
    eagle = drafter("eagle", target, examples, noise=0.05)
    batch = ExampleBatch.of(examples[1:3])
    embeddings = target.embed_tokens(batch.token_ids)
    with torch.no_grad():
        all_at_once = eagle.predict(batch.features, embeddings, batch.left, 4)
        for row, anchor in itertools.product(range(2), (0, 1, 5, 12)):
            alone = eagle_one_by_one(eagle, batch.features[row], embeddings[row], anchor, 4)
            for step in range(4):
                torch.testing.assert_close(all_at_once[step][row, anchor + step], alone[step], atol=2e-4, rtol=2e-4)


def test_untrained_drafters(target: Target, examples: list[Example]) -> None:
    """Medusa's heads begin at the feature itself, the exit at the target's norm of its hidden state."""
    batch = ExampleBatch.of(examples[:1])
    embeddings = target.embed_tokens(batch.token_ids)
    for predicted in drafter("medusa", target, examples).predict(batch.features, embeddings, batch.left, 4):
        torch.testing.assert_close(predicted, batch.features)
    (predicted,) = drafter("layer_skip", target, examples).predict(batch.features, embeddings, batch.left, 4)
    with torch.no_grad():
        _, left = target(batch.token_ids, EXIT)
    torch.testing.assert_close(predicted, target.norm(left), atol=2e-2, rtol=1e-2)  # `left` was kept in 16 bits


@pytest.mark.parametrize("method", METHODS)
def test_loss_is_the_divergence(method: str, target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    """Against a sum over positions one by one, with torch's own kl_div, padding and positions before a draft left out."""
    plan = Plan(epochs=1, learning_rate=1e-3, depth=3)
    trainer = Trainer(drafter(method, target, examples, 0.05), ends, examples, plan, tmp_path / "run")
    chosen = [examples[0], examples[3]]
    batch = ExampleBatch.of(chosen)
    with torch.no_grad():
        loss, parts = trainer.loss(batch, 3)
        predictions = trainer.drafter.predict(batch.features, ends.embedding[batch.token_ids], batch.left, 3)
    want = []
    for i, predicted in enumerate(predictions):
        ahead = i + 1 if method == "medusa" else 0
        first = i if method == "eagle" else 0
        divergences = [
            torch.nn.functional.kl_div(
                (predicted[row, j] @ ends.head.t()).log_softmax(-1),
                (example.features[j + ahead].float() @ ends.head.t()).log_softmax(-1),
                log_target=True, reduction="sum",
            )
            for row, example in enumerate(chosen)
            for j in range(first, len(example.token_ids) - ahead)
        ]  # fmt: skip
        want.append(float(torch.stack(divergences).mean()))
    assert [parts[f"kl{i + 1}"] for i in range(len(want))] == pytest.approx(want, rel=1e-3, abs=1e-4)
    assert float(loss) == pytest.approx(sum(kl * 0.8**i for i, kl in enumerate(want)), rel=1e-3, abs=1e-4)


def test_sampled_vocabulary(target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    """Frequent tokens and those of the batch are always seen; the sample stands for the rest, right on average."""
    plan = Plan(epochs=1, learning_rate=1e-3, frequent=10, sampled=30)
    trainer = Trainer(drafter("draft_model", target, examples), ends, examples, plan, tmp_path / "run")
    batch = ExampleBatch.of(examples[:2])
    logits = (batch.features[0, 4] @ ends.head.t()).double() / 8
    present = {int(token) // 2 for token in batch.token_ids.flatten() if token % 2 == 0}
    sums, seen = [], set()
    for step in range(400):
        trainer.step = step
        rows, added = trainer.rows(batch.token_ids)
        assert len(set(rows.tolist())) == len(rows) <= 40 + len(present)
        certain = set(rows[added == 0].tolist())
        assert present <= certain and set(trainer.by_frequency[:10].tolist()) <= certain
        seen |= set(rows.tolist())
        sums.append(float((logits[rows] + added).exp().sum()))
    assert seen == set(range(160))
    exact = float(logits.exp().sum())
    spread = torch.tensor(sums).std().item()
    assert spread > 0 and abs(sum(sums) / 400 - exact) < 4 * spread / 20
    counts = torch.cat([e.token_ids for e in examples]).bincount(minlength=320)[::2]
    assert counts[trainer.by_frequency].tolist() == sorted(counts.tolist(), reverse=True)


@pytest.mark.parametrize("method", METHODS)
def test_learns(method: str, target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    plan = Plan(epochs=25, learning_rate=3e-3, depth=2, warmup=5, batch_tokens=64, feature_loss=0.1)
    trainer = Trainer(drafter(method, target, examples), ends, examples, plan, tmp_path / "run")
    with torch.no_grad():
        before = trainer.loss(ExampleBatch.of(examples), 2)[1]["kl1"]
    trainer.run()
    with torch.no_grad():
        after = trainer.loss(ExampleBatch.of(examples), 2)[1]["kl1"]
    assert trainer.step == trainer.steps and after < 0.8 * before


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_break_changes_nothing(method: str, target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    plan = Plan(epochs=4, learning_rate=1e-2, depth=4, warmup=3, batch_tokens=64)

    def trainer(name: str) -> Trainer:
        return Trainer(drafter(method, target, examples), ends, examples, plan, tmp_path / name)

    whole = trainer("whole")
    whole.run()
    trainer("broken").run(last_step=5)
    broken = trainer("broken")
    assert broken.step == 5
    broken.run()
    assert broken.step == whole.step > 5
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(value, broken.drafter.state_dict()[name]), name
        assert not torch.equal(value, drafter(method, target, examples).state_dict()[name]), name


def test_epochs_of_different_length(target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    """Batches are mixed anew in each epoch, so epochs differ in how many they have; a break may fall anywhere."""
    plan = Plan(epochs=6, learning_rate=1e-3, batch_tokens=70)

    def trainer(name: str) -> Trainer:
        return Trainer(drafter("layer_skip", target, examples), ends, examples * 3, plan, tmp_path / name)

    one = trainer("one")
    epochs = [list(one._batches(epoch)) for epoch in range(12)]
    assert len({len(epoch) for epoch in epochs}) > 1
    for epoch in epochs:
        assert sorted(i for rows in epoch for i in rows) == list(range(18))
        assert all(len(rows) * max(len(one.examples[i].token_ids) for i in rows) <= 70 for rows in epoch)
    everything = [rows for epoch in epochs for rows in epoch]
    for start in range(one.steps):
        one.step = start
        assert list(itertools.islice(one._remaining(10**6), 20)) == everything[start : start + 20]


def test_minutes_end_a_run(target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    trainer = Trainer(drafter("layer_skip", target, examples), ends, examples, Plan(10**6, 1e-3), tmp_path / "run")
    trainer.run(minutes=1e-3)
    assert 0 < trainer.step < trainer.steps and (tmp_path / "run").exists()


def test_no_examples(target: Target, ends: TargetEnds, examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no examples"):
        Trainer(drafter("medusa", target, examples), ends, [], Plan(1, 1e-3), tmp_path / "run")


class Oracle(Drafter):
    """Predicts the target's own features: perfect where its head can say the token."""

    method = "draft_model"

    def predict(self, features: torch.Tensor, embeddings: torch.Tensor, left: torch.Tensor, depth: int) -> list[torch.Tensor]:
        return [features]


def test_acceptance_of_a_perfect_drafter(target: Target, examples: list[Example]) -> None:
    whole = TargetEnds(target.embed_tokens.weight, target.head, torch.arange(320))
    perfect = acceptance(Oracle(), whole, examples, 4)
    assert perfect.per_position == [1.0] * 4 and perfect.mean_accepted == 4
    # A draft of K gives K + 1 tokens, while K tokens follow.
    assert perfect.drafts == sum(len(range(e.num_prompt_tokens, len(e.token_ids) - 4, 5)) for e in examples)


@pytest.mark.parametrize("method", METHODS)
def test_proposals_are_those_of_drafting(method: str, target: Target, ends: TargetEnds, examples: list[Example]) -> None:
    """Draft tokens one by one, feeding back what was drafted; where earlier ones were right, the proposals are the same."""
    made = drafter(method, target, examples, noise=0.02)
    example = examples[4]
    batch = ExampleBatch.of([example])
    with torch.no_grad():
        proposed = proposals(made, ends, batch, 4)[:, 0]
        for anchor in range(1, len(example.token_ids) - 4):
            drafted = draft_alone(made, target, ends, example, anchor)
            for i, token in enumerate(drafted):
                assert proposed[i, anchor] == token
                if token != example.token_ids[anchor + i + 1]:
                    break


def draft_alone(made: Drafter, target: Target, ends: TargetEnds, example: Example, anchor: int) -> list[int]:
    ids = example.token_ids[: anchor + 1]
    if isinstance(made, Medusa):
        f = example.features[anchor - 1].float()
        predicted = [f + torch.nn.functional.silu(head.weight @ f + head.bias) for head in made.heads]
        return [int(ends.vocab[(ends.head @ p).argmax()]) for p in predicted]
    out: list[int] = []
    for step in range(4):
        embeddings = target.embed_tokens(ids)
        if isinstance(made, Eagle):
            features = torch.cat((example.features[: anchor + 1].float(), torch.zeros(8, 64)))
            predicted_feature = eagle_one_by_one(made, features, embeddings, anchor, step + 1)[-1]
        else:
            left = target(ids[None], EXIT)[1] if isinstance(made, Exit) else torch.zeros(1)
            predicted_feature = made.predict(torch.zeros(1), embeddings[None], left, 1)[0][0, -1]
        out.append(int(ends.vocab[(ends.head @ predicted_feature).argmax()]))
        ids = torch.cat((ids, torch.tensor(out[-1:])))
    return out


def test_walk() -> None:
    tokens = [9, 9, 1, 2, 3, 4, 5, 6, 7]
    example = Example(torch.tensor(tokens), 2, torch.zeros(0), torch.zeros(0))
    wrong: dict[int, int] = {}  # by the position that a draft begins at: which of its tokens is wrong

    def propose(seen: list[int]) -> list[int]:
        drafted = tokens[len(seen) : len(seen) + 3]  # more than K
        return [0 if i == wrong.get(len(seen) - 1) else token for i, token in enumerate(drafted)]

    assert walk(propose, example, 2) == [2, 2]  # from position 2 to 5, then to 8, where nothing follows
    wrong[2] = 0  # the second token does not count where the first was wrong
    assert walk(propose, example, 2) == [0, 2, 2]
    wrong[2] = 1
    assert walk(propose, example, 2) == [1, 2]
    assert walk(lambda seen: [], example, 2) == [0] * 5


def test_what_repeats_is_looked_up_first() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    example = Example(torch.tensor(tokens), 2, torch.zeros(0), torch.zeros(0))
    assert walk(looking_up(lambda seen: [0], 4), example, 4) == [0, 0, 0, 4]  # 1, 2 came before
    store = Datastore(np.array([1, 2, 3, 4], dtype=np.int32))
    assert datastore_acceptance(store, [example], 2).per_position == [3 / 5, 2 / 5]  # 1, 2, 0, 2, 0
    assert datastore_acceptance(store, [example], 2, prompt_lookup=True).per_position == [1, 3 / 4]  # 1, 2, 2, 2


def test_draft_vocabulary() -> None:
    texts = [Text([7, 7, 7, 50, 50, 9], 1, 0.0), Text([50, 9, 30], 0, 1.0)]
    assert draft_vocabulary(texts, 4, 100, special=[2]).tolist() == [2, 7, 9, 50]  # 9 (twice) before 30
    assert draft_vocabulary(texts, 8, 100, special=[2]).tolist() == [0, 1, 2, 3, 7, 9, 30, 50]
    assert draft_vocabulary(texts, 500, 100, special=[2, 600]).tolist() == list(range(100))


def test_prompts() -> None:
    train, held_out = ([*itertools.islice(prompts(0, which), 400)] for which in (False, True))
    assert train == [*itertools.islice(prompts(0), 400)] and sum(p.chat for p in train) == 200
    ours, theirs = set(split(TOPICS, False)), set(split(TOPICS, True))
    assert not ours & theirs and len(ours | theirs) == len(set(TOPICS))
    for topic in split(TOPICS, True):
        assert not any(f" {topic}." in p.text for p in train)
    assert any(f" {topic}." in p.text for p in held_out for topic in split(TOPICS, True))
    assert not any(field in p.text for p in train for field in ("{t}", "{u}", "{c}", "{n}", "{p}", "{a}"))
    words = words_of(["\u0120lantern", "\u0120river", "\u0120Oak", "stone", "\u0120sea", "\u0120don't"])
    assert words == ["lantern", "river"]
    about = [p.text.lower() for p in itertools.islice(prompts(0, words=words), 400)]
    assert 150 < sum("lantern" in text or "river" in text for text in about) < 350
    heat = [temperature_of(i) for i in range(1000)]
    assert [heat.count(t) for t, _ in TEMPERATURES] == pytest.approx([1000 * share for _, share in TEMPERATURES], abs=3)


def test_target_of_another_kind() -> None:
    with pytest.raises(ValueError, match="qkv_bias"):
        modules.check_target(tiny_parts("qwen2")[0].model_config)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All stages on the tiny target: four files that are read back, a card, and nothing made twice."""
    parts, made = tiny_parts()
    arguments = [
        "--model", str(made.path), "--tokens", "300", "--vocab", "200", "--exit-layer", "1", "--epochs", "1", "--threads", "1", "--shard", "3", "--held-out", "2",
        "--out", str(tmp_path / "out"), "--directory", str(tmp_path / "work"),
    ]  # fmt: skip
    assert command.main(arguments) == 0
    first = capsys.readouterr().out
    for method in METHODS:
        path = tmp_path / "out" / f"{method}.safetensors"
        file = read_drafter(path, method, parts.model_config, parts.model_facts["sha256"])
        shapes = tensor_shapes(method, parts.model_config, num_layers=file.num_layers or 1, num_heads=file.num_heads or 1)
        assert {name: tuple(t.shape) for name, t in drafter_from_file(file, parts.model_config).state_dict().items()} == shapes
        assert f"{method}: mean accepted" in first and "mean accepted" in file.card
        assert file.card in (tmp_path / "out" / "CARD.md").read_text()
    store = read_datastore(tmp_path / "out" / "rest.safetensors", parts.model_config, parts.model_facts["sha256"])
    assert len(store.tokens) >= 300 and "rest: mean accepted" in first
    assert store.card in (tmp_path / "out" / "CARD.md").read_text() and "looked up first" in store.card
    assert "untrained exit after layer 1: mean accepted" in first and "text:" in first
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("[tfhv]*")}
    assert command.main(arguments) == 0
    again = capsys.readouterr().out
    assert "text:" not in again and "features:" not in again
    assert stamps == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("[tfhv]*")}


@pytest.mark.slow
def test_training_goes_on_from_what_is_there(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With no step to make, the same weights are written again."""
    arguments = [
        "--model", str(tiny_parts()[1].path), "--tokens", "300", "--vocab", "200", "--exit-layer", "1", "--epochs", "1", "--threads", "1", "--shard", "3",
        "--held-out", "2", "--out", str(tmp_path / "out"), "--directory", str(tmp_path / "work"), "--only", "eagle",
    ]  # fmt: skip
    assert command.main(arguments) == 0
    path = tmp_path / "out" / "eagle.safetensors"
    parts = tiny_parts()[0]
    first = read_drafter(path, "eagle", parts.model_config, parts.model_facts["sha256"])
    assert command.main([*arguments, "--stage", "train", "--no-resume", "--minutes", "0", "--go-on"]) == 0
    again = read_drafter(path, "eagle", parts.model_config, parts.model_facts["sha256"])
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert command.main([*arguments, "--stage", "train", "--no-resume", "--minutes", "0"]) == 0
    anew = read_drafter(path, "eagle", parts.model_config, parts.model_facts["sha256"])
    assert any(not torch.equal(first.tensors[name], anew.tensors[name]) for name in first.tensors)
    assert "where the text is looked up first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--vocab", "1000"], "--vocab must lie"),
        (["--exit-layer", "3"], "--exit-layer must lie"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_bad_options(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(tiny_parts()[1].path), *option]) == 1
    assert message in capsys.readouterr().err


def test_unknown_method(target: Target) -> None:
    with pytest.raises(ValueError, match="got 'ngram'"):
        initial_drafter("ngram", target, torch.zeros(1, 64), exit_layer=1)
