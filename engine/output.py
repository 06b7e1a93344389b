"""Output tokens as text that can be shown while it grows.

A token is bytes, not characters: one emoji may be three tokens, and a stop string may begin in one token and end in
another. ``TextStream`` releases text only once it is certain, so nothing that was shown is ever taken back.
"""

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol


class ByteTokens(Protocol):
    """What ``TextStream`` needs of ``engine.model.tokenizer.Tokenizer``."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class TextStream:
    """The text of one output, token by token.

    However the tokens are pushed, the pieces that ``push`` and ``finish`` return, joined, are the bytes of all tokens
    decoded as UTF-8 (U+FFFD for what is not UTF-8), up to the first stop string to be complete; the stop string and what
    follows it are left out. Of several that are complete at the same character the longest counts.

    Held back, for now, is an unfinished character and text that may yet become a stop string. The time for a whole
    output is linear in its length. ``skip_special_tokens``: leave special tokens out of the text (vLLM's default).
    ValueError for an empty stop string.
    """

    def __init__(self, tokenizer: ByteTokens, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a sequence of non-empty strings, got {stop!r}")
        self.stopped_by: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_Matcher(s) for s in sorted(set(stop), key=len, reverse=True)]
        self._held = ""  # decoded, not released
        self._released: list[str] = []
        self._finished = False

    def push(self, token_id: int) -> str:
        """The text that this token released, often "" ("" always, once a stop string has been found)."""
        if self._finished:
            raise RuntimeError("push() after finish()")
        if self.stopped_by is not None or (self._skip and self._tokenizer.is_special(token_id)):
            return ""
        return self._release(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest of the text: no more tokens will come. "" when called again."""
        if self._finished or self.stopped_by is not None:
            self._finished = True
            return ""
        self._finished = True
        piece = self._release(self._decoder.decode(b"", final=True))
        if self.stopped_by is None:
            piece += self._held
            self._released.append(self._held)
            self._held = ""
        return piece

    def copy(self) -> "TextStream":
        """One that goes on from here on its own: a beam splits."""
        other = TextStream(self._tokenizer, (), self._skip)
        other._decoder.setstate(self._decoder.getstate())
        other._stops = [m.copy() for m in self._stops]
        other._held, other._released = self._held, [self.text]
        other.stopped_by, other._finished = self.stopped_by, self._finished
        return other

    @property
    def text(self) -> str:
        """All that was released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def _release(self, new: str) -> str:
        """Look for stop strings in ``new`` and release what can no longer be part of one."""
        if not new:
            return ""
        pending = self._held + new
        safe = len(pending)
        if self._stops:
            ends = [(end, -len(m.pattern), m.pattern) for m in self._stops if (end := m.feed(new)) is not None]
            if ends:
                end, _, self.stopped_by = min(ends)
                safe = len(self._held) + end - len(self.stopped_by)
            else:
                safe -= max(m.matched for m in self._stops)
        self._held = "" if self.stopped_by is not None else pending[safe:]
        piece = pending[:safe]
        if piece:
            self._released.append(piece)
        return piece


class _Matcher:
    """Finds one string in text that comes in pieces (Knuth, Morris and Pratt, 1977): linear time, nothing read twice."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # how much of the pattern the text so far ends with
        self._fallback = [0] * len(pattern)  # for each prefix, the longest shorter prefix that it ends with
        k = 0
        for i in range(1, len(pattern)):
            while k and pattern[i] != pattern[k]:
                k = self._fallback[k - 1]
            k += pattern[i] == pattern[k]
            self._fallback[i] = k

    def copy(self) -> "_Matcher":
        return copy.copy(self)  # pattern and table are never changed

    def feed(self, text: str) -> int | None:
        """Go on with ``text``; where in it the pattern is first complete (the position after it), or None."""
        pattern, fallback, k = self.pattern, self._fallback, self.matched
        for i, character in enumerate(text):
            while k and character != pattern[k]:
                k = fallback[k - 1]
            k += character == pattern[k]
            if k == len(pattern):
                return i + 1
        self.matched = k
        return None
