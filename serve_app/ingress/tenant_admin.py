"""Operators' changes of tenants and keys over HTTP: what bodies mean, and how tenants, keys and changes are shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError, create_model

from serve_app.api.json_body import JsonBody, Must
from serve_app.api.request import require_none
from serve_app.config.tenants import ApiKeyConfig, TenantConfig
from serve_app.errors import InvalidRequest, NotFound
from serve_app.ingress.broadcast import Broadcast
from serve_app.tenancy.records import (
    FIELDS,
    MAX_FIELDS_BYTES,
    MAX_LABEL_CHARS,
    Edit,
    StoredKey,
    TenancyChange,
    key_id,
    shown_time,
)
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenants import make_api_key, name_of

MAX_ENTRIES = 1_000
"""The most entries of the log in one answer."""
OVERLAP_S = 86_400.0
YEAR_S = 366 * 86_400.0

T = TypeVar("T")

_DESCRIBED: dict[str, Any] = {
    name: (TenantConfig.model_fields[name].annotation, TenantConfig.model_fields[name]) for name in ("name", *FIELDS)
}
_RESTORE = "true: what the last tenant of this name left is this one's, but its keys and limits are not"
TenantBody = create_model("TenantBody", **_DESCRIBED)
"""The body of ``POST /v1/admin/tenants/{tenant}``, for its description. ``TenantConfig`` checks the fields."""
NewTenantBody = create_model("NewTenantBody", **_DESCRIBED, restore=(bool, Field(False, description=_RESTORE)))
"""The body of ``POST /v1/admin/tenants``."""

_Moment = Annotated[
    str | None,
    Field(max_length=40),
    Must("null, or a moment with its time zone, such as 2027-01-31T00:00:00Z"),
]
_Label = Annotated[
    str | None,
    Field(pattern=rf"^[\w .@/:-]{{0,{MAX_LABEL_CHARS}}}$"),
    Must(f"at most {MAX_LABEL_CHARS} letters, digits, spaces and . @ / : _ -"),
]


class KeyBody(JsonBody):
    """The body of ``POST /v1/admin/keys``."""

    tenant: str = Field(max_length=64, description="whose key it is")
    label: _Label = Field(None, description="for its readers, never secret")
    expires_at: _Moment = Field(None, description="its end; default: none")


class KeyChange(JsonBody):
    """The body of ``POST /v1/admin/keys/{key}``."""

    nullable: ClassVar[frozenset[str]] = frozenset({"expires_at"})

    disabled: bool | None = Field(None, description="true: refuse the key; false: no longer, unless the settings do")
    label: _Label = Field(None, description="for its readers, never secret")
    expires_at: _Moment = Field(None, description="its end; null: none but that of the settings")


class RotateBody(JsonBody):
    """The body of ``POST /v1/admin/keys/{key}/rotate``."""

    overlap_s: float = Field(OVERLAP_S, ge=0, le=YEAR_S, description="how long the old key still works; 0: not at all")
    expires_at: _Moment = Field(None, description="the end of the new key; default: none")


@dataclass(slots=True)
class TenantAdmin:
    """Changes tenants and keys. ``broadcast``: to all ingresses."""

    registry: TenantRegistry
    broadcast: Broadcast

    def tenants(self) -> list[dict[str, Any]]:
        """Return all tenants with what is in force for each."""
        return [self._tenant(config) for config in self._in_force()]

    def tenant(self, name: str) -> dict[str, Any]:
        """Return one tenant. Raises NotFound."""
        for config in self._in_force():
            if name_of(config.name) == name:
                return self._tenant(config)
        raise NotFound(f"There is no tenant {name[:64]!r}; GET /v1/admin/tenants lists them.", param="tenant")

    def keys(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return the keys of one tenant, or of all, without anything that opens a door."""
        declared = {key.sha256: key for one in self.registry.declared.tenants for key in one.key_sha256}
        shown = [
            self._key(config.name, key, declared=key.sha256 in declared)
            for config in self._in_force()
            for key in config.key_sha256
            if tenant in (None, name_of(config.name))
        ]
        if tenant is not None:
            self.tenant(tenant)
        return shown

    def key(self, name: str) -> dict[str, Any]:
        """Return one key by its id. Raises NotFound."""
        for shown in self.keys(None):
            if shown["id"] == name:
                return shown
        raise NotFound(f"There is no key {name[:64]!r}; GET /v1/admin/keys lists them.", param="key")

    async def log(self, limit: str | None, after: str | None) -> dict[str, Any]:
        """Return a page of the log, the newest change first. Raises InvalidRequest."""
        try:
            most = int(limit) if limit is not None else 100
        except ValueError:
            most = 0
        if not 1 <= most <= MAX_ENTRIES:
            raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_ENTRIES}.", param="limit")
        found = await self.registry.log(most + 1, after)
        return {"object": "list", "data": [_entry(one) for one in found[:most]], "has_more": len(found) > most}

    async def add_tenant(self, operator: str, raw: bytes) -> dict[str, Any]:
        """Add a tenant. Raises InvalidRequest and Conflict."""
        fields = _fields(raw)
        name = fields.pop("name", None)
        if not isinstance(name, str):
            raise InvalidRequest("name is missing; it must be the new tenant's name.", param="name")
        restore = fields.pop("restore", False)
        if not isinstance(restore, bool):
            raise InvalidRequest("restore must be true or false.", param="restore")
        await self._change(operator, lambda edit: edit.add_tenant(name, fields, restore=restore))
        return self.tenant(name)

    async def set_tenant(self, operator: str, name: str, raw: bytes) -> dict[str, Any]:
        """Set fields of a tenant. Raises InvalidRequest and NotFound."""
        fields = _fields(raw)
        if fields.pop("name", name) != name:
            raise InvalidRequest("A tenant's name cannot change; add another tenant.", param="name")
        await self._change(operator, lambda edit: edit.set_tenant(name, fields))
        return self.tenant(name)

    async def reset_tenant(self, operator: str, name: str) -> dict[str, Any]:
        """Go back to the declared fields of a tenant. Raises Conflict and NotFound."""
        await self._change(operator, lambda edit: edit.reset_tenant(name))
        return self.tenant(name)

    async def remove_tenant(self, operator: str, name: str) -> dict[str, Any]:
        """Remove a tenant and its keys. Raises Conflict and NotFound."""
        await self._change(operator, lambda edit: edit.remove_tenant(name))
        return {"name": name, "object": "tenant", "deleted": True}

    async def add_key(self, operator: str, raw: bytes) -> dict[str, Any]:
        """Make a key; this answer alone has it. Raises InvalidRequest, Conflict and NotFound."""
        body = KeyBody.parse(raw)
        require_none(body.unknown())
        key, sha256 = make_api_key()
        expires_s = _time(body.expires_at)
        await self._change(operator, lambda edit: edit.add_key(sha256, body.tenant, body.label or "", expires_s))
        return {**self.key(key_id(sha256)), "key": key}

    async def change_key(self, operator: str, name: str, raw: bytes) -> dict[str, Any]:
        """Disable, enable, end or rename a key. Raises InvalidRequest and NotFound."""
        body = KeyChange.parse(raw)
        require_none(body.unknown())
        changes: dict[str, Any] = body.model_dump(include={"disabled", "label"}, exclude_none=True)
        if "expires_at" in body.model_fields_set:
            changes["expires_s"] = _time(body.expires_at)
        await self._change(operator, lambda edit: edit.change_key(name, changes))
        return self.key(name)

    async def rotate_key(self, operator: str, name: str, raw: bytes) -> dict[str, Any]:
        """Make a key in place of another one; this answer alone has it. Raises InvalidRequest and NotFound."""
        body = RotateBody.parse(raw or b"{}")
        require_none(body.unknown())
        key, sha256 = make_api_key()
        expires_s = _time(body.expires_at)
        await self._change(operator, lambda edit: edit.rotate_key(name, sha256, expires_s, edit.now_s + body.overlap_s))
        return {**self.key(key_id(sha256)), "key": key, "replaced": self.key(name)}

    async def remove_key(self, operator: str, name: str) -> dict[str, Any]:
        """Remove a key that was made here. Raises Conflict and NotFound."""
        await self._change(operator, lambda edit: edit.remove_key(name))
        return {"id": name, "object": "api_key", "deleted": True}

    async def _change(self, operator: str, change: Callable[[Edit], T]) -> T:
        self.registry.objects  # noqa: B018  # without a database nobody is asked
        if not await self.broadcast.keep_tenants():
            raise NotFound(
                "An ingress on another machine does not reach this database of tenants and keys: set "
                "$WARMPATH_RESPONSES_URL to a Redis or Postgres."
            )
        result = await self.registry.change(operator, change)
        self.registry.changed()
        return result

    def _in_force(self) -> list[TenantConfig]:
        self.registry.document  # noqa: B018  # raises while nothing was read
        return self.registry.tenants

    def _tenant(self, config: TenantConfig) -> dict[str, Any]:
        name = name_of(config.name)
        stored = self.registry.document.tenants.get(name)
        declared = name in self.registry.declared.by_name
        return {
            "name": name,
            "id": config.name,
            "object": "tenant",
            "source": "settings" if declared else "database",
            "created_at": shown_time(stored.created_s) if stored is not None and not declared else None,
            **config.model_dump(mode="json", include=set(FIELDS)),
            "overrides": sorted(stored.fields) if stored is not None and declared else [],
            "keys": [key_id(key.sha256) for key in config.key_sha256],
        }

    def _key(self, tenant: str, key: ApiKeyConfig, *, declared: bool) -> dict[str, Any]:
        stored = self.registry.document.keys.get(key.sha256) or StoredKey(key.sha256, tenant)
        ended = key.expires is not None and key.expires.timestamp() <= self.registry.now_s()
        return {
            "id": key_id(key.sha256),
            "object": "api_key",
            "tenant": name_of(tenant),
            "label": stored.label,
            "source": "settings" if declared else "database",
            "state": "disabled" if key.revoked else "expired" if ended else "active",
            "created_at": shown_time(stored.created_s) if stored.added else None,
            "expires_at": shown_time(key.expires.timestamp()) if key.expires is not None else None,
        }


_MOST_BODY_BYTES = 2 * MAX_FIELDS_BYTES


def _fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of a tenant's body; null stays, for no limit. Raises InvalidRequest."""
    if len(raw) > _MOST_BODY_BYTES:  # each value of a million would be checked
        raise InvalidRequest(f"A tenant's body has at most {_MOST_BODY_BYTES} bytes; shorten `models`.")
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The body is not valid JSON in UTF-8; send one JSON object.") from error
    if not isinstance(value, dict):
        raise InvalidRequest('The body must be a JSON object, with fields like "tokens_per_minute".')
    if "key_sha256" in value:
        raise InvalidRequest("key_sha256 is for the settings; POST /v1/admin/keys makes a key.", param="key_sha256")
    return value


def _time(moment: str | None) -> float | None:
    if moment is None:
        return None
    try:
        return TypeAdapter[datetime](AwareDatetime).validate_python(moment).astimezone(UTC).timestamp()
    except (ValidationError, OverflowError):
        wrong = "expires_at must be a moment with its time zone, such as 2027-01-31T00:00:00Z."
        raise InvalidRequest(wrong, param="expires_at") from None


def _entry(change: TenancyChange) -> dict[str, Any]:
    shown: Mapping[str, Any] = msgspec.structs.asdict(change)
    return {
        "id": change.id,
        "object": "change",
        "at": shown_time(change.at_s),
        **{name: value for name, value in shown.items() if name not in ("id", "at_s")},
    }
