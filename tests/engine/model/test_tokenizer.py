"""The tokenizer against transformers on the same files, and against ids that were made elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.model.checkpoint import load_checkpoint
from engine.model.pretokenizers import LLAMA3, QWEN2
from engine.model.tokenizer import Tokenizer
from tests.engine.model.vocabularies import SPECIAL, save, sentencepiece_gguf, theirs, train, write_gguf

DATA = Path(__file__).parents[2] / "data"
TEXTS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  two leading,  two inner, three trailing   ",
    "tabs\tand\n\nlines\r\n\r\n   indented\n \n\t\n",
    "\n\n1. A list\n2. of 1234567 things, 3.14159 and 2,000\n",
    "x =   42;  y  = 007",
    "def f(a: int) -> str:\n    return f'{a!r}'  # it's we're I'LL don'T\n",
    "if (a&&b||c) { x->y <<= 3; }\n\n\n}",
    "你好，世界。今天天气很好！",
    "Привет мир, naïve café, Ελληνικά, עברית, العربية, हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 🇫🇷",
    "e\u0301 vs \u00e9, a\u0308\u0323, \u1e69 \u0073\u0323\u0307, \ufb01 \u212b",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\ufeffbom\u0000nul",
    "२०२४ ²³ ½ Ⅷ ①",
    "<|im_start|>user\nhi<|im_end|><|endoftext|> <|im_start|> <|not_special|>",
    "<s>x</s> <unk><0x41>▁a ▁▁",
    "a" * 300 + " " * 70 + "!" * 50,
]
# Any text at all, and text out of pieces that meet the rules' edges.
_PIECES = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "1",
        "23",
        "é",
        "e\u0301",
        "ab",
        "Word",
        "你",
        "👍🏽",
        "_",
        "!!",
        "\u00a0",
        *SPECIAL,
    ]
)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(_PIECES, max_size=12).map("".join)


def compare(ours: Tokenizer, oracle: Any, text: str) -> None:
    """Same ids, same text back, and the bytes of the tokens add up to it."""
    ids = ours.encode(text)
    assert ids == oracle.encode(text, add_special_tokens=False), text
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=True) == oracle.decode(ids, skip_special_tokens=True)


def compare_all(ours: Tokenizer, oracle: Any, examples: int = 100) -> None:
    for text in TEXTS:
        compare(ours, oracle, text)

    @settings(max_examples=examples)
    @given(ANY_TEXT)
    def any_text(text: str) -> None:
        compare(ours, oracle, text)

    any_text()


# name -> (model type, tokenizer_class, backend)
KINDS: dict[str, tuple[str, str | None, Callable[[], Backend]]] = {
    "gpt2": ("llama", "GPT2Tokenizer", lambda: train(None)),
    "gpt2-with-digits": ("llama", "GPT2Tokenizer", lambda: with_digits(train(None))),
    "llama3": ("llama", "PreTrainedTokenizerFast", lambda: train(LLAMA3, ignore_merges=True)),
    "llama3-declared-as-llama": ("llama", "LlamaTokenizerFast", lambda: train(LLAMA3, ignore_merges=True)),
    "qwen2": ("qwen2", "Qwen2Tokenizer", lambda: train(QWEN2, nfc=True)),
    "qwen3": ("qwen3", "Qwen2TokenizerFast", lambda: train(QWEN2, nfc=True)),
    "qwen3-undeclared": ("qwen3", None, lambda: train(QWEN2, nfc=True)),
    "mistral": ("mistral", "LlamaTokenizerFast", lambda: train(LLAMA3)),
}


def with_digits(backend: Backend) -> Backend:
    """SmolLM's tokenizer.json: each digit cut off, then GPT-2's rule."""
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    return backend


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_json(kind: str, tmp_path: Path) -> None:
    model_type, declared, make = KINDS[kind]
    config = save(tmp_path, make(), model_type, **({"tokenizer_class": declared} if declared else {}))
    ours, oracle = Tokenizer.from_directory(tmp_path, config), theirs(tmp_path)
    compare_all(ours, oracle)
    assert ours.vocab_size == len(oracle) == 700
    assert ours.eos_token_ids == (oracle.eos_token_id,) and ours.bos_token_id == oracle.bos_token_id


def test_tokens_that_only_tokenizer_config_lists(tmp_path: Path) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}
    listed = {"700": {"content": "<think>", **flags}, "701": {"content": "<tool>", **flags, "rstrip": True, "special": True}}
    config = save(tmp_path, train(QWEN2, nfc=True), "qwen3", added_tokens_decoder=listed, pad_token="<|pad|>")
    ours, oracle = Tokenizer.from_directory(tmp_path, config), theirs(tmp_path)
    for text in ("<think>a</think>", "x<tool>  y", "<|pad|>", "<think><tool><|im_end|>"):
        compare(ours, oracle, text)
    assert ours.is_special(701) and not ours.is_special(700)
    assert ours.encode("<think>") == [700] and ours.encode("<|pad|>") == [oracle.pad_token_id]


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm"])
def test_gguf_with_the_rule_of_gpt2(pre: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", train(None), pre)
    ours, oracle = load_checkpoint(path).tokenizer, theirs(tmp_path, gguf_file="m.gguf")
    compare_all(ours, oracle)
    assert ours.eos_token_ids == (2,) and ours.bos_token_id == 1 and ours.vocab_size == 700


@pytest.mark.parametrize(
    ("pre", "family", "split", "ignore_merges", "nfc"),
    [("llama-bpe", "llama", LLAMA3, True, False), ("qwen2", "qwen2", QWEN2, False, True)],
)
def test_gguf_gives_the_ids_of_the_original(
    pre: str, family: str, split: str, ignore_merges: bool, nfc: bool, tmp_path: Path
) -> None:
    """transformers leaves Qwen's normal form and Llama-3's ignore_merges out when it reads a GGUF file; the original has them."""
    backend = train(split, ignore_merges=ignore_merges, nfc=nfc)
    save(tmp_path / "original", backend, family, tokenizer_class="Qwen2Tokenizer" if nfc else "PreTrainedTokenizerFast")
    path = write_gguf(tmp_path / "m.gguf", backend, pre, family)
    ours = load_checkpoint(path).tokenizer
    compare_all(ours, theirs(tmp_path / "original"))
    if not nfc:
        return
    oracle = theirs(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        import unicodedata

        if unicodedata.is_normalized("NFC", text):
            compare(ours, oracle, text)


def test_gguf_with_user_defined_tokens(tmp_path: Path) -> None:
    backend = train(None)
    types = [1] * 700
    types[:3], types[650] = [3, 3, 3], 4
    path = write_gguf(tmp_path / "m.gguf", backend, "default", **{"tokenizer.ggml.token_type": types})
    ours, oracle = load_checkpoint(path).tokenizer, theirs(tmp_path, gguf_file="m.gguf")
    whole = backend.id_to_token(650)
    for text in (f"x{whole}y", whole, f"<|im_end|>{whole} {whole}"):
        compare(ours, oracle, text)
    assert not ours.is_special(650) and ours.is_special(2)


def test_gguf_with_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    ours = load_checkpoint(sentencepiece_gguf(tmp_path / "m.gguf")).tokenizer
    oracle = theirs(tmp_path, gguf_file="m.gguf")
    compare_all(ours, oracle)
    ids = ours.encode("the naïve 👍 x")
    assert b"".join(ours.token_bytes(i) for i in ids).decode() == " the naïve 👍 x"  # the first space is part of the first token
    assert ours.decode(ids) == "the naïve 👍 x"


@pytest.mark.parametrize("options", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
def test_tokenizer_json_with_a_sentencepiece_vocabulary(options: dict[str, Any], tmp_path: Path) -> None:
    """As Llama-2's: the rules of the class hold, whatever the file says of normalizers."""
    from tokenizers import normalizers

    source = load_checkpoint(sentencepiece_gguf(tmp_path / "m.gguf")).tokenizer._backend
    source.pre_tokenizer = None  # type: ignore[assignment]
    source.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = save(tmp_path / "d", source, "llama", tokenizer_class="LlamaTokenizer", **named, **options)
    compare_all(Tokenizer.from_directory(tmp_path / "d", config), theirs(tmp_path / "d"), examples=60)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer.ggml.model must be 'gpt2' or 'llama', got 't5'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, r"tokenizer.ggml.pre must be one of .*got 'deepseek-llm'"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer.ggml.merges must be a list of strings"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"tokenizer.ggml.merges has 'ab'"),
        ({"tokenizer.ggml.merges": ["nowhere found"]}, r"vocabulary and merges do not fit together"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"tokenizer.ggml.token_type has 2 entries for 700 tokens"),
        ({"tokenizer.ggml.unknown_token_id": 700}, r"tokenizer.ggml.unknown_token_id must lie in \[0, 700\), got 700"),
    ],
)  # fmt: skip
def test_gguf_vocabulary_that_is_not_known(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", train(None), "default", **metadata))
    with pytest.raises(ValueError, match=rf"m.gguf: {message}"):
        _ = checkpoint.tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    directory = tmp_path_factory.mktemp("qwen")
    config = save(directory, train(QWEN2, nfc=True), "qwen3")
    return Tokenizer.from_directory(directory, config), theirs(directory)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 699), max_size=12))
def test_token_bytes_add_up_to_the_text(qwen: tuple[Tokenizer, Any], ids: list[int]) -> None:
    """For any ids, also those that no text gives, and cut characters."""
    ours, oracle = qwen
    assert b"".join(map(ours.token_bytes, ids)).decode(errors="replace") == ours.decode(ids) == oracle.decode(ids)
    for i in ids:
        assert ours.token_text(i) == ours.decode([i])


def test_ids_without_a_token(qwen: tuple[Tokenizer, Any]) -> None:
    ours, _ = qwen
    assert ours.token_bytes(5000) == b"" and ours.decode([5000]) == ""  # a model's table is often longer than its vocabulary
    for bad in (-1, 1 << 32):
        with pytest.raises(ValueError, match="a token id must be an integer"):
            ours.token_bytes(bad)
        with pytest.raises(ValueError, match="a token id must be an integer"):
            ours.decode([bad])


def test_text_that_is_not_text(qwen: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        qwen[0].encode("a\ud800b")
    with pytest.raises(ValueError, match="text must be a str, got bytes"):
        qwen[0].encode(b"abc")  # type: ignore[arg-type]


def test_nothing_is_added_where_the_file_would_add(tmp_path: Path) -> None:
    from tokenizers import processors

    backend = train(LLAMA3)
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    ours = Tokenizer.from_directory(tmp_path, save(tmp_path, backend, "llama"))
    assert len(ours.encode("one two three four five")) > 3 and 1 not in ours.encode("one")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 10000])
def test_damaged_tokenizer_json(content: bytes, tmp_path: Path) -> None:
    config = save(tmp_path, train(None), "llama")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer"):
        Tokenizer.from_directory(tmp_path, config)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff", b'{"added_tokens_decoder": {"x": {}}}', b'{"added_tokens_decoder": {"1": 2}}', b'{"added_tokens_decoder": {"1": {"content": 3}}}']
)  # fmt: skip
def test_damaged_tokenizer_config(content: bytes, tmp_path: Path) -> None:
    config = save(tmp_path, train(None), "llama")
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer_config.json: "):
        Tokenizer.from_directory(tmp_path, config)


def test_added_tokens_keep_their_flags() -> None:
    assert repr(AddedToken("a", special=True)) != repr(AddedToken("a", special=False))  # what the merging of lists relies on


@pytest.mark.model
def test_default_model_against_transformers(default_tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, oracle = default_tokenizers
    compare_all(ours, oracle, examples=400)
    assert ours.vocab_size == len(oracle) == 49152


@pytest.mark.model
def test_default_model_gives_the_recorded_ids(default_tokenizers: tuple[Tokenizer, Any]) -> None:
    bench = json.loads((DATA / "bench_prompts.json").read_text())
    recorded = list(zip(bench["prompts"], bench["prompt_ids"]))
    recorded += [(case["prompt"], case["prompt_ids"]) for case in json.loads((DATA / "greedy_float32.json").read_text())["cases"]]
    assert len(recorded) == 38
    for prompt, ids in recorded:
        assert default_tokenizers[0].encode(prompt) == ids and default_tokenizers[0].decode(ids) == prompt
    for ids in (bench["p512"], bench["p2048"], bench["long_ids"]):
        assert default_tokenizers[0].encode(default_tokenizers[0].decode(ids)) == ids


@pytest.mark.model
def test_default_model_token_bytes(default_tokenizers: tuple[Tokenizer, Any]) -> None:
    ours, oracle = default_tokenizers
    for token_id in range(ours.vocab_size):
        assert ours.token_text(token_id) == oracle.decode([token_id])
    assert ours.token_bytes(2) == b"<|im_end|>" and ours.is_special(2) and not ours.is_special(3000)
