"""Every error a client can be shown: one tree, each class with its HTTP status and OpenAI type and code.

A message says what to change; it never carries a stack trace, another tenant's data, or a path but an operator's own.
"""


class WarmpathError(Exception):
    """Base of all errors that may be shown to a client. ``param`` names the offending field, if one does."""

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
    """The body or a parameter is wrong; the client must change it."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus max_tokens cannot fit the model or the pool."""

    code = "context_length_exceeded"


class AuthenticationFailed(WarmpathError):
    """No API key, or one that nobody issued."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDenied(WarmpathError):
    """A valid key that may not do this."""

    status = 403
    type = "invalid_request_error"
    code = "permission_denied"


class NotFound(WarmpathError):
    """No such path, model or object."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """The request names a model this deployment does not serve."""

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
    """Every queue is full; come back after ``retry_after_s``."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Overloaded(WarmpathError):
    """No replica can take the request now; come back after ``retry_after_s``."""

    status = 503
    type = "server_error"
    code = "service_unavailable"


class GenerationFailed(WarmpathError):
    """The engine failed this request; others are unharmed."""

    type = "server_error"
    code = "generation_failed"
