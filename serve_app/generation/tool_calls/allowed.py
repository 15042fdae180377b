"""The calls that a request allows: the model sees more tools, so that their prompt stays the same."""

from msgspec.structs import replace

from serve_app.api.tool_calls import CallArguments, CallBegun, CallEnded, CallEvent
from serve_app.generation.answer import Piece, SplitPiece, in_pieces


class AllowedCalls:
    """Lets through the calls that ``inner`` reads of the tools ``names``; it shows those of others as text."""

    def __init__(self, inner: SplitPiece, names: frozenset[str]) -> None:
        self._inner = inner
        self._names = names
        self._called = False
        self._refused: str | None = None  # the text of the open call of another tool

    @property
    def by_token(self) -> bool:
        """Whether each next piece must hold a single token."""
        return self._inner.by_token

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the text comes first."""
        return [shown for read in self._inner.split(piece) for shown in self._shown(read)]

    def _shown(self, piece: Piece) -> list[Piece]:
        if not piece.calls and self._refused is None and piece.finish_reason != "tool_calls":
            return [piece]
        events: list[str | CallEvent] = [piece.text] if piece.text else []
        for event in piece.calls:
            events += self._event(event)
        if piece.finish_reason is not None and self._refused is not None:
            events.append(self._refused)
        reason = "stop" if piece.finish_reason == "tool_calls" else piece.finish_reason
        return in_pieces(replace(piece, finish_reason=reason), events, called=self._called, parallel=True)

    def _event(self, event: CallEvent) -> list[str | CallEvent]:
        if isinstance(event, CallBegun):
            if event.name in self._names:
                self._called = True
                return [event]
            self._refused = event.name
        elif self._refused is None:
            return [event]
        elif isinstance(event, CallArguments):
            self._refused += event.json
        elif isinstance(event, CallEnded):
            text, self._refused = self._refused, None
            return [max(event.raw, text, key=len)]  # some readers keep no more of a call than its arguments
        return []
