"""GET /v1/tenants/...: what each tenant sends, waits for, holds and is refused; a tenant sees itself alone."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import InvalidRequest, PermissionDenied
from serve_app.ingress.address import Address
from serve_app.ingress.documents import tenant_requests, tenant_table
from serve_app.ingress.http import json_response
from serve_app.ingress.routes.handler import guarded
from serve_app.live.tally import WINDOWS_S

router = APIRouter(tags=["operations"])


@router.get("/v1/tenants/stats")
@guarded("tenants_stats")
async def stats(request: Request, address: Address) -> Response:
    """The table of tenants over all ingresses and models, those with the most requests first; a tenant sees its row.

    Query: `window_s` (60, 300 or 900; default: 60): the time up to now that is counted, in whole tens of seconds.

    `data`: at most 256 rows, of all that are configured, and of others with requests (`none`: without a valid key):
    `tenant`, `requests` (answered), `refused` (429), `failed` (5xx, or an error in a stream), `requests_per_s`;
    `prompt_tokens`, `cached_tokens`, `output_tokens`, each also as `_per_s`; `hit_rate` (null: no prompt);
    `ttft_p50_s`, `ttft_p95_s`, `e2e_p50_s`, `e2e_p95_s` (to the first token, and to the end of the whole answer; null:
    none; error at most 7 %); `refused_by` (`place`, `limit`, `requests`, `remedy`); `missed_by` (`reason` of
    [misses](../how-to/misses.md#reasons), `requests`, `lost_tokens`, `remedy`); `kv_tokens` in all pools, and
    `kv_share_tokens`, its `cache_share` of them if all tenants compete (absent: no replica reports them); `budget` as
    in `/v1/usage`; with `prices`, `today` (in UTC): its `cost`, and what caching `saved`.

    `refusals`: those of the last minute by `tenant`, `place` and `limit`, with `requests` and `remedy`. For operators,
    `kv`: the `pool_tokens`, and `held_tokens` by owner, `(public)` prompts included.
    """
    window_s = request.query_params.get("window_s", str(WINDOWS_S[0]))
    if window_s not in map(str, WINDOWS_S):
        raise InvalidRequest(f"window_s must be one of {', '.join(map(str, WINDOWS_S))}.", param="window_s")
    viewer = None if address.guard.sees_all(request) else address.guard.tenant(request).name
    return json_response(await tenant_table(address, viewer, int(window_s)))


@router.get("/v1/tenants/{tenant}/requests")
@guarded("tenants_requests")
async def requests(request: Request, address: Address, tenant: str) -> Response:
    """A tenant's latest 64 requests, newest first: a `decision` of each first token, and a `refusal` by a limit, as in
    `/v1/cache/events`. A tenant asks for itself alone.
    """
    operator, tenant = address.guard.sees_all(request), address.tenants.named(tenant)
    if not operator and address.guard.tenant(request).name != tenant:
        raise PermissionDenied("A tenant's key opens its own requests alone.")
    data = await tenant_requests(address, tenant, operator=operator)
    return json_response({"object": "tenants.requests", "tenant": tenant, "data": data})
