"""Read answers with vLLM's parsers, as pieces; check the names of parsers. vLLM is imported late."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from serve_app.api.format import CallArguments, CallBegun, CallEnded, CallEvent, are_whole
from serve_app.config.engine import VLLM_VERSIONS, vllm_missing
from serve_app.generation.answer import Piece, SplitPiece, in_pieces
from serve_app.generation.reasoning import REASONING_TAGS
from serve_app.generation.tool_calls.formats import FORMATS
from serve_app.generation.tool_calls.harmony import REASONING_PARSER, TOOL_PARSER

if TYPE_CHECKING:
    from serve_app.engine.vllm.parsers import Push


PARSERS = {
    "tool_parser": ("auto", *FORMATS, TOOL_PARSER),
    "reasoning_parser": ("auto", "none", *REASONING_TAGS, REASONING_PARSER),
}
"""Settings, and their values that need no vLLM."""
OTHERS = f"; vLLM's others need vLLM {VLLM_VERSIONS} in the environment of the ingress"


def check_parser(setting: str, name: str) -> None:
    """Raise ValueError for an unknown parser: neither this project's nor, if vLLM is installed, one of vLLM's."""
    names, more = [*PARSERS[setting]], OTHERS
    if name in names:
        return
    if not vllm_missing():
        from serve_app.engine.vllm.parsers import parser_names

        names, more = [*names, *(other for other in parser_names(setting) if other not in names)], ""
    if name not in names:
        raise ValueError(f"{setting} must be one of {', '.join(names)}, not {name[:64]!r}{more}")


class VllmGate:
    """Tells reasoning from content by vLLM's parser ``push``, for stop strings."""

    def __init__(self, push: "Push") -> None:
        self._push = push
        self._over = False

    def __call__(self, text: str, token_ids: Sequence[int], *, ended: bool = False) -> tuple[str, str]:
        """Return (text before the content, more of the content)."""
        if self._over:
            return "", text
        added = self._push(text, list(token_ids), finished=ended)
        content = text[-len(added.content) :] if added and added.content else ""
        self._over = bool(content.strip())
        content = content.lstrip() if self._over else ""
        return text[: len(text) - len(content)], content


class VllmReader:
    """Splits one choice by vLLM's parser ``push``; ``rest`` reads calls in the text if that parser does not."""

    by_token = True

    def __init__(self, push: "Push", *, parallel: bool, rest: SplitPiece | None = None) -> None:
        self._push = push
        self._parallel = parallel
        self._rest = rest
        self._index = -1
        self._arguments: str | None = None  # of the open call

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the reasoning comes first."""
        ended = piece.finish_reason is not None
        cut = piece.finish_reason == "length" or bool(piece.stop_sequence)
        added = self._push(piece.text, list(piece.token_ids), finished=ended and not cut)
        text, reasoning, calls = (added.content, added.reasoning, added.tool_calls) if added else ("", "", ())
        if cut and (rest := self._push("", [], finished=True)):
            # At its end a parser completes a call that was cut, with values cut short; only the text counts.
            text, reasoning = (text or "") + (rest.content or ""), (reasoning or "") + (rest.reasoning or "")
        tokens, logprobs = (piece.new_tokens, ()) if reasoning else (0, piece.logprobs)
        piece = replace(piece, text=text or "", reasoning=reasoning or "", reasoning_tokens=tokens, logprobs=logprobs)
        if self._rest is not None:
            return self._rest.split(piece)
        events: list[str | CallEvent] = [text] if text else []
        for call in calls:
            if call.index > self._index and call.function and call.function.name:
                events += self._end(cut=False)
                self._index, self._arguments = call.index, ""
                events.append(CallBegun(call.id, call.function.name))
            if self._arguments is not None and call.function and call.function.arguments:
                self._arguments += call.function.arguments
                events.append(CallArguments(call.function.arguments))
        if ended or (text and not calls):
            events += self._end(cut=cut)
        return in_pieces(piece, events, called=self._index >= 0, parallel=self._parallel)

    def _end(self, *, cut: bool) -> list[CallEvent]:
        """End the open call, if any. ``cut``: the answer was cut."""
        arguments, self._arguments = self._arguments, None
        return [] if arguments is None else [CallEnded(arguments, cut=cut and not are_whole(arguments))]
