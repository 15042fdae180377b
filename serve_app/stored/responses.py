"""A tenant's stored responses, sealed: without the secret, a database reveals no texts, tenants or ids."""

import asyncio
import hmac
import logging
import os
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serve_app.errors import Overloaded, RequestTooLarge, ResponseDamaged
from serve_app.fairness.workers import QUANTUM_BYTES, FairWorkers
from serve_app.stored.databases import Database, StorageLimits

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 15.0
"""The longest that a request waits for the database."""
_NONCE_BYTES = 12


class Document(msgspec.Struct):
    """A stored response as sent to clients. ``input``: the items of the whole conversation before it."""

    input: list[dict[str, Any]]
    response: dict[str, Any]


class StoredResponses:
    """All tenants' responses. A lookup needs tenant and id, so another tenant's id does not exist."""

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        self._database = database
        self._secret = secret
        self._workers = workers
        self._bounds = bounds

    async def put(self, tenant: str, document: Document) -> None:
        """Store a response durably. Raises Overloaded, and RequestTooLarge for one over the limit."""

        def put() -> None:
            nonce, (owner, name, cipher) = os.urandom(_NONCE_BYTES), self._place(tenant, document.response["id"])
            data = nonce + cipher.encrypt(nonce, zlib.compress(msgspec.json.encode(document), 1), None)
            if len(data) > self._bounds.max_bytes:
                raise RequestTooLarge("The response exceeds the storage limit of a tenant; send store: false.")
            self._database.put(owner, name, data)

        await self._run(tenant, put)

    async def get(self, tenant: str, response_id: str) -> tuple[Document, int] | None:
        """Return a response and its size in bytes as JSON, or None if it does not exist.

        Raises Overloaded and ResponseDamaged.
        """

        def get() -> tuple[Document, int] | None:
            owner, name, cipher = self._place(tenant, response_id)
            data = self._database.get(owner, name)
            if data is None:
                return None
            try:
                plain = zlib.decompress(cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None))
                document = msgspec.json.decode(plain, type=Document)
            except (InvalidTag, ValueError, zlib.error, msgspec.MsgspecError) as error:
                logger.error("a stored response is damaged: %r", error)
                message = "This stored response is damaged; delete it, and send the whole conversation as input."
                raise ResponseDamaged(message) from error
            old = document.response["created_at"] < self._bounds.now_s() - self._bounds.ttl_s
            return None if old else (document, len(plain))

        return await self._run(tenant, get)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response, and return whether it existed. Raises Overloaded."""
        return await self._run(tenant, lambda: self._database.delete(*self._place(tenant, response_id)[:2]))

    def _place(self, tenant: str, response_id: str) -> tuple[bytes, bytes, AESGCM]:
        """Return the database names of a tenant and its response, and the cipher of only this response."""

        def derived(*fields: str) -> bytes:  # only the last field may hold a NUL
            message = "\0".join(("stored responses", *fields)).encode("utf-8", "surrogatepass")
            return hmac.digest(self._secret, message, "sha256")

        own = tenant, response_id
        return derived("tenant", tenant), derived("response", *own), AESGCM(derived("key", *own))

    async def _run(self, tenant: str, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._workers.run(tenant, QUANTUM_BYTES, work)
        except self._database.failures as error:  # includes OSError, and therefore TimeoutError
            if remedy := self._database.remedy(error):
                logger.exception("no responses are stored: %s", remedy)
                message = "The storage of responses is damaged; send store: false until its operator has replaced it."
                raise Overloaded(message, code="response_store_damaged") from error
            logger.exception("stored responses cannot be reached")
            message = "Stored responses cannot be reached now; send the request again later, or with store: false."
            raise Overloaded(message, code="response_store_unavailable", retry_after_s=5) from error
