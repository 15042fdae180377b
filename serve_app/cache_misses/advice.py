"""Advice to a client after a miss, once a session: the rule or setting that would have kept its prefix."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.api.agent_rules import keeping
from serve_app.cache_misses.reasons import Miss
from serve_app.cache_misses.rules import CAUSES, REMEDIES

MAX_SESSIONS = 256
"""Of a tenant, at one ingress. The one with the oldest miss is advised again."""
_PARTS = {"system": "in the system prompt", "messages": "in the messages"}


def advice_on(miss: Miss, rules_off: Sequence[str]) -> str:
    """Return one ASCII line without text of prompts, "" if the client can do nothing. ``rules_off``: see requests."""
    if miss.reason not in CAUSES:
        return ""
    difference = miss.first_difference
    where = f" {_PARTS[difference.part]}, line {difference.line}" if difference is not None else ""
    lost = f"{CAUSES[miss.reason]}{where}, so {miss.lost_tokens} tokens were computed again."
    rule = f" {keeping(rules_off)}" if rules_off and difference is not None else ""
    return f"{lost}{rule} {REMEDIES[miss.reason]}"


@dataclass(eq=False)
class _Room:
    """One tenant's: what was noted, and what waits for an answer, by session."""

    noted: OrderedDict[tuple[str, str], None] = field(default_factory=OrderedDict)
    waiting: dict[str, list[str]] = field(default_factory=dict)


class AdviceBook:
    """Advice that sessions had or wait for. ``tenants``: their number, which bounds the memory.

    Requests that name no session have the session "": together they get one advice for each reason.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._rooms: OrderedDict[str, _Room] = OrderedDict()

    def note(self, tenant: str, session: str, reason: str, advice: str) -> bool:
        """Keep advice for the session's next answer, and return True, unless it had some."""
        room = self._rooms.setdefault(tenant, _Room())
        self._rooms.move_to_end(tenant)
        while len(self._rooms) > max(1, self._tenants()):  # tenants no longer configured
            self._rooms.popitem(last=False)
        key = session, "" if session else reason
        first = key not in room.noted
        room.noted[key] = None
        room.noted.move_to_end(key)
        if first:
            room.waiting.setdefault(session, []).append(advice)
        if len(room.noted) > MAX_SESSIONS:
            (oldest, _), _ = room.noted.popitem(last=False)
            if oldest:
                room.waiting.pop(oldest, None)
        return first

    def take(self, tenant: str, session: str) -> str:
        """Return the advice that waits for a session's answer, "" for none."""
        room = self._rooms.get(tenant)
        waiting = room.waiting.get(session) if room is not None else None
        return waiting.pop(0) if waiting else ""
