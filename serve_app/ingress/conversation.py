"""One request of ``POST /v1/responses`` with storage: the conversation that it continues, and its own."""

from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.api.openai.responses.items import answer_of, stored_items
from serve_app.api.openai.responses.request import ResponsesBody
from serve_app.api.openai.responses.response import ResponsesFormat
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest, RequestTooLarge
from serve_app.stored.responses import Document, StoredResponses

MAX_REFERRED = 256
"""Stored responses to whose items one input may refer."""
_TOO_LARGE = "The conversation and the request are larger together than a body may be; begin a new one."

_encode = msgspec.json.Encoder().encode


class Conversation(ResponsesFormat):
    """A request, and the format of its answer. ``stored`` None: the deployment stores no responses."""

    def __init__(
        self,
        stored: StoredResponses | None,
        tenant: str,
        parse: Callable[[bytes], ResponsesBody],
    ) -> None:
        self._stored = stored
        self._parse = parse
        self._tenant = tenant
        self._earlier: list[dict[str, Any]] = []
        self._input: list[dict[str, Any]] = []

    def read(self, body: bytes) -> None:
        """Parse the body. Raises InvalidRequest."""
        self._body = self._parse(body)
        self._items = self._body.items
        self._referred = dict.fromkeys(answer_of(item) for item in self._items)
        self._referred.pop("", None)

    async def go_on(self, room_bytes: int, grow: Callable[[int], None]) -> None:
        """Fetch the conversation that the body continues, and the items it refers to. ``grow`` gets sizes in bytes.

        Raises InvalidRequest if the tenant has no such response, RequestTooLarge for more than ``room_bytes``.
        """
        if self._stored is None:
            return
        if (previous_id := self._body.previous_response_id) is not None:
            room_bytes -= await self._continue(self._stored, previous_id, room_bytes, grow)
        await self._dereference(self._stored, room_bytes, grow)

    async def _continue(
        self, stored: StoredResponses, previous_id: str, room_bytes: int, grow: Callable[[int], None]
    ) -> int:
        if (found := await stored.get(self._tenant, previous_id)) is None:
            raise InvalidRequest(
                f"There is no stored response {previous_id!r} to continue; send the whole conversation.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        document, size_bytes = found
        if size_bytes > room_bytes:
            raise RequestTooLarge(_TOO_LARGE, param="previous_response_id")
        grow(size_bytes)
        self._earlier = [*document.input, *stored_items(document.response["output"])]
        return size_bytes

    async def _dereference(self, stored: StoredResponses, room_bytes: int, grow: Callable[[int], None]) -> None:
        """Replace references to items of the tenant's stored answers by these items. Others stay, and are a 400."""
        if not self._referred:
            return
        if len(self._referred) > MAX_REFERRED:
            message = f"input refers to items of over {MAX_REFERRED} responses; use previous_response_id."
            raise InvalidRequest(message, param="input")
        found: dict[str, tuple[dict[str, Any], int]] = {}
        for response_id in self._referred:
            if (answer := await stored.get(self._tenant, response_id)) is not None:
                found |= {item["id"]: (item, len(_encode(item))) for item in answer[0].response["output"]}
        items = list(self._items)
        for index, item in enumerate(items):
            if answer_of(item) and item["id"] in found:
                items[index], size_bytes = found[item["id"]]
                if (room_bytes := room_bytes - size_bytes) < 0:
                    raise RequestTooLarge(_TOO_LARGE, param="input")
                grow(size_bytes)
        self._items = items

    def parse(self, _: bytes) -> ChatRequest:
        """Return the request with its earlier conversation. Raises InvalidRequest."""
        request = self._body.request(None if self._stored is None else self._earlier, self._items)
        if request.repeated["store"]:
            self._input = [*self._earlier, *stored_items(self._items)]
        return request

    async def keep(self) -> None:
        """Store the complete response; it is durable on return. Raises a ``WarmpathError``."""
        if self._stored is not None and self.response["store"]:
            await self._stored.put(self._tenant, Document(self._input, self.response))
