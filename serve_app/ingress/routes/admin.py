"""The operators' routes for tenants and keys: changes without a deploy, and the log of them."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve_app.errors import PermissionDenied
from serve_app.ingress.address import Address
from serve_app.ingress.http import credentials, json_response
from serve_app.ingress.routes.handler import guarded, small_body, takes
from serve_app.ingress.tenant_admin import KeyBody, KeyChange, NewTenantBody, RotateBody, TenantAdmin, TenantBody

router = APIRouter(tags=["tenants and keys"])


def _desk(request: Request, address: Address) -> tuple[TenantAdmin, str]:
    """Return the desk and the operator's name for the log. Raises PermissionDenied: these are of operators alone."""
    tenants = address.tenants
    if not tenants.is_operator(credentials(request)):
        raise PermissionDenied("This needs an operator key (operator_key_sha256 in the settings; `warmpath keys`).")
    return address.tenant_admin, tenants.operator_id(credentials(request))


@router.get("/v1/admin/tenants")
@guarded("admin_tenants", operator=True)
async def tenants(request: Request, address: Address) -> Response:
    """All tenants and what is in force for each; `overrides` names the fields that differ from the settings'."""
    desk, _ = _desk(request, address)
    return json_response({"object": "list", "data": desk.tenants()})


@router.post("/v1/admin/tenants", **takes(NewTenantBody))
@guarded("admin_tenants", operator=True)
async def add_tenant(request: Request, address: Address) -> Response:
    """Add a tenant, with the fields of one in the settings. It has no key yet.

    Changes hold on every ingress within two seconds, a `cache_share` on every replica within five, and after restarts.
    """
    desk, operator = _desk(request, address)
    return json_response(await desk.add_tenant(operator, await small_body(request, address)))


@router.get("/v1/admin/tenants/{tenant}")
@guarded("admin_tenants", operator=True)
async def tenant(request: Request, address: Address, tenant: str) -> Response:
    """One tenant."""
    desk, _ = _desk(request, address)
    return json_response(desk.tenant(tenant))


@router.post("/v1/admin/tenants/{tenant}", **takes(TenantBody))
@guarded("admin_tenants", operator=True)
async def set_tenant(request: Request, address: Address, tenant: str) -> Response:
    """Set fields of a tenant, of one in the settings too; null: no such limit. Other fields stay."""
    desk, operator = _desk(request, address)
    return json_response(await desk.set_tenant(operator, tenant, await small_body(request, address)))


@router.post("/v1/admin/tenants/{tenant}/reset")
@guarded("admin_tenants", operator=True)
async def reset_tenant(request: Request, address: Address, tenant: str) -> Response:
    """Go back to the fields of a tenant in the settings. Its keys stay as they are."""
    desk, operator = _desk(request, address)
    return json_response(await desk.reset_tenant(operator, tenant))


@router.delete("/v1/admin/tenants/{tenant}")
@guarded("admin_tenants", operator=True)
async def remove_tenant(request: Request, address: Address, tenant: str) -> Response:
    """Remove a tenant that was added here, and its keys. One in the settings can be `disabled` instead."""
    desk, operator = _desk(request, address)
    return json_response(await desk.remove_tenant(operator, tenant))


@router.get("/v1/admin/keys")
@guarded("admin_keys", operator=True)
async def keys(request: Request, address: Address) -> Response:
    """All keys, or those of `?tenant=`: their state, never the key itself."""
    desk, _ = _desk(request, address)
    return json_response({"object": "list", "data": desk.keys(request.query_params.get("tenant"))})


@router.post("/v1/admin/keys", **takes(KeyBody))
@guarded("admin_keys", operator=True)
async def add_key(request: Request, address: Address) -> Response:
    """Make a key. `key` is in this answer alone; only its SHA-256 is stored."""
    desk, operator = _desk(request, address)
    return json_response(await desk.add_key(operator, await small_body(request, address)))


@router.get("/v1/admin/keys/{key}")
@guarded("admin_keys", operator=True)
async def key(request: Request, address: Address, key: str) -> Response:
    """One key by its `id`."""
    desk, _ = _desk(request, address)
    return json_response(desk.key(key))


@router.post("/v1/admin/keys/{key}", **takes(KeyChange))
@guarded("admin_keys", operator=True)
async def change_key(request: Request, address: Address, key: str) -> Response:
    """Disable a key (`disabled: true`), enable it again, or give it an end or a label.

    One in the settings can be disabled or end earlier, and stays so whatever they say.
    """
    desk, operator = _desk(request, address)
    return json_response(await desk.change_key(operator, key, await small_body(request, address)))


@router.post("/v1/admin/keys/{key}/rotate", **takes(RotateBody))
@guarded("admin_keys", operator=True)
async def rotate_key(request: Request, address: Address, key: str) -> Response:
    """Make a key in place of another one, which works for `overlap_s` more (default: a day; 0 if it has leaked)."""
    desk, operator = _desk(request, address)
    return json_response(await desk.rotate_key(operator, key, await small_body(request, address)))


@router.delete("/v1/admin/keys/{key}")
@guarded("admin_keys", operator=True)
async def remove_key(request: Request, address: Address, key: str) -> Response:
    """Delete a key that was made here. One in the settings can be disabled instead."""
    desk, operator = _desk(request, address)
    return json_response(await desk.remove_key(operator, key))


@router.get("/v1/admin/changes")
@guarded("admin_changes", operator=True)
async def changes(request: Request, address: Address) -> Response:
    """Who changed what and when, the newest first, for 400 days; `limit` (100), `after` (an `id`) for older ones.

    `operator` is the SHA-256 of the operator's key, shortened; `changes` has each field before and after.
    """
    desk, _ = _desk(request, address)
    query = request.query_params
    return json_response(await desk.log(query.get("limit"), query.get("after")))
