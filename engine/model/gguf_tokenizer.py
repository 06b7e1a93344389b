"""A tokenizers.Tokenizer from the vocabulary in a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from engine.model.pretokenizers import LLAMA3, QWEN2, byte_of_character, use_gpt2, use_sentencepiece, use_split

# tokenizer.ggml.pre -> regular expression (None: GPT-2's), NFC first?, take a whole piece that is a token without merging?
# "smollm": the model was trained with every digit cut off first, but transformers, for its tokenizer.json as for its GGUF,
# uses GPT-2's rule. The two differ only in spaces and line ends right before a digit.
_PRE: dict[str, tuple[str | None, bool, bool]] = {
    "default": (None, False, False),
    "gpt-2": (None, False, False),
    "smollm": (None, False, False),
    "llama-bpe": (LLAMA3, False, True),
    "qwen2": (QWEN2, True, False),
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def backend_from_gguf(metadata: Mapping[str, Any], source: str) -> tuple[Backend, dict[str, str]]:
    """The tokenizer, and the special tokens that have a name ("bos_token" -> text). ValueError, naming the file, if unknown."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    special_tokens = {}
    for name, key in _NAMED.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                raise ValueError(f"{source}: tokenizer.ggml.{key}_token_id must lie in [0, {len(tokens)}), got {token_id!r}")
            special_tokens[name] = tokens[token_id]
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, source)
        alphabet = set(byte_of_character())
        control = [t for t, k in zip(tokens, types) if k == _CONTROL and set(t) <= alphabet]
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, source)
        control = [t for t, k in zip(tokens, types) if k == _CONTROL]
    else:
        raise ValueError(f"{source}: tokenizer.ggml.model must be 'gpt2' or 'llama', got {kind!r}")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    whole = [t for t, k in zip(tokens, types) if k == _USER_DEFINED and backend.token_to_id(t) is not None]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([AddedToken(token, special=True) for token in special_tokens.values() if token not in added])
    return backend, special_tokens


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise ValueError(f"{source}: tokenizer.ggml.pre must be one of {tuple(_PRE)}, got {pre!r}")
    pattern, nfc, ignore_merges = _PRE[pre]
    spelling = {byte: character for character, byte in byte_of_character().items()}
    alphabet = set(spelling.values())
    vocab = {  # added tokens may be written in plain text; the model wants all in its alphabet
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges", source):
        left, space, right = merge.partition(" ")
        if not space:
            raise ValueError(f"{source}: tokenizer.ggml.merges has {merge!r}, expected two tokens and a space between")
        merges.append((left, right))
    backend = Backend(_bpe(source, vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if pattern is None:
        use_gpt2(backend)
    else:
        use_split(backend, pattern, nfc=nfc)
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], source: str) -> Backend:
    scores = metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise ValueError(f"{source}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(vocab, dict(zip(tokens, (float(score) for score in scores))))
    backend = Backend(_bpe(source, vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    use_sentencepiece(backend, "first" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never")
    return backend


def _merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """A sentencepiece BPE vocabulary has no list of merges: every way to make a token out of two others is one, best score first."""
    merges = []
    for token, score in scores.items():
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in vocab and token[cut:] in vocab]
        ways.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in ways]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in merges]


def _bpe(source: str, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # the library raises bare Exception, for a merge of tokens that are not in the vocabulary
        raise ValueError(f"{source}: vocabulary and merges do not fit together: {error}") from error


def _strings(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{source}: {key} must be a list of strings, got {type(value).__name__}")
    return value
