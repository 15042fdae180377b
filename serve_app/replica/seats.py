"""Which replica has which worker, for all replicas of an application, in Ray's GCS. Every function waits for it.

A claim is renewed at each look. One that stays unchanged for ``LEASE_S`` is of a replica that died. Two replicas that
take such a claim at once both serve it for a moment, which harms nobody: the later write stays.
"""

import time
from collections.abc import Callable, Sequence

from serve_app.ray_compat import kv_delete, kv_get, kv_put

LEASE_S = 10.0
RENEW_S = 3.0


class Seats:
    """The claims of one replica."""

    def __init__(self, app_name: str, replica_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._app_name = app_name
        self._mine = replica_id.encode()
        self._clock = clock
        self._beat = 0
        self._renewed_s = float("-inf")
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Others' claims as last seen, and since when they are unchanged, by this process's clock."""

    def take(self, urls: Sequence[str], mine: str) -> str:
        """Return the URL that this replica has now: ``mine`` as long as it is listed, else a free one, else ""."""
        if mine:
            if mine in urls and self._renewed(mine):
                return mine
            if self._owner(mine) == self._mine:
                kv_delete(self._key(mine))
        now_s = self._clock()
        for url in urls:
            claim = kv_get(self._key(url))
            if claim is not None:
                before, since_s = self._seen.get(url, (b"", now_s))
                since_s = since_s if before == claim else now_s
                self._seen[url] = claim, since_s
                if now_s - since_s < LEASE_S and not claim.startswith(self._mine + b"\0"):
                    continue
                kv_delete(self._key(url))
            if kv_put(self._key(url), self._claim(), overwrite=False):
                self._renewed_s = now_s
                return url
        return ""

    def _renewed(self, url: str) -> bool:
        if self._clock() - self._renewed_s < RENEW_S:
            return True
        if self._owner(url) not in (self._mine, b""):  # this process stood still for longer than its lease
            return False
        kv_put(self._key(url), self._claim())
        self._renewed_s = self._clock()
        return True

    def _claim(self) -> bytes:
        self._beat += 1
        return self._mine + b"\0" + str(self._beat).encode()

    def _owner(self, url: str) -> bytes:
        return (kv_get(self._key(url)) or b"").partition(b"\0")[0]

    def _key(self, url: str) -> bytes:
        return f"{self._app_name}\0worker\0{url}".encode()
