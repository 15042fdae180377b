"""The latest requests of each tenant at one ingress, refused ones too, for who looks later. No text of a prompt."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from serve_app.errors import LimitReason, remedy_of
from serve_app.live.tally import MAX_TENANTS
from serve_app.live.view import HIDDEN_FROM_TENANTS

RequestRow = dict[str, Any]

KEPT_REQUESTS = 64
"""The latest requests that are kept of each tenant."""


class Journal:
    """The latest requests of each tenant at one ingress. ``tenants``: the number of configured ones.

    A tenant's room does not depend on the others' requests. Not thread-safe.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._rooms: OrderedDict[str, deque[RequestRow]] = OrderedDict()

    def add(self, tenant: str, row: RequestRow) -> None:
        """Keep a request. ``row``: an event of the stream about it."""
        room = self._rooms.setdefault(tenant, deque(maxlen=KEPT_REQUESTS))
        self._rooms.move_to_end(tenant)
        room.append(row)
        while len(self._rooms) > min(MAX_TENANTS, max(1, self._tenants())):
            self._rooms.popitem(last=False)

    def refused(self, tenant: str, reason: LimitReason) -> None:
        """Keep a request that a limit refused."""
        self.add(tenant, {"type": "refusal", "at_s": round(time.time(), 3), **refusal_row(tenant, reason)})

    def of(self, tenant: str) -> list[RequestRow]:
        """Return a tenant's requests, oldest first."""
        return list(self._rooms.get(tenant, ()))


def latest(rows: Iterable[RequestRow], *, operator: bool) -> list[RequestRow]:
    """Return the requests of all ingresses, newest first, without what only operators may see."""
    hidden = frozenset() if operator else HIDDEN_FROM_TENANTS
    newest = sorted(rows, key=lambda row: -float(row["at_s"]))[:KEPT_REQUESTS]
    return [{name: value for name, value in row.items() if name not in hidden} for row in newest]


def refusal_row(tenant: str, reason: LimitReason) -> RequestRow:
    """Return a refused request as the fields of an event, with the remedy."""
    return {"tenant": tenant, **reason.shown(), "remedy": remedy_of(reason.limit)}
