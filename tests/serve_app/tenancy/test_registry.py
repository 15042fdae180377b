"""Tenants in a database that several ingresses share: what holds where and when, after restarts and losses too."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from serve_app.config.app import AppConfig
from serve_app.errors import AuthenticationFailed, Conflict, NotFound, Overloaded
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.url import open_database
from serve_app.tenancy import registry
from serve_app.tenancy.records import key_id
from serve_app.tenancy.registry import KEPT, LOOK_S, WHOLE_LOOKS, TenantRegistry
from serve_app.tenants import Tenants
from tests.serve_app.tenancy.test_records import digest

REVOKED_WITHIN_S = 2.0


def settings(*names: str, **more: Any) -> AppConfig:
    declared = [{"name": name, "key_sha256": [digest(name)]} for name in names]
    return AppConfig.model_validate({"tenants": declared, "operator_key_sha256": [digest("operator")], **more})


class Ingress:
    """The part of an ingress that knows tenants, with a connection of its own. ``begin``: it follows changes."""

    def __init__(self, file: Path | None, config: AppConfig, now_s: Callable[[], float] = time.time) -> None:
        bounds = StorageLimits(3600, 1 << 30, now_s)
        self.objects = None
        if file is not None:
            self.objects = StoredObjects(open_database(None, file, bounds), b"s" * 32, FairWorkers(Shares({})), bounds)
        self.registry = TenantRegistry(self.objects, config)
        self.tenants = Tenants([], b"s" * 32)
        self.news = asyncio.Event()
        self.use()

    def use(self) -> None:
        self.tenants.configure(self.registry.tenants, (), refusal=self.registry.refusal)
        self.news.set()

    def begin(self) -> None:
        self.registry.start(self.use)

    def end(self) -> None:
        self.registry._watching.cancel()

    async def follow(self) -> None:
        await self.registry.look()
        self.use()

    def who_or_nobody(self, key: str) -> str:
        return "" if self.tenants.refusal else self.who(key)

    def who(self, key: str) -> str:
        try:
            return self.tenants.authenticate(f"Bearer {key}").name
        except AuthenticationFailed:
            return ""


def test_servers_that_run_already_get_tenants_only_if_they_were_asked_to_keep_them_apart(tmp_path: Path) -> None:
    """Neither a change nor a database that has tenants already puts two tenants before such servers."""
    remote = {"engine": "remote", "model": "demo", "workers": ["http://127.0.0.1:1"]}

    async def run() -> None:
        one = Ingress(tmp_path / "db", settings(**remote))
        await one.follow()
        with pytest.raises(Conflict, match="require_tenants: true"):
            await one.registry.change("o", lambda edit: edit.add_tenant("b", {}))
        asked = Ingress(tmp_path / "db", settings(require_tenants=True, **remote))
        await asked.registry.change("o", lambda edit: edit.add_tenant("b", {}))
        await one.follow()
        assert "caches apart" in one.tenants.refusal and not asked.registry.refusal

    asyncio.run(run())


def test_a_revoked_key_ends_on_every_ingress_at_its_next_look(tmp_path: Path) -> None:
    """Both ingresses are asked without a pause; the time of the last accepted request is printed (bar: two seconds)."""
    assert 2 * LOOK_S < REVOKED_WITHIN_S

    async def run() -> None:
        here, there = (Ingress(tmp_path / "db", settings("acme")) for _ in range(2))
        for one in (here, there):
            one.begin()
        await here.registry.change("o", lambda edit: edit.add_key(digest("new"), "acme", "", None))
        async with asyncio.timeout(30):
            while there.who_or_nobody("new") != "acme":
                there.news.clear()
                await there.news.wait()
        here.use()
        name, last_s, begun_s = key_id(digest("new")), 0.0, time.monotonic()
        revoking = asyncio.create_task(
            here.registry.change("o", lambda edit: edit.change_key(name, {"disabled": True}))
        )
        revoking.add_done_callback(lambda _: here.use())
        looks = there.registry.looks
        async with asyncio.timeout(30):
            while not revoking.done() or here.who("new") or there.who("new"):
                last_s = time.monotonic() - begun_s
                looks = looks if revoking.done() else there.registry.looks
                await asyncio.sleep(0.001)
        print(f"the last accepted request came {last_s:.3f} s after the revocation began")
        assert there.registry.looks - looks <= 2  # one may have begun before the change was whole
        for one in (here, there):
            assert one.who("acme") == "acme"
            one.end()

    asyncio.run(run())


def test_changes_survive_a_restart_and_other_settings(tmp_path: Path) -> None:
    async def run() -> None:
        before = Ingress(tmp_path / "db", settings("acme"))
        await before.follow()
        await before.registry.change("o", lambda edit: edit.add_tenant("b", {"tokens_per_minute": 7}))
        await before.registry.change("o", lambda edit: edit.add_key(digest("b0"), "b", "", None))
        await before.registry.change("o", lambda edit: edit.change_key(key_id(digest("acme")), {"disabled": True}))
        after = Ingress(tmp_path / "db", settings("acme", "zeta"))
        await after.follow()
        assert [after.who(key) for key in ("b0", "acme", "zeta", "none")] == ["b", "", "zeta", ""]
        assert {one.name: one.tokens_per_minute for one in after.registry.tenants}["b"] == 7
        after.registry.declare(settings("zeta"))
        after.use()
        assert [after.who(key) for key in ("b0", "acme", "zeta")] == ["b", "", "zeta"]

    asyncio.run(run())


def test_changes_at_once_are_all_kept_and_logged(tmp_path: Path) -> None:
    """Four ingresses, each with changes of its own; the log has each one once, whoever wrote last."""

    async def run() -> None:
        ingresses = [Ingress(tmp_path / "db", settings("acme")) for _ in range(4)]

        async def add(number: int) -> None:
            one = ingresses[number % 4]
            await one.follow()
            await one.registry.change(f"o{number}", lambda edit: edit.add_tenant(f"t{number}", {}))

        await asyncio.gather(*map(add, range(24)))
        for one in ingresses:
            await one.follow()
            assert {f"t{number}" for number in range(24)} | {"acme"} == {each.name for each in one.registry.tenants}
        entries = await ingresses[0].registry.log(1000)
        assert sorted((one.operator, one.tenant) for one in entries) == sorted((f"o{n}", f"t{n}") for n in range(24))
        assert [one.at_s for one in entries] == sorted((one.at_s for one in entries), reverse=True)

    asyncio.run(run())


def test_the_log_reaches_over_months_and_ends(tmp_path: Path) -> None:
    now_s = 1_800_000_000.0

    async def run() -> None:
        nonlocal now_s
        one = Ingress(tmp_path / "db", settings("acme"), lambda: now_s)
        await one.follow()
        for number in range(6):
            now_s += 30 * 86_400
            await one.registry.change("o", lambda edit, n=number: edit.add_tenant(f"t{n}", {}))  # type: ignore[misc]
        assert [entry.tenant for entry in await one.registry.log(4)] == ["t5", "t4", "t3", "t2"]
        third = (await one.registry.log(3))[-1]
        assert [entry.tenant for entry in await one.registry.log(10, third.id)] == ["t2", "t1", "t0"]
        now_s += KEPT.total_seconds() - 40 * 86_400
        assert [entry.tenant for entry in await one.registry.log(10)] == ["t5", "t4"]

    asyncio.run(run())


def test_lost_tenants_never_open_the_door(tmp_path: Path) -> None:
    """A running ingress keeps what it knows and writes it again; a new one refuses, until it is told to be open."""
    file = tmp_path / "db"

    async def run() -> None:
        old = Ingress(file, settings())
        await old.follow()
        assert old.who("anybody") == "default"
        await old.registry.change("o", lambda edit: edit.add_tenant("b", {}))
        await old.registry.change("o", lambda edit: edit.add_key(digest("b0"), "b", "", None))
        assert old.objects is not None
        await old.objects.remove("", "tenancy")
        await old.follow()
        assert [old.who(key) for key in ("b0", "anybody")] == ["b", ""]
        await old.registry.change("o", lambda edit: edit.add_key(digest("b1"), "b", "", None))
        new = Ingress(file, settings())
        await new.follow()
        assert [new.who(key) for key in ("b0", "b1", "anybody")] == ["b", "b", ""]
        await new.registry.change("o", lambda edit: edit.remove_tenant("b"))
        for config, refused in ((settings(), True), (settings(require_tenants=False), False)):
            last = Ingress(file, config)
            await last.follow()
            assert bool(last.tenants.refusal) == refused
            if refused:
                with pytest.raises(Overloaded, match="refuses everybody"):
                    last.who("anybody")

    asyncio.run(run())


def test_settings_that_lost_their_tenants_are_noticed(tmp_path: Path) -> None:
    async def run() -> None:
        before = Ingress(tmp_path / "db", settings("acme"))
        await before.follow()
        await before.registry.remember()
        after = Ingress(tmp_path / "db", settings())
        await after.follow()
        assert "finds none now" in after.tenants.refusal and not after.tenants.open
        empty = Ingress(tmp_path / "other", settings(require_tenants=True))
        await empty.follow()
        assert "has no tenants yet" in empty.tenants.refusal

    asyncio.run(run())


def test_without_an_answer_of_the_database_nobody_passes_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, what is known stays in force: the database may be away for a while."""
    file = tmp_path / "db"

    async def run() -> None:
        one = Ingress(file, settings("acme"))
        with pytest.raises(Overloaded, match="cannot be read yet"):
            one.who("acme")
        await one.follow()
        assert one.who("acme") == "acme"
        monkeypatch.setattr(one.objects, "get", AsyncMock(side_effect=Overloaded("The database is away.")))
        with pytest.raises(Overloaded):
            await one.registry.look()
        assert one.who("acme") == "acme"

    asyncio.run(run())


def test_without_a_database_nothing_can_change() -> None:
    async def run() -> None:
        one = Ingress(None, settings("acme"))
        assert one.who("acme") == "acme" and not await one.registry.look()
        with pytest.raises(NotFound, match="responses_file"):
            await one.registry.change("o", lambda edit: edit.add_tenant("b", {}))

    asyncio.run(run())


@given(st.lists(st.sampled_from(("change", "unheard", "look", "restart", "settings")), max_size=12))
@hypothesis_settings(max_examples=20)
def test_every_ingress_ends_with_what_the_last_change_left(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """Also with changes whose writer died before it told of them, once all is read again; and each tells of it."""
    file = tmp_path_factory.mktemp("registry") / "db"

    async def run() -> None:
        one, other = Ingress(file, settings("acme")), Ingress(file, settings("acme"))
        await one.follow()
        await other.follow()
        names = {"acme"}
        for number, step in enumerate(steps):
            if step in ("change", "unheard"):
                name = f"t{number}"
                with pytest.MonkeyPatch.context() as patch:
                    if step == "unheard":
                        patch.setattr(one.registry, "_tell", AsyncMock(side_effect=Overloaded("killed")))
                    await one.registry.change("o", lambda edit, name=name: edit.add_tenant(name, {}))  # type: ignore[misc]
                names.add(name)
            elif step == "look":
                await other.follow()
            elif step == "restart":
                other = Ingress(file, settings("acme"))
                await other.follow()
                assert {each.name for each in other.registry.tenants} == names
            else:
                one, other = other, one
                await one.follow()
        changed = False
        for _ in range(WHOLE_LOOKS):
            before = {each.name for each in other.registry.tenants}
            told = await other.registry.look()
            assert told == ({each.name for each in other.registry.tenants} != before)
            changed |= told
        assert {each.name for each in other.registry.tenants} == names

    asyncio.run(run())


@pytest.mark.parametrize("other", ["globex", "acme"])
def test_changes_of_lives_at_once_mix_up_nobody(tmp_path: Path, other: str) -> None:
    """Both write the lives before either writes its tenant: one is first, the other is refused or comes after it."""

    async def run() -> None:
        here, there = (Ingress(tmp_path / "db", settings("zeta")) for _ in range(2))
        begun, met, done = (asyncio.Event() for _ in range(3))
        for one in (here, there):
            await one.follow()
            await one.registry.note_lives()

        def holding(one: Ingress, news: asyncio.Event, until: asyncio.Event) -> None:
            replace = one.registry._replace

            async def held(place: tuple[str, str, str], old: bytes | None, new: bytes) -> bool:
                if place == registry._DOCUMENT:
                    news.set()
                    await until.wait()
                return await replace(place, old, new)

            one.registry._replace = held  # type: ignore[method-assign]

        holding(here, begun, met)
        holding(there, met, done)
        first = asyncio.create_task(here.registry.change("o", lambda edit: edit.add_tenant("acme", {})))
        await begun.wait()
        second = asyncio.create_task(there.registry.change("o", lambda edit: edit.add_tenant(other, {})))
        await first
        done.set()
        if other == "acme":
            with pytest.raises(Conflict):
                await second
        else:
            await second
        for one in (here, there, Ingress(tmp_path / "db", settings("zeta"))):
            one.registry.looks = 0  # so that it reads all
            await one.follow()
            assert {each.name for each in one.registry.tenants} == {"zeta", "acme", other}
        await here.registry.change("o", lambda edit: edit.remove_tenant("acme"))
        await here.registry.change("o", lambda edit: edit.add_tenant("acme", {}))
        assert "acme" not in {each.name for each in here.registry.tenants}

    asyncio.run(run())


def test_the_watch_tells_of_what_a_change_made_here_brought_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change reads the others' in the same breath: they are in force here without another look that sees them."""
    monkeypatch.setattr(registry, "LOOK_S", 0.001)

    async def run() -> None:
        here, there = (Ingress(tmp_path / "db", settings("acme")) for _ in range(2))
        for one in (here, there):
            await one.follow()
            await one.registry.note_lives()
        here.begin()
        await there.registry.change("o", lambda edit: edit.add_tenant("b", {}))
        await there.registry.change("o", lambda edit: edit.add_key(digest("b0"), "b", "", None))
        await here.registry.change("o", lambda edit: edit.set_tenant("acme", {"tokens_per_minute": 1}))
        async with asyncio.timeout(30):
            while here.who("b0") != "b":
                here.news.clear()
                await here.news.wait()
        here.end()

    asyncio.run(run())
