"""The routes for operators: health, metrics, caches, usage, adapters and registered prompts."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router import __version__
from serve_app.errors import AuthenticationFailed, InvalidRequest
from serve_app.generation.prepare import session_key
from serve_app.ingress.adapter_admin import LoadAdapterBody, UnloadAdapterBody
from serve_app.ingress.http import json_response
from serve_app.ingress.observe.metrics import render, without_tenants
from serve_app.ingress.observe.reports import ExplainBody
from serve_app.ingress.observe.vllm_names import vllm_samples
from serve_app.ingress.prompts import CutoverBody, PromptBody
from serve_app.ingress.routes.handler import Front, guarded, takes
from serve_app.ingress.services import Services
from serve_app.usage import days, usage_csv, usage_document

USAGE_FORMATS = ("json", "csv")

router = APIRouter()


@router.post("/v1/load_lora_adapter", tags=["adapters"], **takes(LoadAdapterBody))
@guarded("load_lora_adapter", operator=True, of_model=True)
async def load_lora_adapter(request: Request, services: Front) -> Response:
    """Load an adapter on every replica and offer it under its name."""
    return Response(await services.catalog.adapter_admin.load(await services.body(request)))


@router.post("/v1/unload_lora_adapter", tags=["adapters"], **takes(UnloadAdapterBody))
@guarded("unload_lora_adapter", operator=True, of_model=True)
async def unload_lora_adapter(request: Request, services: Front) -> Response:
    """Stop serving an adapter; running requests finish with it."""
    return Response(await services.catalog.adapter_admin.unload(await services.body(request)))


@router.get("/v1/prompts", tags=["prompts"])
@guarded("prompts", operator=True, of_model=True)
async def prompts(request: Request, services: Front) -> Response:
    """Every prompt, its current version, and the requests, hit rate and times to first token of each version, with
    advice if caching it does not pay; ``?name=`` selects one.
    """
    return json_response(await services.catalog.prompt_admin.status(request.query_params.get("name")))


@router.post("/v1/prompts/warm", tags=["prompts"], **takes(PromptBody))
@guarded("prompts_warm", operator=True, of_model=True)
async def warm(request: Request, services: Front) -> Response:
    """Compute a version on the replicas that will serve it."""
    return json_response(await services.catalog.prompt_admin.warm(await services.body(request)))


@router.post("/v1/prompts/promote", tags=["prompts"], **takes(PromptBody))
@guarded("prompts_promote", operator=True, of_model=True)
async def promote(request: Request, services: Front) -> Response:
    """Warm a version, then switch the name to it."""
    return json_response(await services.catalog.prompt_admin.promote(await services.body(request)))


@router.post("/v1/prompts/cutover", tags=["prompts"], **takes(CutoverBody))
@guarded("prompts_cutover", operator=True, of_model=True)
async def cutover(request: Request, services: Front) -> Response:
    """Warm a version, then switch a part of the name's conversations to it (`percent`): the same ones each time, and
    more of them with a higher `percent`.
    """
    return json_response(await services.catalog.prompt_admin.cut_over(await services.body(request)))


@router.post("/v1/prompts/rollback", tags=["prompts"], **takes(PromptBody))
@guarded("prompts_rollback", operator=True, of_model=True)
async def rollback(request: Request, services: Front) -> Response:
    """End a cut-over in part; else switch the name back to its previous version."""
    return json_response(await services.catalog.prompt_admin.roll_back(await services.body(request)))


@router.get("/v1/usage", tags=["usage"])
@guarded("usage")
async def usage(request: Request, services: Front) -> Response:
    """Tokens read from the cache, written and computed, and budgets; a tenant sees its own. With `prices`, also what
    they cost (`cost`), how much less than without a cache (`saved`), and after how many reads a written token has paid
    for itself (`break_even_reads`).

    Query: `start_date` and `end_date` (days in UTC; default: the last 30), `format` (json or csv).
    """
    tenant = None if services.access.guard.sees_all(request) else services.access.guard.tenant(request).name
    query = request.query_params
    wanted = query.get("format", "json")
    if wanted not in USAGE_FORMATS:
        raise InvalidRequest(f"format must be one of {', '.join(USAGE_FORMATS)}.", param="format")
    first_day, last_day = days(query.get("start_date"), query.get("end_date"), datetime.now(UTC).date())
    rows = await services.records.usage.everywhere(first_day, last_day, tenant)
    if wanted == "csv":
        return Response(usage_csv(rows, services.access.budgets.prices), media_type="text/csv; charset=utf-8")
    budgets = services.access.budgets
    document = usage_document(first_day, last_day, rows, budgets.prices)
    if told := await budgets.told(tenant):
        document["budgets"] = told
    return json_response(document)


@router.get("/health", tags=["operations"])
async def health(request: Request, services: Front) -> Response:
    """200 once the router has known every replica's cache, so that requests can be answered; of any model.

    For operators it also reports each of several models, why a ``user_config`` is not in force, and replicas and
    ingresses of a release whose messages this one does not read (`other_versions`, by name), and work in the background
    that failed within the last minute and was begun anew (`failing`: by its name, the kind of its last error).
    """
    ready, stopping = any(each.ready() for each in services.all), services.access.drain.stopping
    status = "stopping" if stopping else "ok" if ready else "starting"
    replicas = {each.config.model_name: len(each.fleet.core.replica_ids) for each in services.all}
    body = {"status": status, "replicas": sum(replicas.values())}
    if _is_operator(request, services):
        if services.several is not None:
            body["models"] = await services.several.health()
        if services.access.tenants.refusal:
            body["refuses_all"] = services.access.tenants.refusal
        if services.refused_settings:
            body["refused_user_config"] = services.refused_settings
        if others := services.other_versions():
            body["other_versions"] = others
        if failing := services.failing():
            body["failing"] = failing
    return json_response(body, 200 if ready and not stopping else 503)


def _is_operator(request: Request, services: Services) -> bool:
    """Return whether the caller may see every tenant. One whose keys contradict each other is anybody."""
    try:
        return services.access.guard.sees_all(request)
    except AuthenticationFailed:
        return False


@router.post("/ping", include_in_schema=False)
@router.get("/ping", tags=["operations"])
async def ping(request: Request, services: Front) -> Response:
    """The status of ``/health``, without a body (vLLM's path)."""
    return Response(status_code=(await health(request, services)).status_code)


@router.get("/load", tags=["operations"])
@guarded("load")
async def load(request: Request, services: Front) -> Response:
    """How many requests wait and answers are generated through this ingress; a tenant sees its own (vLLM's path)."""
    viewer = services.access.guard.viewer(request)
    return json_response({"server_load": sum(each.access.front_door.load(viewer) for each in services.all)})


@router.get("/version", tags=["operations"])
async def version() -> Response:
    """The version of warmpath (vLLM's path)."""
    return json_response({"version": __version__})


@router.get("/metrics", tags=["operations"])
@guarded("metrics")
async def metrics(request: Request, services: Front) -> Response:
    """The metrics of the whole app in Prometheus' text format: every ingress and every replica."""
    if not services.config.metrics_public:
        services.access.guard.require_operator(request)
    samples = await services.all_samples()
    if not services.access.guard.sees_all(request):
        samples = without_tenants(samples)
    if services.config.vllm_metrics:
        samples += vllm_samples(samples, services.config.model_name)
    return Response(render(samples), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/cache/state", tags=["operations"])
@guarded("cache_state", operator=True)
async def cache_state(request: Request, services: Front) -> Response:
    """The content of the caches, as this ingress' router sees it."""
    return json_response(await services.cache_state())


@router.get("/v1/cache/sessions", tags=["operations"])
@guarded("cache_sessions")
async def sessions(request: Request, services: Front) -> Response:
    """The most recently used sessions of all replicas; a tenant sees its own, and operators those of `?tenant=`."""
    if services.access.guard.sees_all(request):
        tenant = request.query_params.get("tenant")
        asked = await services.fleet.sessions.of(None if tenant is None else services.access.tenants.named(tenant))
        return json_response({**asked, "viewer": "operator"})
    tenant = services.access.guard.tenant(request).name
    return json_response(await services.fleet.sessions.of(tenant))


@router.delete("/v1/sessions/{session}", tags=["operations"])
@guarded("close_session")
async def close_session(request: Request, services: Front, session: str) -> Response:
    """End one of the caller's sessions: its place is free, and what it alone used is evicted first.

    `session`: the client's name for it, as in its header or field. `replicas`: how many had it. One whose request runs
    ends with that.
    """
    tenant = services.access.guard.tenant(request).name
    closed = await services.close_sessions(tenant, [session_key(tenant, session)])
    return json_response({"id": session, "object": "session", "deleted": True, "replicas": closed})


@router.post("/v1/cache/explain", tags=["operations"], **takes(ExplainBody))
@guarded("cache_explain", operator=True)
async def explain(request: Request, services: Front) -> Response:
    """The replica that a request would go to now, and why; nothing is sent, reserved or counted.

    `refusal` and `wait`: the reason for which the ingress would refuse it or let it wait, or null. `notes`: a line for
    each capability that a replica goes without, because its version of vLLM differs there.
    """
    return json_response(await services.explanation(await services.body(request, services.config.max_body_bytes)))


@router.post("/reset_prefix_cache", tags=["operations"])
@guarded("reset_prefix_cache", operator=True)
async def reset_prefix_cache(request: Request, services: Front) -> Response:
    """Drop every unused cached block on every replica, of one model or all (vLLM's path)."""
    wanted = (services,) if "model" in request.query_params else services.all
    complete = True
    for each in wanted:
        whole = all(await each.fleet.broadcast.replicas("reset_prefix_cache", timeout_s=30))
        each.records.live.reset(complete=whole)
        complete = complete and whole
    return json_response({"complete": complete})
