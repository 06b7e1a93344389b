"""Small vocabularies of every kind, learned on the spot, saved as the original files and as GGUF; and transformers to read them."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from engine.model.config import ModelConfig
from engine.model.pretokenizers import byte_of_character, use_gpt2, use_split
from tests.engine.model import gguf_files, tiny

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def corpus() -> list[str]:
    """Text to learn merges from: every kind of piece, so that each rule of splitting shows in the ids."""
    words = (
        "the of and to in a is that for it was on are as with his they at be this from I have or by one had not but what all were"
    )
    rng = random.Random(0)
    pieces = [
        *words.split(),
        "1",
        "12",
        "123",
        "2024",
        "\n",
        "\n\n",
        "  ",
        "    ",
        "'s",
        "'re",
        "é",
        "e\u0301",
        "你好",
        "世界",
        "!!",
        "==",
        "(){",
        "\t",
        "👍🏽",
    ]
    return [("" if rng.random() < 0.3 else " ").join(rng.choices(pieces, k=20)) for _ in range(800)]


def train(split: str | None, *, ignore_merges: bool = False, nfc: bool = False) -> Backend:
    """A byte-level BPE of 700 tokens, with the given rule (None: GPT-2's), as the original tokenizer.json would hold it."""
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    if split is None:
        use_gpt2(backend)
    else:
        use_split(backend, split, nfc=nfc)
    alphabet = list(byte_of_character())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    return without_last_merges(backend) if ignore_merges else backend


def without_last_merges(backend: Backend) -> Backend:
    """As in Llama-3's vocabulary: some tokens that no merge leads to, which only a whole piece gives."""
    spec = json.loads(backend.to_str())
    del spec["model"]["merges"][-60:]
    return Backend.from_str(json.dumps(spec))


def save(directory: Path, backend: Backend, model_type: str, **settings: Any) -> ModelConfig:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    plain = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "chat_template": CHAT}
    (directory / "tokenizer_config.json").write_text(json.dumps({**plain, **settings}))
    raw = {"model_type": model_type, "vocab_size": 700, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_hf(raw, "config.json")


def theirs(path: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), **options)


def write_gguf(path: Path, backend: Backend, pre: str, family: str = "llama", **metadata: Any) -> Path:
    spec = json.loads(backend.to_str())
    tokens = [token for token, _ in sorted(spec["model"]["vocab"].items(), key=lambda item: item[1])]
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHAT,
    }
    made = tiny.model(family, vocab_size=len(tokens), num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    return gguf_files.write(path, made, metadata={**values, **metadata}, tokens=tokens)


def sentencepiece_gguf(path: Path, **metadata: Any) -> Path:
    """A vocabulary as sentencepiece BPE has it: byte tokens, pieces with scores by rank, no list of merges."""
    learned = json.loads(train_metaspace().to_str())["model"]
    pieces = [token for token, _ in sorted(learned["vocab"].items(), key=lambda item: item[1])]
    ranks = random.Random(1).sample(range(len(pieces)), len(pieces))  # the order of the ids need not be that of the scores
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(pieces[rank] for rank in ranks)]
    scores = [0.0] * 259 + [-float(rank) for rank in ranks]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    made = tiny.model("llama", vocab_size=len(tokens), num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    return gguf_files.write(path, made, metadata={**values, **metadata}, tokens=tokens)


def train_metaspace() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=400, show_progress=False))
    return backend
