"""All errors for clients: one tree of classes, each with its HTTP status and OpenAI type and code.

A message names the remedy. It never holds a stack trace, another tenant's data, or a path that is not an operator's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Where = Literal["port", "ingress", "router", "session", "engine"]
"""The places that refuse a request or let it wait: connections of one address, an ingress' limits and its queue, its
router while no replica accepts more, a replica's sessions, and its engine's queue."""


@dataclass(frozen=True, slots=True)
class LimitReason:
    """Why a request is refused or waits: the ``limit`` at a ``place``, by the setting's name.

    The tenant itself has ``used`` so much of ``most``; None: the limit is not counted by tenant.
    """

    place: Where
    limit: str
    used: int | None = None
    most: int | None = None

    def shown(self, retry_after_s: float | None = None) -> dict[str, Any]:
        """Return the reason as in errors, explanations and reports."""
        told = {"place": self.place, "limit": self.limit, "used": self.used, "most": self.most}
        return told if retry_after_s is None else {**told, "retry_after_s": round(retry_after_s, 3)}


_REMEDIES = {
    "requests_per_second": "Let it send fewer requests a second, or raise its requests_per_second.",
    "concurrent_requests": "Let it send fewer requests at once, or raise its concurrent_requests.",
    "concurrent_sessions": "Let it end sessions that it does not continue, or raise its concurrent_sessions.",
    "tokens_per_minute": "Let it send shorter prompts or a smaller max_tokens, or raise its tokens_per_minute.",
    "budget": "It waits until its budget begins anew, or gets a larger one.",
    "max_queued_requests": "Add replicas, or raise its cache_share or max_queued_requests.",
    "max_body_bytes": "Add replicas, or let it send fewer large requests at once.",
    "max_num_seqs": "Add replicas, or raise max_num_seqs.",
    "max_waiting_requests": "Add replicas, or raise max_waiting_requests.",
    "num_blocks": "Add replicas or memory: live sessions hold the pool.",
    "max_cpu_loras": "Raise max_cpu_loras, or use fewer adapters at once.",
    "event_streams": "Close other pages and listeners of this key.",
    "max_connections_per_address": "Use fewer connections from one address, or raise max_connections_per_address.",
}


def remedy_of(limit: str) -> str:
    """Return what ends the refusals by a limit (``LimitReason.limit``), for the operator."""
    return _REMEDIES.get(limit, "Send fewer requests at once, or add replicas.")


class WarmpathError(Exception):
    """Base of all errors for clients. ``param``: the offending field, if there is one; ``reason``: of a refusal."""

    status = 500
    type = "api_error"
    code: str | None = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: LimitReason | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.reason = reason
        if code is not None:
            self.code = code

    @property
    def shown_reason(self) -> dict[str, Any]:
        """The field of an API's error with the reason of a refusal, if it is one."""
        return {} if self.reason is None else {"reason": self.reason.shown(self.retry_after_s)}


class InvalidRequest(WarmpathError):
    """The body or a parameter is invalid; the client must change it."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON, or compressed in an unknown way."""

    status = 415
    code = "unsupported_media_type"


class UnsupportedEncoding(UnsupportedMediaType):
    """The body is compressed in an unknown way."""

    code = "unsupported_content_encoding"


class Conflict(InvalidRequest):
    """The object's state does not allow this."""

    status = 409
    code = "conflict"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus max_tokens cannot fit the model or the pool."""

    code = "context_length_exceeded"


class AuthenticationFailed(WarmpathError):
    """The API key is missing or unknown."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDenied(WarmpathError):
    """The key is valid, but lacks the permission."""

    status = 403
    type = "invalid_request_error"
    code = "permission_denied"


class NotFound(WarmpathError):
    """The path, model or object does not exist."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(NotFound):
    """The path exists, the method does not. ``allowed``: those that do."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class ResponseDamaged(NotFound):
    """A stored response cannot be read any more; sending the request again does not help."""

    code = "response_damaged"


class StoredByNewerRelease(WarmpathError):
    """What is stored has a form that this release does not know."""

    status = 503
    type = "server_error"
    code = "stored_by_newer_release"


class ModelNotFound(NotFound):
    """The deployment does not serve the requested model."""

    code = "model_not_found"


class RequestTimeout(WarmpathError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class RequestTooLarge(WarmpathError):
    """The body is over the configured bound."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimited(WarmpathError):
    """A limit or a queue refuses the request, as ``reason`` tells; retry after ``retry_after_s``."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class BudgetSpent(RateLimited):
    """The tenant has spent its budget. Clients do not retry it by themselves."""

    code = "budget_spent"


class Overloaded(WarmpathError):
    """No replica can accept the request now; retry after ``retry_after_s``."""

    status = 503
    type = "server_error"
    code = "service_unavailable"


class GenerationFailed(WarmpathError):
    """The engine failed this request; others are not affected."""

    type = "server_error"
    code = "generation_failed"


_EXCEPTION = re.compile(r"^(?P<kind>(?:\w+\.)*[A-Z]\w*): (?P<text>.+)$")


def unread(error: BaseException) -> str:
    """Return why a file cannot be read, for its owner: no number of an error, no name of a decoder."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8, at byte {error.start}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def innermost(message: str) -> str:
    """Return the last exception in a traceback, without the class if it is warmpath's; else the text itself."""
    for line in reversed(message.strip().splitlines()):
        if match := _EXCEPTION.match(line):
            ours = match["kind"] == "ValueError" or match["kind"].startswith(("serve_app.", "router."))
            return match["text"] if ours else line
    return message.strip()
