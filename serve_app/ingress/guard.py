"""The common part of all routes: access, errors in the shape of the API, and counting answers."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache, partial
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import NamedTuple, Protocol

from ray.exceptions import RayError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.protocol.request import NoReplicaLeft
from serve_app.api.format import RenderError, RenderLimits
from serve_app.errors import (
    AuthenticationFailed,
    GenerationFailed,
    Overloaded,
    PermissionDenied,
    UnsupportedMediaType,
    WarmpathError,
)
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.ingress.client_headers import NAMES_KEPT, arrived_s
from serve_app.ingress.drain import Drain
from serve_app.ingress.http import (
    CLIENT_LEFT,
    credentials,
    error_headers,
    has_left,
    json_response,
    request_id_of,
)
from serve_app.ingress.lifeline import Lifeline, RefusedStream, StreamResponse, lifeline_of
from serve_app.ingress.observe.answer_meter import AnswerMeter, Observers, RequestEnd
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.live.tally import GENERATIONS
from serve_app.tenants import DEFAULT_TENANT, Tenant, Tenants

logger = logging.getLogger(__name__)


class Api(NamedTuple):
    """An API's shape of errors and limits. ``id_header``: its header for the request's id in answers, "" for none."""

    error: RenderError
    limits: RenderLimits
    id_header: str = ""

    def refusal(self, error: WarmpathError, request: Request) -> Response:
        """Return an answer with an error."""
        shown = self.error(error, request_id_of(request))
        return self.named(json_response(shown.body, shown.status, error_headers(error)), request)

    def named(self, response: Response, request: Request) -> Response:
        """Return an answer with the request's id, if the API has a header for it."""
        if self.id_header:
            response.headers[self.id_header] = request_id_of(request)
        return response


class CountsAnswers(Protocol):
    """Where answers are counted: of the model that a request chose, else of the ingress."""

    metrics: IngressMetrics
    observers: Observers


@dataclass(slots=True)
class RouteGuard:
    """Runs routes. ``allowed_hosts``: this server's names, None for any (``foreign_host``).

    ``allowed_origins``: of pages of other sites whose scripts may ask, "*" for all.
    """

    tenants: Tenants
    metrics: IngressMetrics
    drain: Drain
    limits: TenantLimits = field(default_factory=TenantLimits)
    allowed_hosts: Collection[str] | None = None
    observers: Observers = field(default_factory=Observers)
    allowed_origins: Collection[str] = ()

    def configure(self, allowed_hosts: Collection[str] | None, allowed_origins: Collection[str]) -> None:
        """Use other names of this server, and let in other sites' pages."""
        self.allowed_hosts, self.allowed_origins = allowed_hosts, allowed_origins

    def tenant(self, request: Request) -> Tenant:
        """Return the caller's tenant, and store it for the counters. Raises AuthenticationFailed."""
        tenant = _found(request)
        if tenant is None:
            tenant = request.state.tenant = self.tenants.authenticate(credentials(request))
        return tenant

    def sees_all(self, request: Request) -> bool:
        """Return whether the caller may see every tenant: it has an operator key, or the deployment is open."""
        if self.tenants.open and not self.tenants.has_operators:
            return True
        return self.tenants.is_operator(credentials(request))

    def viewer(self, request: Request) -> str | None:
        """Return the tenant that the caller may see, None for all, as of now. Raises AuthenticationFailed."""
        return None if self.sees_all(request) else self.tenants.authenticate(credentials(request)).name

    def require_operator(self, request: Request) -> None:
        """Raise AuthenticationFailed or PermissionDenied unless the caller may see every tenant."""
        if self.sees_all(request):
            return
        if not self.tenants.open:
            self.tenant(request)
        elif not credentials(request):
            raise AuthenticationFailed("An operator key is needed; send it as `Authorization: Bearer KEY`.")
        raise PermissionDenied("This needs an operator key (operator_key_sha256 in the settings).")

    async def answer(
        self, request: Request, endpoint: str, api: Api, work: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Run a route's work, count the answer and add the tenant's limits; failures become errors of the API.

        A stream is counted at its end, and a client that leaves before its answer is there by the status 499.
        """
        request.state.dress = partial(self._dressed, request, api)
        error: WarmpathError | None = None
        try:
            refuse_foreign_page(request, self.allowed_origins)
            if request.method == "POST":
                self.drain.refuse()
            response = await work()
        except asyncio.CancelledError:
            # Serve cancels the request of a client that has left, and others, too.
            if await has_left(request):
                self._count(request, endpoint, CLIENT_LEFT)
            self._close(request)
            raise
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)
            self._close(request)
        except Exception as failure:
            error, waiting = _shown(failure, request), self._close(request)
            response = api.refusal(error, request) if waiting is None else RefusedStream(waiting, error)
            self._refuse(request, error, late=waiting is not None)
        if isinstance(response, StreamResponse):
            response.ended = partial(self._count, request, endpoint, error=error)
        else:
            self._count(request, endpoint, response.status_code, error)
        return self._dressed(request, api, response)

    def _close(self, request: Request) -> Lifeline | None:
        """Return the lifeline of a stream that ends here, if its client has the stream's head already."""
        found = lifeline_of(request)
        return found if found is not None and found.close() else None

    def _refuse(self, request: Request, error: WarmpathError, *, late: bool) -> None:
        """Tell of a refusal. ``late``: its status is not seen in the answer."""
        tenant, counts = self._counted(request)
        if late:
            counts.metrics.add("warmpath_broken_streams_total", status=str(error.status), tenant=tenant)
        if error.reason is not None:
            for tell in counts.observers.refused:
                tell(tenant, error.reason)

    def _count(self, request: Request, endpoint: str, status: int, error: WarmpathError | None = None) -> None:
        """Count an answer, once for each request."""
        tenant, counts = self._counted(request)
        counts.metrics.answered(endpoint, status, tenant)
        if status == CLIENT_LEFT:
            counts.metrics.add("warmpath_client_disconnects_total")
        if endpoint in GENERATIONS:
            answer: AnswerMeter | None = getattr(request.state, "meter", None)
            at_s = arrived_s(request.scope) if answer is None else answer.arrived_s
            for tell in counts.observers.finished:
                tell(RequestEnd(tenant, at_s, status, answer, error))

    def _counted(self, request: Request) -> tuple[str, CountsAnswers]:
        """Return under which tenant, and where, a request is counted."""
        tenant, counts = _found(request), getattr(request.state, "counts", self)
        return tenant.name if tenant is not None else DEFAULT_TENANT if self.tenants.open else "none", counts

    def _dressed(self, request: Request, api: Api, response: Response) -> Response:
        """Return an answer with the headers that all of its API and tenant have."""
        tenant = _found(request)
        left = self.limits.left(tenant.name) if tenant is not None else None
        if left is not None:
            response.headers.update(api.limits(left))
        return api.named(response, request)


def _found(request: Request) -> Tenant | None:
    tenant: Tenant | None = getattr(request.state, "tenant", None)
    return tenant


def _shown(error: Exception, request: Request) -> WarmpathError:
    """Return the error for the client; log errors that a client cannot fix."""
    if isinstance(error, WarmpathError):
        return error
    if isinstance(error, NoReplicaLeft):
        return Overloaded("There is no replica now; send the request again later.", retry_after_s=5.0)
    request_id = request_id_of(request)
    if isinstance(error, RayError):
        logger.error("request %s: Ray failed", request_id, exc_info=error)
        return Overloaded("The replicas cannot be reached now.", retry_after_s=5.0)
    logger.error("request %s failed", request_id, exc_info=error)
    return GenerationFailed("A fault on the server; it was logged under this request id.")


def refuse_foreign_page(request: Request, allowed_origins: Collection[str] = ()) -> None:
    """Refuse a POST that another site's page makes a browser send, unless the page is let in.

    Such a page reaches servers on the user's machine, which may need no key. Other clients send no ``Origin``. Raises
    UnsupportedMediaType for a type other than JSON (for JSON, a browser first asks for a permission that it never
    gets). It also asks for a DELETE of any type.
    """
    origin = request.headers.get("origin")
    if request.method != "POST" or origin is None or origin in allowed_origins or "*" in allowed_origins:
        return
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if origin.partition("://")[2] != request.headers.get("host", "") and media_type != "application/json":
        raise UnsupportedMediaType("Send the header Content-Type: application/json.")


def foreign_host(request: Request, allowed_hosts: Collection[str] | None) -> PermissionDenied | None:
    """Return the refusal of a request to a name that is not this server's, of any method.

    A page whose name was pointed at this server (DNS rebinding) is of one site with it for a browser, and may read all
    answers. ``allowed_hosts``: this server's names, besides addresses, localhost and ``.internal``; None: any name. A
    browser always sends ``Host``; simple probes do not.
    """
    host = request.headers.get("host")
    if (
        allowed_hosts is None
        or (host is None and "origin" not in request.headers)
        or _is_ours(host or "", allowed_hosts)
    ):
        return None
    return PermissionDenied(
        f"{(host or '')[:200]!r} is not a name of this server; if it should be, start it with that name in the setting "
        "allowed_hosts."
    )


def _is_ours(host: str, allowed_hosts: Collection[str]) -> bool:
    name = host_name(host)
    # Nobody can register a name in .internal; Docker's host.docker.internal is one.
    if name in ("", "localhost") or name.endswith((".localhost", ".internal")) or _is_address(name):
        return name != ""
    return any(name == host_name(allowed) for allowed in allowed_hosts)


@lru_cache(NAMES_KEPT)
def host_name(host: str) -> str:
    """Return the name or address in a ``Host`` header, in lower case, without its port and the root's dot.

    Return "" if it is none: no part of it may pass for a name that it is not (``evil.example@localhost``).
    """
    found = _HOST.fullmatch(host.lower())
    return found[1] if found is not None else ""


_LABEL = r"[^\s\x00-\x1f\x7f.\[\]:/?#@\\%]+"
_HOST = re.compile(rf"(\[[0-9a-f:.]{{2,45}}\]|{_LABEL}(?:\.{_LABEL})*)\.?(?::[0-9]{{0,5}})?")
"""RFC 3986 3.2.2, without escapes: no browser sends one."""


@lru_cache(NAMES_KEPT)
def _is_address(name: str) -> bool:
    try:
        _ = IPv6Address(name[1:-1]) if name.startswith("[") else IPv4Address(name)
    except AddressValueError:
        return False
    return True
