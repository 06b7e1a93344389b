"""Text to token ids and back, with exactly the ids that transformers gives for the same files.

A directory's tokenizer.json is read by the tokenizers library; a GGUF file's vocabulary is built into the same kind of
object. transformers (5 and later) keeps only vocabulary and merges of a tokenizer.json whose ``tokenizer_class`` has a
splitting rule of its own, and does the same for GGUF files: so do we.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.model.config import ModelConfig
from engine.model.gguf_tokenizer import backend_from_gguf
from engine.model.json_file import read_json
from engine.model.pretokenizers import byte_of_character, redo_by_class

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """A tokenizer with the chat template of its checkpoint. ``special_tokens``: name ("bos_token") -> its text."""

    def __init__(
        self,
        backend: Backend,
        *,
        source: str,
        eos_token_ids: tuple[int, ...] = (),
        bos_token_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.source = source  # the file, for errors
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, directory: Path, config: ModelConfig) -> "Tokenizer":
        """From tokenizer.json, with tokenizer_config.json and chat_template.jinja where they are. ValueError without the first."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: missing; a tokenizer in another form (tokenizer.model, vocab.json) is not supported")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer that the tokenizers library can read: {error}") from error
        settings_path = directory / "tokenizer_config.json"
        settings = read_json(settings_path) if settings_path.exists() else {}
        redo_by_class(backend, settings, config.architecture)
        special_tokens = _named_tokens(settings)
        _add_missing(backend, settings, special_tokens, settings_path)
        return cls(
            backend,
            source=str(path),
            eos_token_ids=config.eos_token_ids or _ids(backend, special_tokens, "eos_token"),
            bos_token_id=config.bos_token_id
            if config.bos_token_id is not None
            else _first(_ids(backend, special_tokens, "bos_token")),
            chat_template=_directory_template(directory, settings),
            special_tokens=special_tokens,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str, config: ModelConfig) -> "Tokenizer":
        """From a GGUF file's metadata. ValueError for a kind of vocabulary, or a pre-tokenizer, that is not known."""
        backend, special_tokens = backend_from_gguf(metadata, source)
        return cls(
            backend,
            source=source,
            eos_token_ids=config.eos_token_ids,
            bos_token_id=config.bos_token_id,
            chat_template=metadata.get("tokenizer.chat_template"),
            special_tokens=special_tokens,
        )

    @cached_property
    def vocab_size(self) -> int:
        """Ids this tokenizer knows. The model's ``config.vocab_size`` may be larger: its table is often padded."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Every token, as the tokenizer's file writes it, with its id; added ones included."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def max_token_chars(self) -> int:
        """No token covers more characters of a text than this: a text of n characters has at least n / max_token_chars tokens."""
        return max(len(token) for token in self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` as it stands: nothing is added, and special tokens written in the text become their ids."""
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be valid Unicode, but has a lone surrogate at position {error.start}") from error
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        for token_id in token_ids:
            _check_id(token_id)
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text; often not whole characters. Empty for an id without a token.

        For a sentencepiece vocabulary the space that begins a word is part of it, also where ``decode`` would drop it at
        the start of the text.
        """
        _check_id(token_id)
        return self._bytes_of(token_id)

    @cached_property
    def _bytes_of(self) -> Any:
        to_bytes = _token_to_bytes(self._backend, self.source)

        @lru_cache(maxsize=1 << 18)
        def bytes_of(token_id: int) -> bytes:
            token = self._backend.id_to_token(token_id)
            return b"" if token is None else to_bytes(token)

        return bytes_of

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, to show; bytes that are not UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode(..., skip_special_tokens=True)`` leaves this token out."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of ``chat_text``."""
        return self.encode(self.chat_text(messages, add_generation_prompt))

    def chat_text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The messages ({"role": ..., "content": ...} each) as the checkpoint's template writes them.

        ValueError where the checkpoint has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.source}: this checkpoint has no chat template; send plain text instead")
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        plain = []
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f'each message must be a dict with "role" and "content", got {message!r}')
            plain.append({key: value for key, value in message.items() if value is not None})
        return _render(
            self.chat_template, self.source, messages=plain, add_generation_prompt=add_generation_prompt, **self.special_tokens
        )


def _check_id(token_id: int) -> None:
    if not 0 <= token_id < 1 << 32:
        raise ValueError(f"a token id must be an integer in [0, 2**32), got {token_id!r}")


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens with a name of their own, which a chat template may use as variables."""
    found = {}
    for name in _NAMED:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _listed_tokens(settings: Mapping[str, Any], source: Path) -> list[AddedToken]:
    """The tokens of ``added_tokens_decoder`` (id, as a string, -> text and flags), in the order of their ids."""
    listed = settings.get("added_tokens_decoder") or {}
    try:
        entries = [entry for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))]
        return [AddedToken(entry["content"], **{flag: entry[flag] for flag in _FLAGS if flag in entry}) for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: added_tokens_decoder must give each id a token with its flags: {error!r}") from error


def _add_missing(backend: Backend, settings: Mapping[str, Any], special_tokens: Mapping[str, str], source: Path) -> None:
    """Add what tokenizer_config.json lists beyond tokenizer.json, or with other flags: transformers does."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in _listed_tokens(settings, source) if repr(token) not in known])
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([AddedToken(text, special=True) for text in special_tokens.values() if text not in contents])


def _ids(backend: Backend, special_tokens: Mapping[str, str], name: str) -> tuple[int, ...]:
    token_id = backend.token_to_id(special_tokens[name]) if name in special_tokens else None
    return () if token_id is None else (token_id,)


def _first(values: Iterable[int]) -> int | None:
    return next(iter(values), None)


def _directory_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own first, else tokenizer_config.json, which may hold several by name."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    return template if isinstance(template, str) else None


def _token_to_bytes(backend: Backend, source: str) -> Any:
    """The function from a token's spelling to the bytes it stands for, by the kind of decoder."""
    decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
    if '"ByteLevel"' in decoder:
        table = byte_of_character()

        def byte_level(token: str) -> bytes:
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
            return token.encode()  # an added token in plain text

        return byte_level
    if '"ByteFallback"' in decoder:

        def sentencepiece(token: str) -> bytes:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

        return sentencepiece
    raise ValueError(
        f"{source}: only byte-level and sentencepiece (byte fallback) vocabularies are supported, got decoder {decoder!r}"
    )


def _render(template: str, source: str, **variables: Any) -> str:
    import jinja2

    try:
        return _compile(template).render(tools=None, documents=None, **variables)
    except jinja2.exceptions.TemplateError as error:
        raise ValueError(f"{source}: the chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{source}: the chat template fails on these messages: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    """The template in jinja's sandbox, with the helpers and whitespace rules that templates are written for.

    A template comes from a stranger: the sandbox keeps it from Python's internals and from changing what it is given.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _generation_tag() -> Any:
    """{% generation %} ... {% endgeneration %}: marks the assistant's words for training; here its content is simply kept."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja reads it from the class)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Generation
