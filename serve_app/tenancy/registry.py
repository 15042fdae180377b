"""Tenants and keys in the database of responses: read by every ingress twice a second, changed by operators.

One row has all of them, so that a change is whole; a small one beside it tells that it is newer. The lives of names
have a row that an earlier release leaves alone, the log of changes has a row for each. An ingress that cannot read
keeps what it knows, and one that never could refuses all clients.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec

from router.background import run_in_background
from serve_app.config.app import AppConfig
from serve_app.errors import NotFound, Overloaded, WarmpathError
from serve_app.stored.objects import StoredObjects
from serve_app.tenancy.lives import Lives
from serve_app.tenancy.records import NOT_APART, Declared, Edit, Tenancy, TenancyChange, merged, note_lives

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 0.5
"""The time between two looks for a newer version."""
WHOLE_LOOKS = 60
"""Every so many looks read all: a writer may have died before it told of a newer version."""
ATTEMPTS = 20
KEPT = timedelta(days=400)
"""The life of an entry of the log."""
_FOREVER_S = 100 * 365 * 86_400.0
_TENANT, _KIND, _LOG = "", "tenancy", "tenancy log"
_DOCUMENT, _LIVES = (_TENANT, _KIND, "document"), (_TENANT, _KIND, "lives")
_WHOLE_LOG = 1_000_000
_UNREAD = "The tenants of this server cannot be read yet: its database does not answer. Send the request again later."
_LOST = (
    "This server has had tenants, and finds none now, so it refuses everybody. Its operator restores the database or "
    "the settings, adds a tenant, or opens it to all with `require_tenants: false`."
)
_REQUIRED = "This server has no tenants yet, and requires them; its operator adds one."


def _nothing(document: Tenancy, lives: Lives) -> None:
    """Change nothing."""


class TenantRegistry:
    """The tenants in force at one ingress: those of the settings, and those of the database.

    ``objects`` None: there is no database. ``required``: the setting ``require_tenants``.
    """

    def __init__(self, objects: StoredObjects | None, config: AppConfig) -> None:
        self._objects = objects
        self._document = Tenancy() if objects is None else None
        self._lives = Lives()
        self._version: bytes | None = None
        self.looks = 0
        self.changed: Callable[[], None] = lambda: None
        self._one_at_a_time = asyncio.Lock()
        """A look that began before a change would end with what was before it."""
        # An engine does not change while it runs.
        self._external = any(one.engine_traits.external for one in config.served().values())
        self.declare(config)

    def declare(self, config: AppConfig) -> None:
        """Use other settings as the base."""
        self._required = config.require_tenants
        apart = bool(config.tenants or config.require_tenants) or not self._external
        self.declared = Declared(config.tenants, config.operator_key_sha256, bool(config.prices), apart)
        self._use(self._document, self._lives)

    def _use(self, document: Tenancy | None, lives: Lives) -> None:
        self._document, self._lives = document, lives
        noted = Lives(dict(lives.names), lives.first)
        note_lives(self.declared, document or Tenancy(), noted)
        self._noted = noted == lives
        self.tenants = merged(self.declared, document or Tenancy(), lives)
        """The tenants in force."""

    def in_force(self, config: AppConfig) -> AppConfig:
        """Return settings with the tenants in force instead of the declared ones."""
        return config.model_copy(update={"tenants": self.tenants})

    @property
    def refusal(self) -> str:
        """Why every client is refused, "" if none is."""
        if self._document is None:
            return _UNREAD
        if self.tenants:
            return "" if self.declared.apart else f"This server refuses everybody: {NOT_APART}"
        lost = self._document.had_tenants and self._required is None
        return _LOST if lost else _REQUIRED if self._required else ""

    @property
    def document(self) -> Tenancy:
        """What operators have changed, as of the last look. Raises Overloaded if it could not be read yet."""
        if self._document is None:
            raise Overloaded(_UNREAD, code="tenants_missing", retry_after_s=1)
        return self._document

    @property
    def objects(self) -> StoredObjects:
        """The database. Raises NotFound if there is none."""
        if self._objects is None:
            raise NotFound(
                "This server has no database for tenants and keys: set responses_file, or $WARMPATH_RESPONSES_URL to a "
                "Redis or Postgres."
            )
        return self._objects

    def now_s(self) -> float:
        """Return the time, in seconds since 1970."""
        return time.time() if self._objects is None else self._objects.now_s()

    @property
    def has_database(self) -> bool:
        """Whether there is one."""
        return self._objects is not None

    async def look(self) -> bool:
        """Read what is newer; return whether there was anything. Raises the errors of the database."""
        if self._objects is None:
            return False
        async with self._one_at_a_time:
            return await self._look(self._objects)

    async def _look(self, objects: StoredObjects) -> bool:
        version = await objects.get(_TENANT, _KIND, "version")
        whole = self._document is None or self.looks % WHOLE_LOOKS == 0
        self.looks += 1
        if version == self._version and not whole:
            return False
        before, lives = self._document, self._lives
        data, raw = await objects.get(*_DOCUMENT), await objects.get(*_LIVES)  # a change writes them in the other order
        self._version = version
        if data is None and before is not None and before.had_tenants:
            logger.error("the database has lost its tenants and keys: those known here stay in force, until the end")
        document = (before or Tenancy()) if data is None else msgspec.json.decode(data, type=Tenancy)
        self._use(document, lives if raw is None else msgspec.json.decode(raw, type=Lives))
        return (self._document, self._lives) != (before, lives)

    def start(self, changed: Callable[[], None]) -> None:
        """Look regularly from now on. ``changed``: puts what is known now in force at this ingress."""
        self.changed = changed
        self._watching = run_in_background(self._watch)

    async def _watch(self) -> None:
        failed, announced = False, (self._document, self._lives)
        while True:
            try:
                await self.look()
                await self.note_lives()
                now = self._document, self._lives
                if now != announced:  # by a look, or by a change made here
                    self.changed()
                announced = now
                failed = False
            except Exception:
                if not failed:
                    logger.exception("the database of tenants cannot be read: what is known of them stays in force")
                failed = True
            await asyncio.sleep(LOOK_S)

    async def remember(self) -> None:
        """Note in the database that the deployment has tenants, so that without them it refuses everybody."""
        if self._objects is not None and not self.document.had_tenants:
            await self._commit(_nothing)

    async def note_lives(self) -> None:
        """Note the tenants in force in the database, so that no other tenant of such a name has what they leave."""
        if self._objects is not None and self._document is not None and not self._noted:
            await self._commit(_nothing, lives_alone=True)

    async def change(self, operator: str, change: Callable[[Edit], T]) -> T:
        """Apply an operator's change, and log it in the same write. Raises the errors of ``Edit`` and the database."""

        now_s = self.objects.now_s()

        def work(document: Tenancy, lives: Lives) -> T:
            edit = Edit(document, lives, self.declared, operator, now_s)
            result = change(edit)
            for number, one in enumerate(edit.changes):  # of one moment, so the ids tell their order
                one.id = f"change_{number:02}{secrets.token_hex(12)}"
            document.log = edit.changes
            return result

        return await self._commit(work)

    async def _commit(self, work: Callable[[Tenancy, Lives], T], *, lives_alone: bool = False) -> T:
        """Replace the document and the lives by what ``work`` makes of them, and tell of it.

        Others' changes in between are kept. ``lives_alone``: the document stays as it is.
        """
        async with self._one_at_a_time:
            return await self._committed(work, lives_alone)

    async def _committed(self, work: Callable[[Tenancy, Lives], T], lives_alone: bool) -> T:
        if self._document is None:
            await self._look(self.objects)
        for _ in range(ATTEMPTS):
            data, raw = await self.objects.get(*_DOCUMENT), await self.objects.get(*_LIVES)
            # If the database has lost it, what is known here is written again.
            document = msgspec.json.decode(msgspec.json.encode(self.document) if data is None else data, type=Tenancy)
            lives = msgspec.json.decode(msgspec.json.encode(self._lives) if raw is None else raw, type=Lives)
            if raw is None and data is not None:
                await self._recall(document, lives)
            note_lives(self.declared, document, lives)
            if not lives_alone:
                for entry in document.log:  # of the change before: `work` replaces them
                    await self._keep(entry)
                document.had_tenants = True
            result = work(document, lives)
            lives.bound(document.tenants.keys() | self.declared.by_name.keys())
            # The lives first: what the document has of a new tenant is not in force before they are known.
            done = await self._replace(_LIVES, raw, msgspec.json.encode(lives))
            if done and not lives_alone:
                done = await self._replace(_DOCUMENT, data, msgspec.json.encode(document))
            if done:
                self._use(document, lives)
                with suppress(WarmpathError):  # it is in force: others read all of it regularly
                    await self._tell()
                return result
        raise Overloaded("Others change tenants and keys at once; send the request again.", retry_after_s=1)

    async def _recall(self, document: Tenancy, lives: Lives) -> None:
        """An earlier release wrote no lives: what it removed has had one all the same."""
        there = document.tenants.keys() | self.declared.by_name.keys()
        for entry in await self.log(_WHOLE_LOG):
            if entry.action == "tenant.removed" and entry.tenant not in there:
                lives.keep(entry.tenant, lives.first, entry.at_s)

    async def _replace(self, place: tuple[str, str, str], old: bytes | None, new: bytes) -> bool:
        """Write a row if it is still as it was read; return whether it is written."""
        if old == new:
            return True
        if old is None:
            return await self.objects.insert(*place, new, self.objects.now_s() + _FOREVER_S)
        return await self.objects.change(*place, lambda now: new if now == old else None)

    async def _tell(self) -> None:
        version = secrets.token_bytes(8)
        place = _TENANT, _KIND, "version"
        if not await self.objects.change(*place, lambda _: version):
            await self.objects.insert(*place, version, self.objects.now_s() + _FOREVER_S)

    async def _keep(self, entry: TenancyChange) -> None:
        at = datetime.fromtimestamp(entry.at_s, UTC)
        expires_s = (at + KEPT).timestamp()
        await self.objects.insert(_TENANT, f"{_LOG} {at:%Y-%m}", entry.id, msgspec.json.encode(entry), expires_s)

    async def log(self, most: int, after: str | None = None) -> list[TenancyChange]:
        """Return the newest changes, or those before the one with the id ``after``, the newest first.

        Raises the errors of the database.
        """
        now = datetime.fromtimestamp(self.objects.now_s(), UTC)
        data = await self.objects.get(_TENANT, _KIND, "document")
        entries = {one.id: one for one in (msgspec.json.decode(data, type=Tenancy).log if data is not None else ())}
        month, listed = now, list[TenancyChange]()
        while month >= (now - KEPT).replace(day=1) and len(listed) < most:
            for raw in await self.objects.all(_TENANT, f"{_LOG} {month:%Y-%m}"):
                entry = msgspec.json.decode(raw, type=TenancyChange)
                entries[entry.id] = entry
            listed = sorted(entries.values(), key=lambda one: (one.at_s, one.id), reverse=True)
            if after is not None:
                at = next((number for number, one in enumerate(listed) if one.id == after), len(listed))
                listed = listed[at + 1 :]
            month = month.replace(day=1) - timedelta(days=1)
        return listed[:most]
