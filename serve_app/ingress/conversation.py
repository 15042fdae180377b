"""One request of ``POST /v1/responses`` with storage: the conversation that it continues, and its own."""

from collections.abc import Callable
from typing import Any

from serve_app.api.openai.responses.items import stored_items
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.api.openai.responses.response import ResponsesFormat
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest, RequestTooLarge
from serve_app.stored.responses import Document, StoredResponses


class Conversation(ResponsesFormat):
    """A request, and the format of its answer. ``stored`` None: the deployment stores no responses."""

    def __init__(self, stored: StoredResponses | None, tenant: str) -> None:
        self._stored = stored
        self._tenant = tenant
        self._earlier: list[dict[str, Any]] = []
        self._input: list[dict[str, Any]] = []

    def read(self, body: bytes) -> None:
        """Parse the body. Raises InvalidRequest."""
        self._body = ResponsesBody.parse(body)

    async def go_on(self, room_bytes: int, grow: Callable[[int], None]) -> None:
        """Fetch the conversation that the body continues. ``grow`` gets its size in bytes.

        Raises InvalidRequest if the tenant has no such response, RequestTooLarge for one over ``room_bytes``.
        """
        previous_id = self._body.previous_response_id
        if self._stored is None or previous_id is None:
            return
        if (found := await self._stored.get(self._tenant, previous_id)) is None:
            raise InvalidRequest(
                f"There is no stored response {previous_id!r} to continue; send the whole conversation.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        document, size_bytes = found
        if size_bytes > room_bytes:
            message = "The conversation and the request are larger together than a body may be; begin a new one."
            raise RequestTooLarge(message, param="previous_response_id")
        grow(size_bytes)
        self._earlier = [*document.input, *stored_items(document.response["output"])]

    def parse(self, _: bytes) -> ChatRequest:
        """Return the request with its earlier conversation. Raises InvalidRequest."""
        wanted = self._body.request(None if self._stored is None else self._earlier)
        if wanted.repeated["store"]:
            self._input = [*self._earlier, *stored_items(self._body.items)]
        return wanted

    async def keep(self) -> None:
        """Store the complete response; it is durable on return. Raises a ``WarmpathError``."""
        if self._stored is not None and self.response["store"]:
            await self._stored.put(self._tenant, Document(self._input, self.response))
