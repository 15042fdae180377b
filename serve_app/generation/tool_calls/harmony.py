"""gpt-oss' harmony format: reasoning, calls and the answer in channels, parsed by OpenAI's library.

The library is optional, and imported late. It needs the vocabulary o200k_base, which it would download: that of the
checkpoint's own tokenizer is the same, and is used unless TIKTOKEN_ENCODINGS_BASE names a directory.
"""

import base64
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from serve_app.api.format import CallArguments, CallBegun, CallEnded, CallEvent, are_whole
from serve_app.generation.answer import Piece, SplitPiece, in_pieces
from serve_app.generation.reasoning import behind
from serve_app.generation.tool_calls.source import MakeId

if TYPE_CHECKING:
    from serve_app.tokenization.tokenizer import PromptTokenizer

TOOL_PARSER, REASONING_PARSER = "openai", "openai_gptoss"
"""vLLM's names of the format."""
START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN = (
    f"<|{word}|>" for word in ("start", "channel", "message", "end", "call", "return", "constrain")
)
MARKS = frozenset({START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN})
FINAL = f"{CHANNEL}final{MESSAGE}"
_BASE = "TIKTOKEN_ENCODINGS_BASE"
_FUNCTIONS = "functions."
_O200K_TOKENS = 199_998


def writes_harmony(template: str, special_tokens: frozenset[str]) -> bool:
    """Return whether a chat template writes harmony, with its marks as special tokens."""
    return all(mark in template and mark in special_tokens for mark in (START, CHANNEL, MESSAGE))


class Harmony:
    """Makes readers of harmony for a tokenizer. Raises ValueError with the remedy if the library cannot be used."""

    def __init__(self, tokenizer: "PromptTokenizer") -> None:
        if importlib.util.find_spec("openai_harmony") is None:
            raise ValueError("gpt-oss' harmony format is read by OpenAI's library: pip install openai-harmony")
        import openai_harmony

        def load() -> Any:
            return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)

        try:
            self._encoding = load() if _BASE in os.environ else _with_vocabulary_of(tokenizer, load)
        except openai_harmony.HarmonyError as error:
            raise ValueError(
                f"openai-harmony has no vocabulary, and the tokenizer's is another ({error}): "
                f"put o200k_base.tiktoken into a directory, and set {_BASE} to it"
            ) from error
        self._library = openai_harmony
        self.special = tokenizer.ids_in_grammars(MARKS)
        self._marks = frozenset(self.special.values())

    def parser(self, continued: str) -> "HarmonyParser":
        """Return a parser of one answer. ``continued``: the text of the answer that it continues, "" for none."""
        library = self._library
        parser = HarmonyParser(library.StreamableParser(self._encoding, library.Role.ASSISTANT), library.HarmonyError)
        if continued:
            parser.push(self.tokens(FINAL, special=True))
        return parser

    def tokens(self, text: str, *, special: bool) -> list[int]:
        """Return the library's ids of a text. ``special``: marks in it are marks."""
        return list(self._encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=()))

    def is_special(self, token_ids: Sequence[int]) -> bool:
        """Return whether a mark is among the model's token ids."""
        return any(token_id in self._marks for token_id in token_ids)


def _with_vocabulary_of(tokenizer: "PromptTokenizer", load: Any) -> Any:
    """Load the library's encoding with the tokenizer's vocabulary, whose checksum the library checks."""
    token_bytes = tokenizer.texts.token_bytes
    words = (base64.b64encode(token_bytes(rank)).decode() for rank in range(_O200K_TOKENS))
    with tempfile.TemporaryDirectory(prefix="warmpath-harmony-") as directory:
        lines = "".join(f"{word} {rank}\n" for rank, word in enumerate(words))
        (Path(directory) / "o200k_base.tiktoken").write_text(lines)
        os.environ[_BASE] = directory
        try:
            return load()
        finally:
            del os.environ[_BASE]


class HarmonyParser:
    """One answer's parser. ``channel``, ``recipient``: of the message at hand, "" outside of one's content."""

    def __init__(self, parser: Any, error: type[Exception]) -> None:
        self._parser = parser
        self._error = error
        self.channel = self.recipient = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Read tokens of one piece; return what they add to the message's content."""
        added = ""
        for token in tokens:
            try:
                self._parser.process(token)
            except self._error:
                continue
            added += self._parser.last_content_delta or ""
        self.channel = self._parser.current_channel or ""
        self.recipient = (self._parser.current_recipient or "").partition(CONSTRAIN)[0].strip()
        return added


class HarmonyReader:
    """Splits one choice by its channels: analysis is reasoning, final and commentary are text.

    ``tools``: functions that it may call, by name; a message to another is text, one to a built-in tool reasoning.
    ``rest`` reads the text. Text that belongs to no message is shown at the end.
    """

    by_token = True

    def __init__(
        self,
        harmony: Harmony,
        tools: Mapping[str, Any],
        make_id: MakeId,
        *,
        continued: str = "",
        parallel: bool = True,
        rest: SplitPiece | None = None,
    ) -> None:
        self._harmony = harmony
        self._parser = harmony.parser(continued)
        self._tools = tools
        self._make_id = make_id
        self._parallel = parallel
        self._rest = rest
        self._header = ""
        self._arguments: str | None = None  # of the open call
        self._calls = 0

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the reasoning comes first."""
        events: list[str | CallEvent] = []
        reasoning = ""
        for text, special in self._parts(piece):
            added = self._parser.push(self._harmony.tokens(text, special=special))
            name = self._called()
            if not self._parser.channel:
                events += self._end(cut=False)
                self._header = "" if special and text != CHANNEL else self._header + text
            elif name:
                if self._arguments is None:
                    self._arguments = ""
                    self._calls += 1
                    events.append(CallBegun(self._make_id(name), name))
                if added:
                    self._arguments += added
                    events.append(CallArguments(added))
            elif self._thinks():
                reasoning += added
            elif added:
                events.append(added)
            self._header = "" if self._parser.channel else self._header
        if piece.finish_reason is not None:
            events += self._end(cut=piece.finish_reason == "length" or bool(piece.stop_sequence))
            events += self._loose()
        has_text = any(isinstance(event, str) for event in events)
        logprobs, tokens = (piece.logprobs, 0) if has_text else ((), piece.new_tokens if reasoning else 0)
        piece = replace(piece, text="", reasoning=reasoning, reasoning_tokens=tokens, logprobs=logprobs)
        if self._rest is not None:
            return self._rest.split(replace(piece, text="".join(event for event in events if isinstance(event, str))))
        return in_pieces(piece, events, called=self._calls > 0, parallel=self._parallel)

    def _parts(self, piece: Piece) -> list[tuple[str, bool]]:
        """Return the parts of a piece's text, and whether each is a mark."""
        if not self._harmony.is_special(piece.token_ids):
            return [(piece.text, False)] if piece.text else []
        mark = next((mark for mark in MARKS if piece.text.endswith(mark)), "")
        before = piece.text.removesuffix(mark)
        return [part for part in ((before, False), (mark, True)) if part[0]]

    def _called(self) -> str:
        """Return the name of the function that the message calls, "" if it calls none."""
        recipient = self._parser.recipient
        if recipient.startswith(_FUNCTIONS) and self._tools:
            return recipient.removeprefix(_FUNCTIONS)
        return recipient if recipient in self._tools else ""

    def _thinks(self) -> bool:
        """Return whether the message is neither for the user nor a call."""
        recipient = self._parser.recipient
        return self._parser.channel == "analysis" or bool(recipient and not recipient.startswith(_FUNCTIONS))

    def _end(self, *, cut: bool) -> list[CallEvent]:
        """End the open call, if any. ``cut``: the answer was cut."""
        arguments, self._arguments = self._arguments, None
        return [] if arguments is None else [CallEnded(arguments, cut=cut and not are_whole(arguments))]

    def _loose(self) -> list[str]:
        """Return the text of an answer that has not begun a message."""
        header, self._header = self._header, ""
        loose = header and CHANNEL not in header and not header.lstrip().startswith("to=") and header != "assistant"
        return [header] if loose else []


class HarmonyGate:
    """Tells reasoning from content, for stop strings; all that follows the first text for the user is content."""

    def __init__(self, harmony: Harmony, continued: str = "") -> None:
        self._harmony = harmony
        self._parser = harmony.parser(continued)
        self._over = False

    def __call__(self, text: str, token_ids: Sequence[int], *, ended: bool = False) -> tuple[str, str]:
        """Return (text before the content, more of the content)."""
        if not self._over:
            special = self._harmony.is_special(token_ids)
            added = self._parser.push(self._harmony.tokens(text, special=special))
            self._over = bool(added) and not self._parser.recipient and self._parser.channel != "analysis"
        return ("", text) if self._over else (text, "")


def harmony_grammar(grammar: str, special: Mapping[str, int]) -> str:
    """Return a grammar, in llguidance's form, that applies to the final channel, behind any reasoning."""
    start, channel, message, end = (
        f"<[{special[mark]}]>" if mark in special else json.dumps(mark) for mark in (START, CHANNEL, MESSAGE, END)
    )
    lark = (
        f'start: thought? {channel} "final" {message} @answer\n'
        f'thought: {channel} "analysis" {message} /(?s:.*)/ {end} {start} "assistant"'
    )
    return behind(lark, grammar)
