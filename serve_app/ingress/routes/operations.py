"""The routes for operators: health, metrics, caches, usage, adapters and registered prompts."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router import __version__
from serve_app.errors import AuthenticationFailed, InvalidRequest
from serve_app.generation.prepare import session_key
from serve_app.ingress import documents
from serve_app.ingress.adapter_admin import LoadAdapterBody, UnloadAdapterBody
from serve_app.ingress.address import Address
from serve_app.ingress.http import json_response, read_body
from serve_app.ingress.observe.metrics import render, without_tenants
from serve_app.ingress.observe.reports import ExplainBody
from serve_app.ingress.observe.vllm_names import vllm_samples
from serve_app.ingress.prompts import CutoverBody, PromptBody
from serve_app.ingress.routes.handler import guarded, small_body, takes
from serve_app.usage import days, usage_csv, usage_document

USAGE_FORMATS = ("json", "csv")

router = APIRouter()


@router.post("/v1/load_lora_adapter", tags=["adapters"], **takes(LoadAdapterBody))
@guarded("load_lora_adapter", operator=True)
async def load_lora_adapter(request: Request, address: Address) -> Response:
    """Load an adapter on every replica and offer it under its name."""
    return Response(await address.of_query_alone(request).adapter_admin.load(await small_body(request, address)))


@router.post("/v1/unload_lora_adapter", tags=["adapters"], **takes(UnloadAdapterBody))
@guarded("unload_lora_adapter", operator=True)
async def unload_lora_adapter(request: Request, address: Address) -> Response:
    """Stop serving an adapter; running requests finish with it."""
    return Response(await address.of_query_alone(request).adapter_admin.unload(await small_body(request, address)))


@router.get("/v1/prompts", tags=["prompts"])
@guarded("prompts", operator=True)
async def prompts(request: Request, address: Address) -> Response:
    """Every prompt, its current version, and the requests, hit rate and times to first token of each version, with
    advice if caching it does not pay; ``?name=`` selects one.
    """
    return json_response(await address.of_query_alone(request).prompt_admin.status(request.query_params.get("name")))


@router.post("/v1/prompts/warm", tags=["prompts"], **takes(PromptBody))
@guarded("prompts_warm", operator=True)
async def warm(request: Request, address: Address) -> Response:
    """Compute a version on the replicas that will serve it."""
    return json_response(await address.of_query_alone(request).prompt_admin.warm(await small_body(request, address)))


@router.post("/v1/prompts/promote", tags=["prompts"], **takes(PromptBody))
@guarded("prompts_promote", operator=True)
async def promote(request: Request, address: Address) -> Response:
    """Warm a version, then switch the name to it."""
    return json_response(await address.of_query_alone(request).prompt_admin.promote(await small_body(request, address)))


@router.post("/v1/prompts/cutover", tags=["prompts"], **takes(CutoverBody))
@guarded("prompts_cutover", operator=True)
async def cutover(request: Request, address: Address) -> Response:
    """Warm a version, then switch a part of the name's conversations to it (`percent`): the same ones each time, and
    more of them with a higher `percent`.
    """
    return json_response(
        await address.of_query_alone(request).prompt_admin.cut_over(await small_body(request, address))
    )


@router.post("/v1/prompts/rollback", tags=["prompts"], **takes(PromptBody))
@guarded("prompts_rollback", operator=True)
async def rollback(request: Request, address: Address) -> Response:
    """End a cut-over in part; else switch the name back to its previous version."""
    return json_response(
        await address.of_query_alone(request).prompt_admin.roll_back(await small_body(request, address))
    )


@router.get("/v1/usage", tags=["usage"])
@guarded("usage")
async def usage(request: Request, address: Address) -> Response:
    """Tokens read from the cache, written and computed, and budgets; a tenant sees its own. With `prices`, also what
    they cost (`cost`), how much less than without a cache (`saved`), and after how many reads a written token has paid
    for itself (`break_even_reads`).

    Query: `start_date` and `end_date` (days in UTC; default: the last 30), `format` (json or csv).
    """
    tenant = None if address.guard.sees_all(request) else address.guard.tenant(request).name
    query = request.query_params
    wanted = query.get("format", "json")
    if wanted not in USAGE_FORMATS:
        raise InvalidRequest(f"format must be one of {', '.join(USAGE_FORMATS)}.", param="format")
    first_day, last_day = days(query.get("start_date"), query.get("end_date"), datetime.now(UTC).date())
    rows = await address.usage.everywhere(first_day, last_day, tenant)
    if wanted == "csv":
        return Response(usage_csv(rows, address.budgets.prices), media_type="text/csv; charset=utf-8")
    budgets = address.budgets
    document = usage_document(first_day, last_day, rows, budgets.prices)
    if told := await budgets.told(tenant):
        document["budgets"] = told
    return json_response(document)


@router.get("/health", tags=["operations"])
async def health(request: Request) -> Response:
    """200 once the router has known every replica's cache, so that requests can be answered; of any model.

    For operators it also reports each of several models, why a ``user_config`` is not in force, and replicas and
    ingresses of a release whose messages this one does not read (`other_versions`, by name), and work in the background
    that failed within the last minute and was begun anew (`failing`: by its name, the kind of its last error).
    """
    address: Address = request.app.state.address
    ready, stopping = any(map(address.ready, address.models.values())), address.drain.stopping
    status = "stopping" if stopping else "ok" if ready else "starting"
    replicas = {name: len(model.core.replica_ids) for name, model in address.models.items()}
    body = {"status": status, "replicas": sum(replicas.values())}
    if _is_operator(request, address):
        if address.several:
            body["models"] = await documents.models_health(address)
        if address.tenants.refusal:
            body["refuses_all"] = address.tenants.refusal
        if address.refused_settings:
            body["refused_user_config"] = address.refused_settings
        if others := address.other_versions():
            body["other_versions"] = others
        if failing := documents.failing_loops(address):
            body["failing"] = failing
    return json_response(body, 200 if ready and not stopping else 503)


def _is_operator(request: Request, address: Address) -> bool:
    """Return whether the caller may see every tenant. One whose keys contradict each other is anybody."""
    try:
        return address.guard.sees_all(request)
    except AuthenticationFailed:
        return False


@router.post("/ping", include_in_schema=False)
@router.get("/ping", tags=["operations"])
async def ping(request: Request) -> Response:
    """The status of ``/health``, without a body (vLLM's path)."""
    return Response(status_code=(await health(request)).status_code)


@router.get("/load", tags=["operations"])
@guarded("load")
async def load(request: Request, address: Address) -> Response:
    """How many requests wait and answers are generated through this ingress; a tenant sees its own (vLLM's path)."""
    viewer = address.guard.viewer(request)
    return json_response({"server_load": sum(model.front_door.load(viewer) for model in address.models.values())})


@router.get("/version", tags=["operations"])
async def version(request: Request) -> Response:
    """The version of warmpath (vLLM's path)."""
    return json_response({"version": __version__})


@router.get("/metrics", tags=["operations"])
@guarded("metrics")
async def metrics(request: Request, address: Address) -> Response:
    """The metrics of the whole app in Prometheus' text format: every ingress and every replica."""
    if not address.config.metrics_public:
        address.guard.require_operator(request)
    samples = await documents.all_samples(address)
    if not address.guard.sees_all(request):
        samples = without_tenants(samples)
    if address.config.vllm_metrics:
        samples += vllm_samples(samples, address.of_query(request).name)
    return Response(render(samples), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/cache/state", tags=["operations"])
@guarded("cache_state", operator=True)
async def cache_state(request: Request, address: Address) -> Response:
    """The content of the caches, as this ingress' router sees it."""
    return json_response(await documents.cache_state(address.of_query(request)))


@router.get("/v1/cache/sessions", tags=["operations"])
@guarded("cache_sessions")
async def sessions(request: Request, address: Address) -> Response:
    """The most recently used sessions of all replicas; a tenant sees its own, and operators those of `?tenant=`."""
    if address.guard.sees_all(request):
        tenant = request.query_params.get("tenant")
        asked = await address.of_query(request).sessions.of(None if tenant is None else address.tenants.named(tenant))
        return json_response({**asked, "viewer": "operator"})
    tenant = address.guard.tenant(request).name
    return json_response(await address.of_query(request).sessions.of(tenant))


@router.delete("/v1/sessions/{session}", tags=["operations"])
@guarded("close_session")
async def close_session(request: Request, address: Address, session: str) -> Response:
    """End one of the caller's sessions: its place is free, and what it alone used is evicted first.

    `session`: the client's name for it, as in its header or field. `replicas`: how many had it. One whose request runs
    ends with that.
    """
    tenant = address.guard.tenant(request).name
    closed = await address.close_sessions(tenant, [session_key(tenant, session)])
    return json_response({"id": session, "object": "session", "deleted": True, "replicas": closed})


@router.post("/v1/cache/explain", tags=["operations"], **takes(ExplainBody))
@guarded("cache_explain", operator=True)
async def explain(request: Request, address: Address) -> Response:
    """The replica that a request would go to now, and why; nothing is sent, reserved or counted.

    `refusal` and `wait`: the reason for which the ingress would refuse it or let it wait, or null. `notes`: a line for
    each capability that a replica goes without, because its version of vLLM differs there. `shadow`: what the
    `shadow_policy` would choose, or null.
    """
    return json_response(await documents.explanation(address, await read_body(request, address.config.max_body_bytes)))


@router.post("/reset_prefix_cache", tags=["operations"])
@guarded("reset_prefix_cache", operator=True)
async def reset_prefix_cache(request: Request, address: Address) -> Response:
    """Drop every unused cached block on every replica, of one model or all (vLLM's path)."""
    models = [address.of_query(request)] if "model" in request.query_params else [*address.models.values()]
    complete = True
    for model in models:
        whole = all(await model.broadcast.replicas("reset_prefix_cache", timeout_s=30))
        model.live.reset(complete=whole)
        complete = complete and whole
    return json_response({"complete": complete})
