"""A router's decisions until their replica reports the first token, by prompt: equal prompts have equal keys."""

from collections import OrderedDict
from collections.abc import Collection

from router.protocol.request import Decision

DecisionKey = tuple[str, bytes]
"""A replica's id, and the ``request_key`` of a prompt."""


class OpenDecisions:
    """At most ``most`` decisions, each for at most ``ttl_s``: some never begin, as vLLM may refuse their requests."""

    def __init__(self, most: int, ttl_s: float) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._by_age: OrderedDict[int, tuple[float, DecisionKey]] = OrderedDict()
        self._by_key: dict[DecisionKey, dict[int, Decision]] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, key: DecisionKey, decision: Decision, now_s: float) -> list[Decision]:
        """Add a decision, and return those that are dropped for it, the oldest first."""
        self._by_age[decision.reservation] = now_s, key
        self._by_key.setdefault(key, {})[decision.reservation] = decision
        dropped = []
        while len(self._by_age) > self._most or now_s - self._oldest_s() >= self._ttl_s:
            number, (_, old) = self._by_age.popitem(last=False)
            decisions = self._by_key[old]
            dropped.append(decisions.pop(number))
            if not decisions:
                del self._by_key[old]
        return dropped

    def _oldest_s(self) -> float:
        return next(iter(self._by_age.values()))[0]

    def of(self, key: DecisionKey) -> Collection[Decision]:
        """Return a prompt's decisions."""
        return self._by_key.get(key, {}).values()

    def take(self, key: DecisionKey) -> Collection[Decision]:
        """Remove and return a prompt's decisions."""
        decisions = self._by_key.pop(key, {})
        for number in decisions:
            del self._by_age[number]
        return decisions.values()
