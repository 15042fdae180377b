"""The bodies and shapes of files and batches, OpenAI's and Anthropic's.

Source: OpenAI's and Anthropic's API references, and the types of their Python clients.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from mimetypes import guess_type
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from serve_app.api.json_body import JsonBody, Must
from serve_app.batch.batches import StoredBatch
from serve_app.batch.files import File, Listed, ListPlace, place_in_name, place_of
from serve_app.errors import InvalidRequest

MAX_REQUESTS = 100_000
"""Of one of Anthropic's batches."""
MAX_VALUES = 4_000_000
"""Of all of them together."""
LEAST_LIFE_S, MOST_LIFE_S = 3600, 7_776_000
MOST_WINDOW_S = 2_592_000
_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]


class ExpiresAfter(JsonBody):
    """When a file expires."""

    anchor: Annotated[Literal["created_at"], Must("created_at")] = "created_at"
    seconds: Annotated[
        int, Field(ge=LEAST_LIFE_S, le=MOST_LIFE_S), Must(f"a whole number from {LEAST_LIFE_S} to {MOST_LIFE_S}")
    ]


class BatchBody(JsonBody):
    """The body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Field(min_length=1), Must("the id of an uploaded file")]
    endpoint: Annotated[Endpoint, Must("/v1/chat/completions, /v1/completions or /v1/responses")]
    completion_window: Annotated[
        str, Field(pattern=_WINDOW.pattern), Must("a time such as 24h, in minutes (m), hours (h) or days (d)")
    ] = "24h"
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None,
        Field(max_length=16),
        Must("an object with at most 16 strings, of at most 512 characters"),
    ] = None
    output_expires_after: Annotated[ExpiresAfter | None, Must("an object with anchor and seconds")] = None

    @property
    def window_s(self) -> float:
        """The longest time until the batch ends. Raises InvalidRequest for over 30 days."""
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
        if not 0 < seconds <= MOST_WINDOW_S:
            raise InvalidRequest("completion_window must be at most 30d, such as 24h.", param="completion_window")
        return seconds


class MessageBatchItem(JsonBody):
    """One request of a message batch."""

    custom_id: Annotated[
        str, Field(pattern=f"^{_ID.pattern}$"), Must("1 to 64 letters, digits, hyphens and underscores")
    ]
    params: Annotated[dict[str, Any], Must("the body of POST /v1/messages")]


class MessageBatchBody(JsonBody):
    """The body of ``POST /v1/messages/batches``."""

    bounded: ClassVar[Mapping[str, int]] = {"requests": MAX_VALUES}

    requests: Annotated[
        list[Annotated[MessageBatchItem, Must("an object with custom_id and params")]],
        Field(min_length=1, max_length=MAX_REQUESTS),
        Must(f"a list of 1 to {MAX_REQUESTS} objects with custom_id and params"),
    ]

    def lines(self) -> bytes:
        """Return the requests as lines of a batch file. Raises InvalidRequest for one custom_id twice."""
        seen: set[str] = set()
        for at, item in enumerate(self.requests):
            if item.custom_id in seen:
                path = f"requests[{at}].custom_id"
                raise InvalidRequest(f"{path} is that of an earlier request; each needs its own.", param=path)
            seen.add(item.custom_id)
        lines = (
            {"custom_id": item.custom_id, "method": "POST", "url": "/v1/messages", "body": item.params}
            for item in self.requests
        )
        return b"\n".join(map(msgspec.json.encode, lines))


class PageQuery(JsonBody):
    """The query of lists. ``after``, ``after_id``, ``before_id``, ``page``: the id of an object, which may be gone."""

    limit: Annotated[int, Field(ge=1, le=10_000, strict=False)] = 20
    after: str | None = None
    after_id: str | None = None
    before_id: str | None = None
    page: str | None = None
    order: Annotated[Literal["asc", "desc"], Must("asc or desc")] = "desc"
    purpose: str | None = None


def page(
    rows: Sequence[Listed], query: PageQuery, prefix: str, form: Callable[[Listed], dict[str, Any]]
) -> dict[str, Any]:
    """Return the page of a list, the newest first, that a query selects. Raises InvalidRequest.

    ``prefix``: of the ids. What a cursor names may be gone meanwhile: the page then goes on from its place.
    """
    places = {one.id: place_of(one) for one in rows}
    listed = list(rows) if query.order == "desc" else [*reversed(rows)]
    for name in ("after", "after_id", "page"):
        if (at := _cursor(query, name, prefix, places)) is not None:
            listed = [one for one in listed if _is_after(places[one.id], at, query.order)]
    taken = listed[: query.limit]
    if (at := _cursor(query, "before_id", prefix, places)) is not None:  # the page that ends right before it
        listed = [one for one in listed if _is_after(at, places[one.id], query.order)]
        taken = listed[-query.limit :]
    first, last = (taken[0].id, taken[-1].id) if taken else (None, None)
    return {"data": [*map(form, taken)], "first_id": first, "last_id": last, "has_more": len(listed) > len(taken)}


def _cursor(query: PageQuery, name: str, prefix: str, places: Mapping[str, ListPlace]) -> ListPlace | None:
    if (value := getattr(query, name)) is None:
        return None
    at = places.get(value) or (place_in_name(value) if value.startswith(prefix) else None)
    if at is None:
        raise InvalidRequest(f"{name} must be an id of this list.", param=name)
    return at


def _is_after(one: ListPlace, other: ListPlace, order: str) -> bool:
    return one > other if order == "asc" else one < other


def openai_batch(batch: StoredBatch) -> dict[str, Any]:
    """Return a batch in OpenAI's shape."""
    errors = [msgspec.structs.asdict(error) for error in batch.errors]
    usage, times = batch.usage, batch.times
    body: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
        "usage": None,
    }
    for status in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"):
        body[f"{status}_at"] = int(times[status]) if status in times else None
    if usage:
        body["usage"] = {
            "input_tokens": usage["input_tokens"],
            "input_tokens_details": {"cached_tokens": usage["cached_tokens"]},
            "output_tokens": usage["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
            "total_tokens": usage["input_tokens"] + usage["output_tokens"],
        }
    return body


def anthropic_batch(batch: StoredBatch, results_url: str) -> dict[str, Any]:
    """Return a batch in Anthropic's shape: requests count as processing until all have ended."""
    left = batch.total - batch.completed - batch.failed
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if batch.ended:
        counts |= {"succeeded": batch.completed, "errored": batch.failed}
        counts["canceled" if batch.unasked == "cancelled" else "expired"] = left
    else:
        counts["processing"] = batch.total
    ended = max(batch.times.values()) if batch.ended else None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": counts,
        "created_at": _moment(batch.created_at),
        "expires_at": _moment(batch.expires_at),
        "ended_at": _moment(ended),
        "cancel_initiated_at": _moment(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": results_url if ended else None,
    }


def anthropic_file(file: File) -> dict[str, Any]:
    """Return a file in Anthropic's shape."""
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": guess_type(file.filename)[0] or "application/octet-stream",
        "size_bytes": file.bytes,
        "created_at": _moment(file.created_at),
        "expires_at": _moment(file.expires_at),
        "downloadable": True,
    }


def _moment(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def expiry_of(form: Mapping[str, str]) -> float | None:
    """Return the life of a file by the fields of its form, None: the longest. Raises InvalidRequest."""
    if "expires_in_seconds" in form:  # Anthropic's
        form = {"expires_after[seconds]": form["expires_in_seconds"]}
    given = {name: form[f"expires_after[{name}]"] for name in ("anchor", "seconds") if f"expires_after[{name}]" in form}
    if not given:
        return None
    seconds = given.get("seconds", "")
    return ExpiresAfter.checked({**given, "seconds": int(seconds) if seconds.isdecimal() else seconds}).seconds
