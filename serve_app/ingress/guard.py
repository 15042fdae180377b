"""What every route shares: who may call it, errors in the shape of the API, and the count of answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection

from ray.exceptions import RayError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.protocol.request import NoReplicaLeft
from serve_app.api.format import RenderError, RenderLimits
from serve_app.errors import AuthenticationFailed, GenerationFailed, Overloaded, PermissionDenied, WarmpathError
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.ingress.browsers import refuse_foreign_page
from serve_app.ingress.drain import Drain
from serve_app.ingress.http import credentials, error_headers, json_response, request_id_of
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.tenants.tenants import DEFAULT_TENANT, Tenant, Tenants

logger = logging.getLogger(__name__)


class RouteGuard:
    """Runs routes. ``allowed_hosts``: of which pages may post; it may be set."""

    def __init__(
        self,
        tenants: Tenants,
        metrics: IngressMetrics,
        drain: Drain,
        *,
        allowed_hosts: Collection[str] | None = None,
        limits: TenantLimits | None = None,
    ) -> None:
        self._limits = limits or TenantLimits()
        self.allowed_hosts = allowed_hosts
        self._tenants = tenants
        self._metrics = metrics
        self._drain = drain

    def tenant(self, request: Request) -> Tenant:
        """Return who asks, remembered for the counters. Raises AuthenticationFailed."""
        tenant: Tenant | None = getattr(request.state, "tenant", None)
        if tenant is None:
            tenant = request.state.tenant = self._tenants.authenticate(credentials(request))
        return tenant

    def sees_all(self, request: Request) -> bool:
        """Whether the caller may see every tenant: an operator key, or a deployment open to everyone."""
        if self._tenants.is_operator(credentials(request)):
            return True
        return self._tenants.open and not self._tenants.has_operators

    def viewer(self, request: Request) -> str | None:
        """Return what of the caches the caller may see now: a tenant's part by name, None: all of it.

        Raises AuthenticationFailed. What was found for the same request before does not count.
        """
        return None if self.sees_all(request) else self._tenants.authenticate(credentials(request)).name

    def require_operator(self, request: Request) -> None:
        """Raise AuthenticationFailed or PermissionDenied unless the caller may see every tenant."""
        if self.sees_all(request):
            return
        if not self._tenants.open:
            self.tenant(request)
        elif not credentials(request):
            raise AuthenticationFailed("An operator key is needed; send it as `Authorization: Bearer KEY`.")
        raise PermissionDenied("This needs an operator key (operator_key_sha256 in the settings).")

    async def answer(
        self,
        request: Request,
        endpoint: str,
        render_error: RenderError,
        work: Callable[[], Awaitable[Response]],
        render_limits: RenderLimits = lambda _: {},
    ) -> Response:
        """Run one route's work; whatever goes wrong leaves as an error of the API, and is counted.

        Every answer to a tenant says what is left of its limits.
        """
        response = await self._answer(request, endpoint, render_error, work)
        tenant: Tenant | None = getattr(request.state, "tenant", None)
        left = self._limits.left(tenant.name) if tenant is not None else None
        if left is not None:
            response.headers.update(render_limits(left))
        return response

    async def _answer(
        self, request: Request, endpoint: str, render_error: RenderError, work: Callable[[], Awaitable[Response]]
    ) -> Response:
        request_id = request_id_of(request)
        error: WarmpathError
        try:
            refuse_foreign_page(request, self.allowed_hosts)
            if request.method == "POST":
                self._drain.refuse()
            response = await work()
            self._count(request, endpoint, response.status_code)
            return response
        except WarmpathError as caught:
            error = caught
        except ClientDisconnect:
            self._metrics.disconnects.inc()
            self._count(request, endpoint, 499)
            return Response(status_code=499)
        except NoReplicaLeft:
            error = Overloaded("There is no replica now; send the request again later.", retry_after_s=5.0)
        except RayError:
            logger.exception("request %s: Ray failed", request_id)
            error = Overloaded("The replicas cannot be reached now.", retry_after_s=5.0)
        except Exception:
            logger.exception("request %s failed", request_id)
            error = GenerationFailed("A fault on the server; it was logged under this request id.")
        shown = render_error(error, request_id)
        self._count(request, endpoint, shown.status)
        return json_response(shown.body, shown.status, error_headers(error))

    def _count(self, request: Request, endpoint: str, status: int) -> None:
        found: Tenant | None = getattr(request.state, "tenant", None)
        name = found.name if found is not None else DEFAULT_TENANT if self._tenants.open else "none"
        self._metrics.requests.labels(endpoint, str(status), name).inc()
