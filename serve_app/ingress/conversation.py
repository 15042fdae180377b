"""One request of ``POST /v1/responses`` beside what is stored: the conversation that it goes on with, and its own."""

from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.api.openai.responses.items import previous_not_found, stored_items
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.api.openai.responses.response import ResponsesFormat
from serve_app.api.request import ChatRequest
from serve_app.errors import RequestTooLarge
from serve_app.stored.responses import Document, StoredResponses


class _Link(msgspec.Struct):
    previous_response_id: str | None = None


class Conversation:
    """What a request needs from storage. ``stored`` None: nothing is stored. ``format``: of its answer."""

    def __init__(self, stored: StoredResponses | None, tenant: str) -> None:
        self.format = ResponsesFormat(self._note)
        self._stored = stored
        self._tenant = tenant
        self._earlier: list[dict[str, Any]] | None = None
        self._document = Document([], {})

    @staticmethod
    def previous_id(body: bytes) -> str | None:
        """Return the response that a body goes on with. A body that is wrong has none: ``parse`` says why."""
        try:
            return msgspec.json.decode(body, type=_Link).previous_response_id
        except (ValueError, RecursionError):
            return None

    async def go_on(self, previous_id: str, room_bytes: int, grow: Callable[[int], None]) -> None:
        """Fetch the conversation. ``grow`` hears of its bytes.

        Raises InvalidRequest where the tenant has no such response, RequestTooLarge for one over ``room_bytes``.
        """
        if self._stored is None:
            return
        found = await self._stored.get(self._tenant, previous_id)
        if found is None:
            raise previous_not_found(previous_id)
        document, size_bytes = found
        if size_bytes > room_bytes:
            message = "The conversation and the request are larger together than a body may be; begin a new one."
            raise RequestTooLarge(message, param="previous_response_id")
        grow(size_bytes)
        self._earlier = [*document.input, *stored_items(document.response["output"])]

    def parse(self, body: bytes) -> ChatRequest:
        """Read the body, after what it goes on with. Raises InvalidRequest."""
        parsed = ResponsesBody.parse(body)
        wanted = parsed.request(self._earlier, stores=self._stored is not None)
        if wanted.repeated["store"]:
            self._document.input = [*(self._earlier or ()), *stored_items(parsed.items)]
        return wanted

    def _note(self, response: dict[str, Any]) -> None:
        self._document.response = response

    async def keep(self) -> None:
        """Store the response, once it is whole; durable on return. Raises a ``WarmpathError``."""
        if self._stored is not None and self._document.response["store"]:
            await self._stored.put(self._tenant, self._document)
