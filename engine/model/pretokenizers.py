"""How text is cut before merges apply: the rules of the vocabularies that this engine knows.

The regular expressions are those published with the models; changing one changes the ids.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: each byte is spelled as one printable character. Character -> byte.

    Printable Latin-1 stands for itself; the 68 other bytes are spelled, in order, from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


def use_gpt2(backend: Backend, add_prefix_space: bool = False) -> None:
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()


def use_split(backend: Backend, pattern: str, *, nfc: bool = False, add_prefix_space: bool = False) -> None:
    backend.normalizer = normalizers.NFC() if nfc else None
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()


def use_sentencepiece(backend: Backend, prepend: str) -> None:
    """Spaces become U+2581, nothing is cut. ``prepend``: a space before the "first" piece, "always" (also after each
    special token) or "never"."""
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=prepend, split=False)
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)


def redo_by_class(backend: Backend, settings: Mapping[str, Any], architecture: str) -> None:
    """Give ``backend`` the rules of its ``tokenizer_class`` where transformers would do so, else leave it as the file has it."""
    declared = settings.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if isinstance(declared, str) else None
    byte_level = any('"ByteLevel"' in _state(part) for part in (backend.pre_tokenizer, backend.decoder))
    prefix_space = settings.get("add_prefix_space")
    if architecture == "mistral":
        return
    if architecture == "qwen2" or (architecture == "qwen3" and declared in (None, "Qwen2Tokenizer")):
        use_split(backend, QWEN2, nfc=True, add_prefix_space=bool(prefix_space))
        backend.model.ignore_merges = False
    elif declared == "GPT2Tokenizer":
        use_gpt2(backend, bool(prefix_space))
        backend.model.ignore_merges = False
    elif declared == "LlamaTokenizer" and not byte_level:
        prepend = "never" if prefix_space is False else "always" if settings.get("legacy") else "first"
        use_sentencepiece(backend, prepend)


def _state(part: Any) -> str:
    return "" if part is None else part.__getstate__().decode()
