"""Incremental conversion of tokens to text in whole characters, and detection of stop strings."""

from collections.abc import Iterable, Mapping, Sequence
from encodings import utf_8
from typing import Any

from serve_app.tokenization.segments import component_state

MAX_HELD_TOKENS = 16
"""Text of a tokenizer that is not byte-level is released after this many tokens, even if it looks unfinished."""


def _byte_of_char() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary. Source: GPT-2's bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


class TokenTexts:
    """The texts of one tokenizer's ids, shared by all decoders. ``byte_level``: every id is a byte string."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        state = component_state(tokenizer.decoder)
        if state is not None and state.get("type") == "Sequence" and len(state["decoders"]) == 1:
            (state,) = state["decoders"]
        self.byte_level = state is not None and state.get("type") == "ByteLevel"
        self.known: dict[int, bytes] = dict.fromkeys(self._special, b"")
        """What ``token_bytes`` has returned, by id."""
        self._byte_of_char = _byte_of_char()

    def is_special(self, token_id: int) -> bool:
        """Return whether the text omits the token."""
        return token_id in self._special

    @property
    def special_tokens(self) -> frozenset[str]:
        """The names of the special tokens."""
        return frozenset(self._special.values())

    def special(self, words: Iterable[str]) -> dict[int, str]:
        """Return the special tokens among the words, by id."""
        names = frozenset(words)
        return {token_id: word for token_id, word in self._special.items() if word in names}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token of a byte-level tokenizer; b"" for a special or unknown one."""
        raw = self.known.get(token_id)
        if raw is None:
            token: str | None = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""
            codes = [self._byte_of_char.get(char, -1) for char in token]
            raw = token.encode() if -1 in codes else bytes(codes)
            self.known[token_id] = raw
        return raw

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token for display in a token list. Special tokens are shown by name."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return (token or "").encode()
        if self.byte_level:
            return self.token_bytes(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class Detokenizer:
    """Detokenizes one answer. The results of all ``push`` calls and ``flush`` concatenate to the decoding of all ids.

    Byte-level BPE (Llama 3, Qwen, the demo model): exact, with constant work per token. Others: a window of the tokens
    since the last text, because sentencepiece drops a first space. There, a run of byte tokens may differ if it becomes
    invalid, or looks unfinished for ``MAX_HELD_TOKENS``. ``special``: special tokens that are also text.
    """

    def __init__(self, texts: TokenTexts, special: Mapping[int, str] | None = None) -> None:
        self._texts = texts
        self._special_texts = {token_id: text.encode() for token_id, text in special.items()} if special else {}
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._released_ids: list[int] = []
        self._pending_ids: list[int] = []

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token (see ``TokenTexts.shown_bytes``)."""
        return self._texts.shown_bytes(token_id)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by ``token_ids``. An incomplete character is kept for later."""
        texts = self._texts
        if texts.byte_level:
            if len(token_ids) == 1:  # the usual case, with as few calls as possible
                (token_id,) = token_ids
                raw = self._special_texts.get(token_id) or texts.known.get(token_id) or texts.token_bytes(token_id)
            else:
                raw = b"".join([self._special_texts.get(i) or texts.token_bytes(i) for i in token_ids])
            # ASCII, the most common text, needs no decoder unless the decoder holds bytes back.
            return raw.decode("ascii") if raw.isascii() and not self._utf8.buffer else self._utf8.decode(raw)
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        """Return the text still held, with U+FFFD for an incomplete character."""
        if self._texts.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._show(self._window_text()) if self._pending_ids else ""

    def _push_one(self, token_id: int) -> str:
        if token_id in self._special_texts:
            return self.flush() + self._special_texts[token_id].decode()
        if self._texts.is_special(token_id):
            return ""
        self._pending_ids.append(token_id)
        text = self._window_text()
        if text.endswith("\ufffd") and len(self._pending_ids) < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def _window_text(self) -> str:
        return self._texts.decode(self._released_ids + self._pending_ids)

    def _show(self, window_text: str) -> str:
        new = window_text[len(self._texts.decode(self._released_ids)) :] if self._released_ids else window_text
        if new or not self._released_ids:
            self._released_ids = self._pending_ids
        else:
            self._released_ids = self._released_ids + self._pending_ids
        self._pending_ids = []
        return new


class _Beginning:
    """A beginning of some words: a state of Aho and Corasick's automaton, which is made as far as a text comes.

    ``shorter``: the longest other beginning with which it ends, None for the empty one; ``whole``: the length of the
    longest word with which it ends, 0 without; ``open``: the length of the longest incomplete word likewise.
    """

    __slots__ = ("_length", "_longer", "_shorter", "_words", "open", "whole")

    whole: int
    open: int

    def __init__(self, words: Sequence[str], length: int = 0, shorter: "_Beginning | None" = None) -> None:
        self._length, self._shorter = length, shorter
        self._longer: dict[str, _Beginning] = {}
        self._words: dict[str, list[str]] = {}
        self.whole = 0 if shorter is None else shorter.whole
        for word in words:
            if len(word) > length:
                self._words.setdefault(word[length], []).append(word)
            else:
                self.whole = length
        self.open = length if self._words or shorter is None else shorter.open

    def after(self, char: str) -> "_Beginning":
        """Return the longest beginning with which a text ends after this one and one more character."""
        state = self
        while (longer := state._longer.get(char)) is None:
            if char in state._words:
                return state._make(char)
            if state._shorter is None:
                return state
            state = state._shorter
        return longer

    def _make(self, char: str) -> "_Beginning":
        shorter = self if self._shorter is None else self._shorter.after(char)
        made = self._longer[char] = _Beginning(self._words[char], self._length + 1, shorter)
        return made


class StopChecker:
    """Ends a text before the stop string that is complete first (of two the longer), independent of chunk boundaries.

    Each character costs the same, however many and long the stop strings are. ``include``: the text ends after the stop
    string. ``found``: the stop string that ended it, "" before.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        self._stop = stop
        self._include = include
        self._at = self._begin = _Beginning(stop)
        self._buffer = ""
        self._stopped = False
        self.found = ""

    def push(self, text: str, *, early: bool = False) -> tuple[str, bool]:
        """Return (text to show, whether a stop string was found). ``early``: ignore stop strings that end here."""
        if not self._stop or self._stopped:
            return ("" if self._stopped else text), self._stopped
        seen, at = self._buffer + text, self._at
        for end, char in enumerate(text, len(self._buffer) + 1):
            at = at.after(char)
            if at.whole and not early:
                start = end - at.whole
                self._buffer, self._stopped = "", True
                self.found = seen[start:end]
                return seen[: end if self._include else start], True
        self._at = at
        self._buffer = seen[len(seen) - at.open :]
        return seen[: len(seen) - at.open], False

    def flush(self) -> str:
        """Return the text held back, after an end without a complete stop string."""
        buffer, self._buffer, self._at = self._buffer, "", self._begin
        return buffer


def held_back(text: str, word: str) -> int:
    """Return how many last characters of a text may be the beginning of an incomplete word."""
    lengths = range(min(len(text), len(word) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(word[:length])), 0)
