"""All errors for clients: one tree of classes, each with its HTTP status and OpenAI type and code.

A message names the remedy. It never holds a stack trace, another tenant's data, or a path that is not an operator's.
"""


class WarmpathError(Exception):
    """Base of all errors for clients. ``param`` names the offending field, if there is one."""

    status = 500
    type = "api_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InvalidRequest(WarmpathError):
    """The body or a parameter is invalid; the client must change it."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None


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


class ResponseDamaged(NotFound):
    """A stored response cannot be read any more; sending the request again does not help."""

    code = "response_damaged"


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
    """Every queue is full; retry after ``retry_after_s``."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Overloaded(WarmpathError):
    """No replica can accept the request now; retry after ``retry_after_s``."""

    status = 503
    type = "server_error"
    code = "service_unavailable"


class GenerationFailed(WarmpathError):
    """The engine failed this request; others are not affected."""

    type = "server_error"
    code = "generation_failed"
