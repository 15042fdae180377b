"""The rule that joins settings and database, against a naive history of each tenant and key."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.config.tenants import TenantConfig
from serve_app.errors import AuthenticationFailed, Conflict, WarmpathError
from serve_app.tenancy.lives import Lives
from serve_app.tenancy.records import (
    MAX_KEYS,
    MAX_KEYS_OF_TENANT,
    MAX_TENANTS,
    Declared,
    Edit,
    StoredKey,
    StoredTenant,
    Tenancy,
    key_id,
    merged,
    note_lives,
)
from serve_app.tenants import Tenants, name_of

NAMES, KEYS = ("acme", "globex", "zeta"), ("k0", "k1", "k2", "k3")
NOW_S = 1_000_000.0


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def at(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


@dataclass
class Told:
    """What the settings say of a key."""

    tenant: str
    end: float | None
    revoked: bool


@dataclass
class Settings:
    limits: dict[str, int | None] = field(default_factory=dict)  # by tenant
    keys: dict[str, Told] = field(default_factory=dict)

    def declared(self) -> Declared:
        found = []
        for name, limit in self.limits.items():
            keys = [
                {"sha256": digest(key), "revoked": told.revoked, "expires": None if told.end is None else at(told.end)}
                for key, told in self.keys.items()
                if told.tenant == name
            ]
            found.append(TenantConfig.model_validate({"name": name, "key_sha256": keys, "concurrent_requests": limit}))
        return Declared(found)


@dataclass
class Made:
    """A key of the API, or what the API said of a declared one (``tenant`` None)."""

    tenant: str | None = None
    end: float | None = None
    off: bool = False


@dataclass
class Oracle:
    """The history of each tenant and each key, with no document: sets for ``added``, the last words for limits."""

    added: set[str] = field(default_factory=set)
    limits: dict[str, int | None] = field(default_factory=dict)
    keys: dict[str, Made] = field(default_factory=dict)
    tenants: list[str] = field(default_factory=list)
    """The names of all tenants that there ever were, in their order."""
    last: dict[str, int] = field(default_factory=dict)
    """The place of the last tenant of each name, while there is one."""

    def see(self, settings: Settings) -> None:
        """A name that has no tenant gets one by the settings."""
        for name in settings.limits.keys() - self.last.keys():
            self.begin(name)

    def begin(self, name: str) -> None:
        self.last[name] = len(self.tenants)
        self.tenants.append(name)

    def life(self, name: str) -> str:
        number = self.tenants[: self.last[name] + 1].count(name)
        return name if number == 1 else f"{name}~{number}"

    def there(self, settings: Settings) -> set[str]:
        return set(settings.limits) | self.added

    def knows(self, settings: Settings, key: str) -> bool:
        return key in settings.keys or (key in self.keys and self.keys[key].tenant is not None)

    def who(self, settings: Settings, key: str, now_s: float) -> str | None:
        told, made = settings.keys.get(key), self.keys.get(key, Made())
        tenant = told.tenant if told is not None else made.tenant
        if tenant is None or tenant not in self.there(settings):
            return None
        ended = any(end is not None and end <= now_s for end in (made.end, told.end if told is not None else None))
        return None if ended or made.off or (told is not None and told.revoked) else tenant

    def limit(self, settings: Settings, name: str) -> int | None:
        return self.limits[name] if name in self.limits else settings.limits.get(name)

    def apply(self, settings: Settings, step: tuple[str, str, str, Any]) -> bool:
        """Follow a step; return whether it is allowed."""
        action, name, key, value = step
        there = name in self.there(settings)
        match action:
            case "add":
                if there:
                    return False
                self.begin(name)
                self.added.add(name)
                self.limits[name] = value
                self.keys = {one: made for one, made in self.keys.items() if made.tenant != name}
            case "set":
                if not there:
                    return False
                self.limits[name] = value
            case "reset":
                if name not in settings.limits:
                    return False
                self.limits.pop(name, None)
                self.added.discard(name)
            case "remove":
                if name in settings.limits or not there:
                    return False
                del self.last[name]
                self.added.remove(name)
                self.limits.pop(name, None)
                self.keys = {one: made for one, made in self.keys.items() if made.tenant != name}
            case "make":
                if not there:
                    return False
                self.keys[key] = Made(name, None if value is None else NOW_S + value)
            case "end" | "off" | "on":
                if not self.knows(settings, key):
                    return False
                made = self.keys.setdefault(key, Made())
                if action == "end":
                    made.end = None if value is None else NOW_S + value
                else:
                    made.off = action == "off"
            case "rotate":
                if not self.knows(settings, key):
                    return False
                told, made = settings.keys.get(key), self.keys.setdefault(key, Made())
                until_s = NOW_S + (value or 0)
                made.end = until_s if made.end is None else min(made.end, until_s)
                self.keys[f"{key}+"] = Made(told.tenant if told is not None else made.tenant)
            case "delete":
                if key in settings.keys or not self.knows(settings, key):
                    return False
                del self.keys[key]
        return True


def edited(edit: Edit, step: tuple[str, str, str, Any]) -> None:
    action, name, key, value = step
    match action:
        case "add":
            edit.add_tenant(name, {"concurrent_requests": value})
        case "set":
            edit.set_tenant(name, {"concurrent_requests": value})
        case "reset":
            edit.reset_tenant(name)
        case "remove":
            edit.remove_tenant(name)
        case "make":
            edit.add_key(digest(key), name, "", None if value is None else NOW_S + value)
        case "end":
            edit.change_key(key_id(digest(key)), {"expires_s": None if value is None else NOW_S + value})
        case "off" | "on":
            edit.change_key(key_id(digest(key)), {"disabled": action == "off"})
        case "rotate":
            edit.rotate_key(key_id(digest(key)), digest(f"{key}+"), None, NOW_S + (value or 0))
        case "delete":
            edit.remove_key(key_id(digest(key)))


@st.composite
def settings_of(draw: st.DrawFn) -> Settings:
    """Draw settings: each declared tenant has a key at least, as they must."""
    drawn, names = Settings(), draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    keys = draw(st.permutations(KEYS))
    for name in names:
        drawn.limits[name] = draw(st.none() | st.integers(1, 9))
        drawn.keys[keys.pop()] = Told(
            name, draw(st.none() | st.sampled_from((NOW_S + 5, NOW_S + 50))), draw(st.booleans())
        )
    return drawn


STEPS = st.tuples(
    st.sampled_from(("add", "set", "reset", "remove", "make", "end", "off", "on", "rotate", "delete", "settings")),
    st.sampled_from(NAMES),
    st.sampled_from(KEYS),
    st.none() | st.integers(1, 9),
)


@given(settings_of(), settings_of(), st.lists(STEPS, max_size=25))
@example(  # at one moment
    Settings(), Settings(), [("add", "acme", "k0", None), ("remove", "acme", "k0", None), ("add", "acme", "k0", None)]
)
def test_settings_and_database_join_as_their_history_says(before: Settings, after: Settings, steps: Any) -> None:
    """Steps of operators among changes of settings: who gets in by each key at each time, and each tenant's limit."""
    oracle, document, lives = Oracle(), Tenancy(), Lives()
    settings = before
    for step in steps:
        if step[0] == "settings":
            settings = after if settings is before else before
            continue
        if (step[0] == "make" and oracle.knows(settings, step[2])) or (
            step[0] == "rotate" and oracle.knows(settings, f"{step[2]}+")
        ):
            continue  # no key is made twice
        oracle.see(settings)
        note_lives(settings.declared(), document, lives)
        edit = Edit(
            *msgspec.convert(msgspec.to_builtins((document, lives)), tuple[Tenancy, Lives]),
            settings.declared(),
            "o",
            NOW_S,
        )
        allowed = oracle.apply(settings, step)
        try:
            edited(edit, step)
            assert allowed, step
            document, lives = edit.document, edit.lives
            assert len(edit.changes) == (2 if step[0] == "rotate" else 1)
        except WarmpathError:
            assert not allowed, step
    for settings in (before, after):
        oracle.see(settings)
        configs = merged(settings.declared(), document, lives)
        note_lives(settings.declared(), document, lives)
        assert configs == merged(settings.declared(), document, lives)
        assert {one.name: one.concurrent_requests for one in configs} == {
            oracle.life(name): oracle.limit(settings, name) for name in oracle.there(settings)
        }
        for now_s in (NOW_S, NOW_S + 4.5, NOW_S + 5, NOW_S + 100):
            tenants = Tenants(configs, b"s" * 32, now_s=lambda now_s=now_s: now_s)  # type: ignore[misc]
            for key in (*KEYS, *(f"{key}+" for key in KEYS)) if configs else ():
                try:
                    found: str | None = name_of(tenants.authenticate(f"Bearer {key}").name)
                except AuthenticationFailed:
                    found = None
                assert found == oracle.who(settings, key, now_s), (key, now_s)


def test_a_rotation_never_lengthens_a_key_and_its_successor_is_of_the_same_tenant() -> None:
    """Whoever ends a key first decides: the settings, an operator before, or the rotation."""
    for ends in ((5.0, 9.0), (9.0, 5.0), (None, 9.0), (9.0, None), (None, None)):
        told, before = ends
        keys = [{"sha256": digest("k0"), "expires": None if told is None else at(NOW_S + told)}]
        acme = TenantConfig.model_validate({"name": "acme", "key_sha256": keys})
        edit = edit_of(Tenancy(), acme)
        if before is not None:
            edit.change_key(key_id(digest("k0")), {"expires_s": NOW_S + before})
        edit.rotate_key(key_id(digest("k0")), digest("k1"), None, NOW_S + 7)
        (tenant,) = merged(edit.declared, edit.document, edit.lives)
        found = {key.sha256: key.expires for key in tenant.key_sha256}
        first = min(end for end in (told, before, 7.0) if end is not None)
        assert found == {digest("k0"): at(NOW_S + first), digest("k1"): None}, ends


def test_keys_of_a_tenant_that_the_settings_had_open_none_that_is_added_later() -> None:
    acme = TenantConfig.model_validate({"name": "acme", "key_sha256": [digest("declared")]})
    edit = edit_of(Tenancy(), acme)
    edit.add_key(digest("made"), "acme", "", None)
    edit.declared = Declared()
    edit.add_tenant("acme", {})
    edit.add_key(digest("new"), "acme", "", None)
    (tenant,) = merged(Declared(), edit.document, edit.lives)
    assert [key.sha256 for key in tenant.key_sha256] == [digest("new")]


def edit_of(document: Tenancy, *declared: TenantConfig) -> Edit:
    return Edit(document, Lives(), Declared(declared), "o", NOW_S)


def test_tenants_and_keys_are_bounded() -> None:
    acme = TenantConfig.model_validate({"name": "acme", "key_sha256": [digest("declared")]})
    edit = edit_of(Tenancy(), acme)
    names = [f"t{number}" for number in range(MAX_TENANTS)]
    for name in names:
        edit.add_tenant(name, {})
    for change in (edit.add_tenant, edit.set_tenant):
        name = "acme" if change == edit.set_tenant else "d"
        with pytest.raises(Conflict, match=f"There are {MAX_TENANTS} tenants, the most"):
            change(name, {"disabled": True})
    full, other, *more = names
    for number in range(MAX_KEYS_OF_TENANT):
        edit.add_key(digest(f"b{number}"), full, "", None)
    with pytest.raises(Conflict, match=f"There are {MAX_KEYS_OF_TENANT} keys, the most"):
        edit.add_key(digest("one more"), full, "", None)
    for number in range(MAX_KEYS - MAX_KEYS_OF_TENANT - 1):
        key = digest(f"of others {number}")
        edit.document.keys[key] = StoredKey(key, more[number % len(more)], added=True)
    edit.add_key(digest("c0"), other, "", None)
    with pytest.raises(Conflict, match=f"There are {MAX_KEYS} keys, the most"):
        edit.add_key(digest("c1"), other, "", None)
    with pytest.raises(Conflict, match=f"There are {MAX_KEYS} keys, the most"):
        edit.change_key(key_id(digest("declared")), {"disabled": True})


def test_a_key_that_an_operator_or_a_declared_tenant_has_too_is_theirs() -> None:
    document = Tenancy()
    edit = edit_of(document)
    edit.add_tenant("b", {})
    for key in ("mine", "both", "operator"):
        edit.add_key(digest(key), "b", "", None)
    acme = TenantConfig.model_validate({"name": "acme", "key_sha256": [digest("both")]})
    found = merged(Declared([acme], [digest("operator")]), document, Lives())
    assert {one.name: [key.sha256 for key in one.key_sha256] for one in found} == {
        "acme": [digest("both")],
        "b": [digest("mine")],
    }


def test_what_a_newer_version_wrote_disables_its_tenant_and_no_other() -> None:
    """An unknown field has no effect; a value that is not understood may be a limit, so nobody passes without it."""
    document = Tenancy()
    for name, fields in (("b", {"new_limit": 3}), ("c", {"budget": {"seconds": 3}}), ("d", {})):
        document.tenants[name] = StoredTenant(name, True, fields=fields)
    assert {one.name: one.disabled for one in merged(Declared(), document, Lives())} == {
        "b": False,
        "c": True,
        "d": False,
    }
