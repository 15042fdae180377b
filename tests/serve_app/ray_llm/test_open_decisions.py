"""Decisions without a first token: as many as a naive list has, by prompt, by age, and never more than the limit."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from router.protocol.request import Decision
from serve_app.ray_llm.open_decisions import DecisionKey, OpenDecisions

MOST, TTL_S = 5, 10.0
STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 6)), max_size=40)


def decision(number: int) -> Decision:
    return Decision("a", "me", number, 0, 0, "cold", 0.0, "", 0, None, 0.0)


@dataclass
class Naive:
    """All in one list, each with its time and key."""

    kept: list[tuple[float, DecisionKey, Decision]] = field(default_factory=list)

    def add(self, key: DecisionKey, one: Decision, now_s: float) -> list[Decision]:
        self.kept.append((now_s, key, one))
        first = max(0, len(self.kept) - MOST)
        dropped = [row for at, row in enumerate(self.kept) if at < first or now_s - row[0] >= TTL_S]
        self.kept = [row for row in self.kept if row not in dropped]
        return [row[2] for row in dropped]

    def take(self, key: DecisionKey) -> list[Decision]:
        taken = [row for row in self.kept if row[1] == key]
        self.kept = [row for row in self.kept if row[1] != key]
        return [row[2] for row in taken]


@given(STEPS)
def test_decisions_are_kept_until_they_begin_grow_old_or_are_too_many(steps: list[tuple[bool, str, str, int]]) -> None:
    """Many of them may be for one prompt."""
    decisions, naive, now_s = OpenDecisions(MOST, TTL_S), Naive(), 0.0
    for number, (adds, replica, prompt, pause) in enumerate(steps):
        now_s += pause
        key = replica, prompt.encode()
        if adds:
            assert decisions.add(key, decision(number), now_s) == naive.add(key, decision(number), now_s)
        else:
            assert list(decisions.of(key)) == [row[2] for row in naive.kept if row[1] == key]
            assert list(decisions.take(key)) == naive.take(key)
        assert len(decisions) == len(naive.kept) <= MOST
        assert {key: list(held.values()) for key, held in decisions._by_key.items()} == {
            key: [row[2] for row in naive.kept if row[1] == key] for _, key, _ in naive.kept
        }
