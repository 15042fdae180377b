"""Names and keys of what is stored follow from the secret: a database alone reveals no texts, tenants or ids."""

import asyncio
import hmac
import logging
import os
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serve_app.errors import Overloaded
from serve_app.fairness.queue import QUANTUM_BYTES, FairWorkers
from serve_app.stored.database import Database, StorageLimits

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_TIMEOUT_S = 15.0
"""The longest that a request waits for the database."""
_NONCE_BYTES = 12


def sealed(key: bytes, value: bytes, name: bytes | None = None) -> bytes:
    """Return what only ``opened`` with the same key and name reads."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, zlib.compress(value, 1), name)


def opened(key: bytes, data: bytes, name: bytes | None = None) -> bytes:
    """Return what was sealed. Raises ValueError for what is damaged, or of another key or name."""
    try:
        return zlib.decompress(AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], name))
    except (InvalidTag, zlib.error) as error:
        raise ValueError(repr(error)) from error


class Sealed:
    """What is stored under names and keys that follow from the secret. ``_what``: its name; ``_else``: a remedy."""

    _label = "stored responses"
    _what = "responses"
    _else = "send store: false"

    def __init__(self, database: Database, secret: bytes, workers: FairWorkers, bounds: StorageLimits) -> None:
        self._database = database
        self._secret = secret
        self._workers = workers
        self._bounds = bounds
        # Most calls derive the names of an owner and a kind again, on the loop that answers requests.
        self._derived = lru_cache(1024)(self._derive)

    def _derive(self, *fields: str) -> bytes:  # only the last field may hold a NUL
        message = "\0".join((self._label, *fields)).encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256")

    async def _run(self, tenant: str, work: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await self._workers.run(tenant, QUANTUM_BYTES, work)
        except self._database.failures as error:  # includes OSError, and therefore TimeoutError
            if remedy := self._database.remedy(error):
                logger.exception("no %s are stored: %s", self._what, remedy)
                message = f"The storage of {self._what} is damaged; {self._else} until its operator has replaced it."
                raise Overloaded(message, code="response_store_damaged") from error
            logger.exception("stored %s cannot be reached", self._what)
            message = f"Stored {self._what} cannot be reached now; send the request again later, or {self._else}."
            raise Overloaded(message, code="response_store_unavailable", retry_after_s=5) from error
