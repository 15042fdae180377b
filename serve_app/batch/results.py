"""The lines of a batch's results, in each API's form."""

from typing import Any

import msgspec

from serve_app.batch.batch_file import APIS
from serve_app.batch.batches import LineResult, Unasked
from serve_app.errors import WarmpathError

_WHY = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because the batch was cancelled.",
}


def openai_line(result: LineResult, unasked: Unasked) -> bytes:
    """Return a result in OpenAI's form. One with status 0 was not asked for, ``unasked`` tells why."""
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    if result.status:
        response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
        if result.warning:
            response["warning"] = result.warning
    else:
        error = {"code": f"batch_{unasked}", "message": _WHY.get(unasked, "")}
    line = {"id": f"batch_{result.request_id}", "custom_id": result.custom_id, "response": response, "error": error}
    return msgspec.json.encode(line)


def anthropic_line(result: LineResult, unasked: Unasked) -> bytes:
    """Return a result in Anthropic's form; see ``openai_line``."""
    outcome: dict[str, Any] = {"type": "canceled" if unasked == "cancelled" else "expired"}
    if result.ok:
        outcome = {"type": "succeeded", "message": result.body}
    elif result.status:
        outcome = {"type": "errored", "error": result.body}
    return msgspec.json.encode({"custom_id": result.custom_id, "result": outcome})


def error_body(url: str, request_id: str, message: str) -> bytes:
    """Return an error of the server in the shape of the API with this path."""
    return msgspec.json.encode(APIS[url][1]().error(WarmpathError(message), request_id).body)
