"""A tenant's stored responses: a kind of object, of which the oldest leave a tenant that has too many."""

import logging
from typing import Any

import msgspec

from serve_app.errors import RequestTooLarge, ResponseDamaged
from serve_app.fairness.queue import FairWorkers
from serve_app.stored.database import RESPONSES, Database, ObjectPlace, StorageLimits
from serve_app.stored.sealed import Sealed, opened, sealed

logger = logging.getLogger(__name__)

SLACK = 16
"""A tenant over its limit is reduced to a sixteenth below it, and each ingress stores a sixteenth of the free bytes
before it checks again. So later responses do not all cost a check or evict others."""


class Document(msgspec.Struct):
    """A stored response as sent to clients. ``input``: the items of the whole conversation before it."""

    input: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseRows:
    """Responses in a database, by owner and id: ``max_bytes`` of each owner, for ``ttl_s``."""

    def __init__(self, database: Database, limits: StorageLimits) -> None:
        self._database = database
        self._limits = limits
        self._room: dict[bytes, int] = {}
        """By owner: bytes to store before its slow sum is computed again."""

    def put(self, owner: bytes, name: bytes, data: bytes) -> None:
        """Store a response durably. A repeated call has no effect. The oldest others of an owner over its limit go."""
        at, most_bytes = ObjectPlace(owner, RESPONSES, name), self._limits.max_bytes
        self._database.insert(at, data, self._limits.now_s() + self._limits.ttl_s)
        self._room[owner] = self._room.get(owner, 0) - len(data)
        if self._room[owner] >= 0:
            return
        while (taken := self._database.taken(at)) > most_bytes:
            if not self._database.evict(at, most_bytes - most_bytes // SLACK):
                break  # the owner has no other responses
        self._room[owner] = (most_bytes - taken) // SLACK

    def get(self, owner: bytes, name: bytes) -> bytes | None:
        """Return the data of a response, or None if it does not exist."""
        return self._database.find(ObjectPlace(owner, RESPONSES, name))

    def delete(self, owner: bytes, name: bytes) -> bool:
        """Remove a response, and return whether it existed."""
        return self._database.remove(ObjectPlace(owner, RESPONSES, name))


class StoredResponses(Sealed):
    """All tenants' responses. A lookup needs tenant and id, so another tenant's id does not exist."""

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        super().__init__(database, secret, workers, bounds)
        self._rows = ResponseRows(database, bounds)

    async def put(self, tenant: str, document: Document) -> None:
        """Store a response durably. Raises Overloaded, and RequestTooLarge for one over the limit."""

        def put() -> None:
            owner, name, key = self._names(tenant, document.response["id"])
            data = sealed(key, msgspec.json.encode(document))
            if len(data) > self._bounds.max_bytes:
                raise RequestTooLarge("The response exceeds the storage limit of a tenant; send store: false.")
            self._rows.put(owner, name, data)

        await self._run(tenant, put)

    async def get(self, tenant: str, response_id: str) -> tuple[Document, int] | None:
        """Return a response and its size in bytes as JSON, or None if it does not exist.

        Raises Overloaded and ResponseDamaged.
        """

        def get() -> tuple[Document, int] | None:
            owner, name, key = self._names(tenant, response_id)
            data = self._rows.get(owner, name)
            if data is None:
                return None
            try:
                plain = opened(key, data)
                document = msgspec.json.decode(plain, type=Document)
            except (ValueError, msgspec.MsgspecError) as error:
                logger.error("a stored response is damaged: %s", error)
                message = "This stored response is damaged; delete it, and send the whole conversation as input."
                raise ResponseDamaged(message) from error
            return document, len(plain)

        return await self._run(tenant, get)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response, and return whether it existed. Raises Overloaded."""
        return await self._run(tenant, lambda: self._rows.delete(*self._names(tenant, response_id)[:2]))

    def _names(self, tenant: str, response_id: str) -> tuple[bytes, bytes, bytes]:
        """Return the database names of a tenant and its response, and the key of only this response."""
        own = tenant, response_id
        derived = self._derived
        return derived("tenant", tenant), derived("response", *own), derived("key", *own)
