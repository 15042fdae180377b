"""GET /v1/cache/events: what happens now, as server-sent events (docs/reference/api.md)."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import InvalidRequest, WarmpathError
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.event_stream import EventStream
from serve_app.ingress.routes.handler import Front, guarded

router = APIRouter(tags=["operations"])


@router.get("/v1/cache/events")
@guarded("cache_events")
async def events(request: Request, services: Front) -> Response:
    """What happens now: replicas, prefixes, decisions. A tenant sees its own part.

    In the query: `once` (true: the snapshot alone, as JSON).
    """
    services.drain.refuse()
    viewer = services.guard.viewer(request)
    if viewer is not None:
        services.guard.tenant(request)  # whose request it is, for the counters
    once = request.query_params.get("once", "false")
    if once not in ("true", "false"):
        raise InvalidRequest("once must be true or false.", param="once")
    if once == "true":
        return json_response(await services.live.snapshot(viewer))

    def allowed() -> bool:
        try:
            return services.guard.viewer(request) == viewer
        except WarmpathError:
            return False

    return EventStream(services.live, viewer, await services.live.watch(viewer), allowed)
