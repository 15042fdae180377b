"""What operators have added and changed, the one rule by which it joins the settings, and each change.

The settings are the base. The database adds tenants and keys, and overrides fields of declared tenants until a reset.
A key that either of both ends has ended. Knows no database and no HTTP. A key is here as its SHA-256 alone.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from pydantic import ValidationError

from serve_app.config.sentences import ended, sentence
from serve_app.config.tenants import ApiKeyConfig, TenantConfig
from serve_app.errors import Conflict, InvalidRequest, NotFound
from serve_app.tenancy.lives import Lives
from serve_app.tenants import life_name

logger = logging.getLogger(__name__)

MAX_TENANTS, MAX_KEYS, MAX_KEYS_OF_TENANT = 2_000, 10_000, 100
MAX_FIELDS_BYTES = 8_192
"""The longest JSON of what is set for one tenant."""
MAX_LABEL_CHARS = 64

FIELDS = tuple(name for name in TenantConfig.model_fields if name not in ("name", "key_sha256"))
"""What an operator may set for a tenant that the database added."""
FIXED = frozenset({"trust_group"})
"""Fields that only its creation, or the settings, give a tenant: with another one, its cache is lost."""
_ANY_KEY = "0" * 64
NOT_APART = (
    "the servers behind this one were not asked whether they keep tenants' caches apart; start it with "
    "`require_tenants: true`, or with a tenant in the settings."
)


class StoredTenant(msgspec.Struct, omit_defaults=True):
    """``fields``: those that were set, as JSON. ``added``: it exists by itself, else it only changes a declared one.

    ``life``: the number of its life, 0: a release that knows none wrote this.
    """

    name: str
    added: bool = False
    created_s: float = 0.0
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    life: int = 0


class StoredKey(msgspec.Struct, omit_defaults=True):
    """``added``: a key made here, else only an earlier end of a declared one. ``expires_s``: since 1970."""

    sha256: str
    tenant: str
    added: bool = False
    label: str = ""
    created_s: float = 0.0
    expires_s: float | None = None
    disabled: bool = False


class TenancyChange(msgspec.Struct):
    """Who changed what, when. ``changes``: by field, what was before and after; nothing of it is secret."""

    id: str
    at_s: float
    operator: str
    action: str
    tenant: str
    key: str = ""
    changes: dict[str, list[Any]] = msgspec.field(default_factory=dict)


class Tenancy(msgspec.Struct):
    """All of it, stored as one: ``keys`` by SHA-256. ``log``: changes that may not be in the log's own rows yet.

    ``had_tenants``: the deployment has had tenants, so that none means that they are lost.
    """

    tenants: dict[str, StoredTenant] = msgspec.field(default_factory=dict)
    keys: dict[str, StoredKey] = msgspec.field(default_factory=dict)
    log: list[TenancyChange] = msgspec.field(default_factory=list)
    had_tenants: bool = False


@dataclass(frozen=True, slots=True)
class Declared:
    """What the settings have. ``operators``: SHA-256 of the operators' keys; ``priced``: whether there are prices.

    ``apart``: whether the caches of several tenants are kept apart; servers that already run are asked at the start.
    """

    tenants: Sequence[TenantConfig] = ()
    operators: Collection[str] = ()
    priced: bool = False
    apart: bool = True

    @property
    def by_name(self) -> dict[str, TenantConfig]:
        """The tenants by name."""
        return {tenant.name: tenant for tenant in self.tenants}


def key_id(sha256: str) -> str:
    """Return a key's name for operators. No key follows from it."""
    return f"key_{sha256[:16]}"


def life_of(name: str, document: Tenancy, lives: Lives) -> int:
    """Return the number of the life of a tenant in force."""
    stored = document.tenants.get(name)
    if stored is None or not stored.added:
        return lives.number(name)
    return stored.life or lives.number(name, stored.created_s)


def note_lives(declared: Declared, document: Tenancy, lives: Lives) -> None:
    """Write the lives of the tenants in force into ``lives``, and into the tenants that operators added."""
    for name in declared.by_name.keys() | document.tenants.keys():
        stored = document.tenants.get(name)
        if stored is not None and stored.added:
            stored.life = life_of(name, document, lives)
            lives.keep(name, stored.life, stored.created_s)
        elif name in declared.by_name:
            lives.keep(name, lives.number(name), None)


def merged(declared: Declared, document: Tenancy, lives: Lives) -> list[TenantConfig]:
    """Return the tenants in force by the names of their lives, with their keys, which may be none.

    A declared key is its declared tenant's. A key ends with the first of its ends, and is revoked if either says so.
    """
    names = declared.by_name
    taken = {key.sha256 for tenant in declared.tenants for key in tenant.key_sha256} | set(declared.operators)
    more: dict[str, list[ApiKeyConfig]] = {}
    for key in document.keys.values():
        if key.added and key.sha256 not in taken:
            more.setdefault(key.tenant, []).append(
                ApiKeyConfig(sha256=key.sha256, expires=_moment(key.expires_s), revoked=key.disabled)
            )
    in_force = []

    def life(name: str) -> str:
        return life_name(name, life_of(name, document, lives))

    for tenant in declared.tenants:
        stored = document.tenants.get(tenant.name)
        fields = {} if stored is None else {n: v for n, v in stored.fields.items() if n not in FIXED}
        keys = [_ended(key, document.keys.get(key.sha256)) for key in tenant.key_sha256]
        in_force.append(_with(tenant, life(tenant.name), fields, [*keys, *more.get(tenant.name, ())]))
    for stored in document.tenants.values():
        if stored.added and stored.name not in names:
            base = TenantConfig(name=stored.name, key_sha256=[ApiKeyConfig(sha256=_ANY_KEY, revoked=True)])
            in_force.append(_with(base, life(stored.name), stored.fields, more.get(stored.name, [])))
    return in_force


def _ended(key: ApiKeyConfig, stored: StoredKey | None) -> ApiKeyConfig:
    if stored is None:
        return key
    ends = [end for end in (key.expires, _moment(stored.expires_s)) if end is not None]
    return ApiKeyConfig(sha256=key.sha256, expires=min(ends, default=None), revoked=key.revoked or stored.disabled)


def _with(base: TenantConfig, life: str, fields: Mapping[str, Any], keys: list[ApiKeyConfig]) -> TenantConfig:
    """Return a tenant with its ``life`` as name, and other fields. An unreadable one is disabled."""
    try:
        values = _checked(base.name, {name: value for name, value in fields.items() if name in FIELDS})
    except InvalidRequest:
        logger.exception("the tenant %s is disabled: what the database says of it cannot be used here", base.name)
        values = {"disabled": True}
    return base.model_copy(update={**values, "name": life, "key_sha256": keys})


def _checked(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a tenant as the settings have them. Raises InvalidRequest with a sentence."""
    try:
        config = TenantConfig.model_validate({"name": name, "key_sha256": [_ANY_KEY], **fields})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{where}: {ended(sentence(first, TenantConfig))}", param=where or None) from None
    return {one: getattr(config, one) for one in fields}


@dataclass(slots=True)
class Edit:
    """One operator's change of a ``document`` and of ``lives``, which it mutates.

    Its methods raise InvalidRequest, Conflict and NotFound.
    """

    document: Tenancy
    lives: Lives
    declared: Declared
    operator: str
    now_s: float
    changes: list[TenancyChange] = field(default_factory=list)

    def add_tenant(self, name: str, fields: Mapping[str, Any], *, restore: bool = False) -> None:
        """Add a tenant without keys. ``restore``: it has what the last one of its name left, else nothing of it."""
        _checked(name, {})
        if not self.declared.apart:
            raise Conflict(f"No tenant can be added: {NOT_APART}")
        if name in self.declared.by_name or self._added(name):
            raise Conflict(f"There is a tenant {name!r} already; change that one.", param="name")
        self._require_room(name)
        life = self.lives.begin(name, self.now_s, again=restore)
        self.document.tenants[name] = StoredTenant(name, True, self.now_s, life=life)
        self._drop_keys(name)  # those of a tenant of this name that was declared once
        self._set(name, fields, "tenant.created")

    def set_tenant(self, name: str, fields: Mapping[str, Any]) -> None:
        """Set fields of a tenant; null: no such limit."""
        self._require(name)
        if not fields:
            raise InvalidRequest(f"Nothing is to be changed; give one of {', '.join(FIELDS)}.")
        if fixed := sorted(FIXED & fields.keys()):
            raise InvalidRequest(
                f"{fixed[0]} cannot change here: the tenant would lose its cache. Change it in the settings, or add "
                "another tenant.",
                param=fixed[0],
            )
        self._require_room(name)
        self.document.tenants.setdefault(name, StoredTenant(name, created_s=self.now_s))
        self._set(name, fields, "tenant.changed")

    def reset_tenant(self, name: str) -> None:
        """Go back to the declared fields of a tenant. Its keys stay as they are."""
        self._require(name)
        if name not in self.declared.by_name:
            raise Conflict(f"The tenant {name!r} is not in the settings, so there is nothing to go back to.")
        self.lives.keep(name, life_of(name, self.document, self.lives), None)
        before = self.document.tenants.pop(name, StoredTenant(name)).fields
        self._note("tenant.reset", name, changes={one: [value, None] for one, value in before.items()})

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant and its keys."""
        self._require(name)
        if name in self.declared.by_name:
            raise Conflict(f"The tenant {name!r} is in the settings; remove it there, or set `disabled` to true here.")
        self.lives.end(name)
        del self.document.tenants[name]
        self._drop_keys(name)
        self._note("tenant.removed", name)

    def add_key(self, sha256: str, tenant: str, label: str, expires_s: float | None) -> StoredKey:
        """Add a key of a tenant by its SHA-256."""
        self._require(tenant)
        own = sum(key.added and key.tenant == tenant for key in self.document.keys.values())
        if own >= MAX_KEYS_OF_TENANT or len(self.document.keys) >= MAX_KEYS:
            most = MAX_KEYS_OF_TENANT if own >= MAX_KEYS_OF_TENANT else MAX_KEYS
            raise Conflict(f"There are {most} keys, the most; delete those that nobody uses.")
        self._future(expires_s)
        key = self.document.keys[sha256] = StoredKey(sha256, tenant, True, label, self.now_s, expires_s)
        self._note("key.created", tenant, sha256, {"expires_at": [None, shown_time(expires_s)], "label": ["", label]})
        return key

    def change_key(self, name: str, changes: Mapping[str, Any], action: str = "key.changed") -> None:
        """Set ``disabled``, ``expires_s`` or ``label`` of a key, by id. A declared key can only end earlier."""
        sha256, tenant = self.find_key(name)
        if not changes:
            raise InvalidRequest("Nothing is to be changed; give disabled, expires_at or label.")
        if (expires_s := changes.get("expires_s")) is not None:
            self._future(expires_s)
        stored = self.document.keys.get(sha256)
        if stored is None and len(self.document.keys) >= MAX_KEYS:
            raise Conflict(f"There are {MAX_KEYS} keys, the most; delete those that nobody uses.")
        key = stored or StoredKey(sha256, tenant, created_s=self.now_s)
        noted = {one: [getattr(key, one), value] for one, value in changes.items()}
        self.document.keys[sha256] = msgspec.structs.replace(key, **changes)
        if "expires_s" in noted:
            noted["expires_at"] = [shown_time(end) for end in noted.pop("expires_s")]
        self._note(action, tenant, sha256, noted)

    def rotate_key(self, name: str, sha256: str, expires_s: float | None, old_until_s: float) -> StoredKey:
        """Add a key in place of another one, which ends at ``old_until_s`` unless it does so before."""
        before, tenant = self.find_key(name)
        label = self.document.keys[before].label if before in self.document.keys else ""
        made = self.add_key(sha256, tenant, label, expires_s)
        old = self.document.keys.setdefault(before, StoredKey(before, tenant, created_s=self.now_s))
        end_s = old_until_s if old.expires_s is None else min(old.expires_s, old_until_s)
        ends = [shown_time(old.expires_s), shown_time(end_s)]
        self.document.keys[before] = msgspec.structs.replace(old, expires_s=end_s)
        self._note("key.rotated", tenant, before, {"expires_at": ends, "successor": [None, key_id(sha256)]})
        return made

    def remove_key(self, name: str) -> None:
        """Remove a key that was made here."""
        sha256, tenant = self.find_key(name)
        if any(key.sha256 == sha256 for one in self.declared.tenants for key in one.key_sha256):
            raise Conflict(f"The key {name} is in the settings; remove it there, or disable it here.")
        del self.document.keys[sha256]
        self._note("key.deleted", tenant, sha256)

    def find_key(self, name: str) -> tuple[str, str]:
        """Return the SHA-256 and the tenant of a key by its id. Raises NotFound."""
        for tenant in self.declared.tenants:
            for key in tenant.key_sha256:
                if key_id(key.sha256) == name:
                    return key.sha256, tenant.name
        for stored in self.document.keys.values():
            if stored.added and key_id(stored.sha256) == name:
                return stored.sha256, stored.tenant
        raise NotFound(f"There is no key {name[:64]!r}; GET /v1/admin/keys lists them.", param="key")

    def _set(self, name: str, fields: Mapping[str, Any], action: str) -> None:
        _checked(name, fields)
        if not self.declared.priced and ((fields.get("budget") or {}).get("money") is not None):
            raise InvalidRequest("A budget in money needs `prices` in the settings.", param="budget")
        stored = self.document.tenants[name]
        after = {**stored.fields, **fields}
        if len(msgspec.json.encode(after)) > MAX_FIELDS_BYTES:
            raise InvalidRequest(f"A tenant's fields have at most {MAX_FIELDS_BYTES} bytes as JSON; shorten `models`.")
        self._note(action, name, changes={one: [stored.fields.get(one), value] for one, value in fields.items()})
        self.document.tenants[name] = msgspec.structs.replace(stored, fields=after)

    def _added(self, name: str) -> bool:
        return name in self.document.tenants and self.document.tenants[name].added

    def _drop_keys(self, tenant: str) -> None:
        kept = {sha: key for sha, key in self.document.keys.items() if not key.added or key.tenant != tenant}
        self.document.keys = kept

    def _require_room(self, name: str) -> None:
        if name not in self.document.tenants and len(self.document.tenants) >= MAX_TENANTS:
            raise Conflict(f"There are {MAX_TENANTS} tenants, the most; remove one, or declare more in the settings.")

    def _require(self, name: str) -> None:
        if name not in self.declared.by_name and not self._added(name):
            raise NotFound(f"There is no tenant {name[:64]!r}; GET /v1/admin/tenants lists them.", param="tenant")

    def _future(self, expires_s: float | None) -> None:
        if expires_s is not None and expires_s <= self.now_s:
            raise InvalidRequest("expires_at must lie in the future; to end a key now, disable it.", param="expires_at")

    def _note(self, action: str, tenant: str, sha256: str = "", changes: dict[str, list[Any]] | None = None) -> None:
        key = key_id(sha256) if sha256 else ""
        self.changes.append(TenancyChange("", self.now_s, self.operator, action, tenant, key, changes or {}))


def shown_time(time_s: float | None) -> str | None:
    """Return a time in RFC 3339 with UTC, None for none."""
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(time_s: float | None) -> datetime | None:
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC)
