"""What a name leaves behind: no tenant finds what another one of its name left, in any order of things."""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from serve_app.budgets import Budgets
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.config.tenants import BudgetConfig
from serve_app.engine.protocol import AdapterSpec
from serve_app.errors import NotFound, Overloaded, WarmpathError
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import session_key
from serve_app.live.journal import Journal
from serve_app.prompts.lock import Prompt
from serve_app.prompts.registry import Prompts
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.responses import Document, StoredResponses
from serve_app.stored.url import open_database
from serve_app.tenancy import lives
from serve_app.tenancy.lives import Lives
from serve_app.tenancy.records import Edit, Tenancy
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenancy.weights import stored_weights
from serve_app.tenants import DEFAULT_TENANT, Tenants, name_of
from serve_app.usage import Ledger
from tests.serve_app.tenancy.test_registry import settings

NAMES = ("acme", "globex", DEFAULT_TENANT)
SECRET, BUDGET = b"s" * 32, {"tokens": 1 << 60}
NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)
DAY = NOON.date().isoformat()


class Ingress:
    """What an ingress knows of tenants."""

    def __init__(self, objects: StoredObjects, config: AppConfig) -> None:
        self.registry, self.tenants = TenantRegistry(objects, config), Tenants([], SECRET)


class Rooms:
    """What keeps something for tenants, their database, and two ingresses, of which one acts. Time goes on by steps."""

    def __init__(self, file: Path) -> None:
        ticks = count()
        bounds = StorageLimits(3600, 1 << 30, lambda: NOON.timestamp() + next(ticks) / 1024)
        database, workers = open_database(None, file, bounds), FairWorkers(Shares({}))
        self.objects = StoredObjects(database, SECRET, workers, bounds)
        self.responses = StoredResponses(database, SECRET, workers, bounds)
        self.config = settings()
        self.ingresses = [Ingress(self.objects, self.config) for _ in range(2)]
        self.budgets = Budgets([], {}, self.objects)
        self.ledger = Ledger(None, 16, [self.budgets.count], now=lambda: NOON)
        self.cache, self.sessions = dict[bytes, set[int]](), dict[str, set[int]]()
        self.adapters, self.journal, self.prompts = AdapterRegistry("m"), Journal(lambda: 99), list[Prompt]()

    @property
    def registry(self) -> TenantRegistry:
        return self.ingresses[0].registry

    @property
    def tenants(self) -> Tenants:
        return self.ingresses[0].tenants

    async def declare(self, names: set[str]) -> None:
        """Use settings with these tenants at both ingresses."""
        config, budget = settings(*sorted(names)), BudgetConfig.model_validate(BUDGET)
        declared = [one.model_copy(update={"budget": budget}) for one in config.tenants]
        self.config = config.model_copy(update={"tenants": declared})
        for ingress in self.ingresses:
            ingress.registry.declare(self.config)
        await self.follow()

    async def switch(self) -> None:
        self.ingresses.reverse()
        await self.follow()

    async def restart(self) -> None:
        self.ingresses[0] = Ingress(self.objects, self.config)
        await self.follow()

    async def follow(self) -> None:
        """Look, as the acting ingress does at its start and twice a second."""
        await self.registry.look()
        await self.registry.note_lives()
        self.tenants.configure(self.registry.tenants, ())
        self.budgets.configure(self.registry.tenants, {})

    async def older(self, change: Callable[[Edit], None]) -> None:
        """Change the document as an ingress of a release that knows no lives, and follow."""
        data = await self.objects.get("", "tenancy", "document")
        document = Tenancy() if data is None else msgspec.json.decode(data, type=Tenancy)
        edit = Edit(document, Lives(), self.registry.declared, "o", self.objects.now_s())
        change(edit)
        for number, one in enumerate(edit.changes):
            one.id = f"change_{number:02}{secrets.token_hex(12)}"
        document.had_tenants, document.log = True, document.log + edit.changes
        for tenant in document.tenants.values():
            tenant.life = 0
        new = msgspec.json.encode(document)
        if data is None:
            await self.objects.insert("", "tenancy", "document", new, NOON.timestamp() + 3600)
        else:
            await self.objects.change("", "tenancy", "document", lambda _: new)
        await self.registry._tell()
        await self.follow()

    async def leave(self, name: str, mark: int) -> None:
        """Leave a mark everywhere, as the tenant that bears a name now."""
        tenant = self.tenants.by_name[self.tenants.named(name)]
        inside = tenant.name
        await self.responses.put(inside, Document([], {"id": f"resp_{mark}", "created_at": NOON.timestamp()}))
        await self.objects.insert(inside, "file", str(mark), str(mark).encode(), NOON.timestamp() + 3600)
        self.ledger.prompt(inside, str(mark), "", 1 << mark, 0, stored=True)
        self.cache.setdefault(self.tenants.salt(tenant, None), set()).add(mark)
        self.sessions.setdefault(session_key(inside, "mine"), set()).add(mark)
        self.adapters.merge(
            [self.adapters.next_entry(str(mark), AdapterSpec(str(mark), "0" * 16, str(mark)), (inside,))]
        )
        self.journal.add(inside, {"type": "decision", "at_s": float(mark)})
        self.prompts.append(Prompt("mine", str(mark), "text", inside))

    async def found(self, name: str, marks: range) -> dict[str, Any]:
        """Return the marks that the tenant finds that bears a name now, by place."""
        tenant = self.tenants.by_name[self.tenants.named(name)]
        inside, prompts = tenant.name, Prompts(locked=self.prompts)

        def is_mine(mark: int) -> bool:
            try:
                return prompts.find(f"mine@{mark}", inside).tenant is not None
            except NotFound:
                return False

        return {
            "responses": {mark for mark in marks if await self.responses.get(inside, f"resp_{mark}") is not None},
            "files": {int(data) for data in await self.objects.all(inside, "file")},
            "usage": {int(key.model) for key, _ in self.ledger.read(DAY, DAY, inside)},
            "cache": self.cache.get(self.tenants.salt(tenant, None), set()),
            "sessions": self.sessions.get(session_key(inside, "mine"), set()),
            "adapters": {int(spec.name) for spec in self.adapters.visible(inside)},
            "journal": {int(row["at_s"]) for row in self.journal.of(inside)},
            "prompts": {mark for mark in marks if is_mine(mark)},
            "budget": {mark for told in await self.budgets.told(inside) for mark in marks if told["used"] >> mark & 1},
        }


@dataclass
class Oracle:
    """Who bears each name: a person with marks. ``there``: it has not ended."""

    declared: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    marks: dict[str, set[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def begin(self, name: str) -> None:
        self.marks[name] = set()
        self.ended.discard(name)

    def declare(self, names: set[str]) -> None:
        self.declared = names
        for name in names - self.added:
            if name not in self.marks or name in self.ended:
                self.begin(name)

    def apply(self, action: str, name: str) -> bool:
        there = self.declared | self.added
        if action in ("remove", "old remove"):
            if name in self.declared or name not in self.added:
                return False
            self.added.remove(name)
            self.ended.add(name)
        elif action in ("add", "old add", "restore"):
            if name in there:
                return False
            self.added.add(name)
            if action != "restore" or name not in self.marks:
                self.begin(name)
            self.ended.discard(name)
        elif action == "reset":
            if name not in self.declared:
                return False
            self.added.discard(name)
        return True


CHANGES = ("add", "restore", "reset")
OLDER = ("old add", "old write")
ACTIONS = *CHANGES, *OLDER, "add", "old add", "settings", "settings", "switch", "restart"
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(("acme", *NAMES))), max_size=16)


@hypothesis_settings(max_examples=40)
@given(STEPS)
def test_a_tenant_finds_what_it_left_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]]
) -> None:
    """Tenants come and go by the API and the settings, at ingresses that restart, among changes by an older release.

    They leave marks; each finds its own, in every room.
    """

    async def run() -> None:
        rooms, oracle = Rooms(tmp_path_factory.mktemp("lives") / "db"), Oracle()
        await rooms.follow()
        assert rooms.tenants.open
        await rooms.leave(DEFAULT_TENANT, 0)
        oracle.marks[DEFAULT_TENANT] = {0}
        for mark, (action, name) in enumerate(steps, 1):
            if name in oracle.declared | oracle.added:
                await rooms.leave(name, mark)
                oracle.marks[name].add(mark)
            if action == "settings":
                oracle.declare(oracle.declared ^ {name})
                await rooms.declare(oracle.declared)
            elif action == "switch":
                await rooms.switch()
            elif action == "restart":
                await rooms.restart()
            elif action in CHANGES or name != DEFAULT_TENANT:  # an older release gives away what everybody left
                removes = action != "reset" and name in oracle.added - oracle.declared
                done = action.replace("restore", "remove").replace("add", "remove") if removes else action
                await changed(rooms, oracle.apply(done, name), done, name)
            for one in oracle.declared | oracle.added:
                found = await rooms.found(one, range(len(steps) + 1))
                if one == DEFAULT_TENANT:  # the open deployment's had no budget
                    found["budget"] |= {0} & oracle.marks[one]
                assert found == dict.fromkeys(found, oracle.marks[one]), (action, name, one)

    asyncio.run(run())


async def changed(rooms: Rooms, allowed: bool, action: str, name: str) -> None:
    def change(edit: Edit) -> None:
        match action.removeprefix("old "):
            case "add" | "restore":
                edit.add_tenant(name, {"budget": BUDGET}, restore=action == "restore")
            case "remove":
                edit.remove_tenant(name)
            case "reset":
                edit.reset_tenant(name)

    try:
        await (rooms.older(change) if action.startswith("old ") else rooms.registry.change("o", change))
        assert allowed, (action, name)
    except WarmpathError:
        assert not allowed, (action, name)
    await rooms.follow()


def test_a_tenant_of_settings_that_no_ingress_has_any_more_is_remembered(tmp_path: Path) -> None:
    """Another ingress, which never had it in its settings, gives its name to a new tenant; back in the settings, it is
    the one that was added.
    """

    async def run() -> None:
        before, after = Rooms(tmp_path / "db"), Rooms(tmp_path / "db")
        await before.declare({"acme"})
        await before.leave("acme", 1)
        await after.declare(set())
        await after.registry.change("o", lambda edit: edit.add_tenant("acme", {"cache_share": 3}))
        await after.follow()
        assert after.tenants.named("acme") == "acme~2"
        assert (await after.found("acme", range(3)))["files"] == set()
        assert stored_weights(after.registry) == {"acme~2": 3.0}
        await before.declare({"acme"})
        assert before.tenants.named("acme") == "acme~2"
        await before.registry.change("o", lambda edit: edit.reset_tenant("acme"))
        assert stored_weights(before.registry) == {"acme~2": 1.0}  # replicas know no other weight of this name

    asyncio.run(run())


def test_names_that_are_forgotten_are_never_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More names than an ingress keeps: each new tenant has a number of its own, and living ones keep theirs."""
    monkeypatch.setattr(lives, "MAX_NAMES", 8)
    rng, all_, alive, given = random.Random(3), Lives(), dict[str, tuple[int, float]](), set[tuple[str, int]]()
    for step in range(3000):
        name = f"t{rng.randrange(40)}"
        if name in alive:
            del alive[name]
        elif len(alive) < 6:
            number = all_.begin(name, float(step))
            assert (name, number) not in given
            alive[name] = number, float(step)
            given.add((name, number))
        all_.bound(alive)
        assert len(all_.names) <= 8
        assert all(all_.number(one, added_s) == number for one, (number, added_s) in alive.items())


def test_what_an_earlier_release_removed_has_ended(tmp_path: Path) -> None:
    """It wrote no lives: its tenants are who they were, and the name of one that it removed begins anew."""

    async def run() -> None:
        rooms = Rooms(tmp_path / "db")
        for ingress in rooms.ingresses:  # as in a deployment that has only that release
            ingress.registry.note_lives = AsyncMock()  # type: ignore[method-assign]
        await rooms.older(lambda edit: edit.add_tenant("acme", {}))
        await rooms.older(lambda edit: edit.add_tenant("globex", {}))
        await rooms.leave("acme", 1)
        await rooms.leave("globex", 2)
        await rooms.older(lambda edit: edit.remove_tenant("acme"))
        await rooms.restart()
        await rooms.registry.change("o", lambda edit: edit.add_tenant("acme", {}))
        await rooms.follow()
        assert rooms.tenants.named("globex") == "globex" and (await rooms.found("globex", range(3)))["files"] == {2}
        assert rooms.tenants.named("acme") == "acme~2" and not (await rooms.found("acme", range(3)))["files"]

    asyncio.run(run())


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_an_ingress_that_dies_within_a_change_leaves_no_number_that_is_given_again(tmp_path: Path, writes: int) -> None:
    """It dies before or after each write; an older release removes what it added before another one has noted it."""

    async def run() -> None:
        rooms = Rooms(tmp_path / "db")
        await rooms.registry.change("o", lambda edit: edit.add_tenant("acme", {}))
        await rooms.registry.change("o", lambda edit: edit.remove_tenant("acme"))
        replace, done = rooms.registry._replace, 0

        async def dying(place: tuple[str, str, str], old: bytes | None, new: bytes) -> bool:
            nonlocal done
            if done == writes:
                raise Overloaded("killed")
            done += 1
            return await replace(place, old, new)

        rooms.registry._replace = dying  # type: ignore[method-assign]
        rooms.registry._tell = AsyncMock(side_effect=Overloaded("killed"))  # type: ignore[method-assign]
        with contextlib.suppress(Overloaded):
            await rooms.registry.change("o", lambda edit: edit.add_tenant("acme", {}))
        rooms.ingresses[0] = Ingress(rooms.objects, rooms.config)
        await rooms.registry.look()
        rooms.tenants.configure(rooms.registry.tenants, ())
        if added := "acme" in map(name_of, rooms.tenants.by_name):
            await rooms.leave("acme", 1)
            await rooms.older(lambda edit: edit.remove_tenant("acme"))
        assert added == (writes == 2)
        await rooms.registry.change("o", lambda edit: edit.add_tenant("acme", {}))
        await rooms.follow()
        assert (await rooms.found("acme", range(3)))["files"] == set()

    asyncio.run(run())
