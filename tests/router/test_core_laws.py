"""Open decisions under any sequence of operations, with a naive list as oracle."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.load import RESERVATION_TTL_S
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import Decision
from router.settings import RouterSettings
from tests.router.cores import CHAIN, ask, core_of, load

SIZE = RouterSettings().block_size
BLOCKS = 6
KEYS = (b"k" * 16, b"l" * 16)
CHAINS = tuple(
    CHAIN[: HASH_BYTES * shared] + bytes([shared + 1]) * HASH_BYTES * (BLOCKS - shared) for shared in (0, 2, 5, BLOCKS)
)
"""Prompts of six blocks, with 0, 2, 5 or all six in common."""
NAMES = "abc"


@dataclass
class Open:
    """A decision that was neither released nor sent back, and is not too old."""

    decision: Decision
    key: bytes
    chain: bytes
    made_s: float
    reported: bool = False
    pending: bool = True


@dataclass
class Naive:
    """All open decisions, the oldest first."""

    rows: list[Open] = field(default_factory=list)

    def pending(self, key: bytes, chain: bytes, dead: tuple[str, ...]) -> dict[str, int]:
        """Return the tokens in flight by replica, by the last four decisions of a key."""
        found: dict[str, int] = {}
        for row in [row for row in self.rows if row.key == key and row.pending]:
            blocks = 0
            while (
                chain[:1]
                and blocks < BLOCKS
                and row.chain[: (blocks + 1) * HASH_BYTES] == chain[: (blocks + 1) * HASH_BYTES]
            ):
                blocks += 1
            if blocks and row.decision.replica_id not in dead:
                found[row.decision.replica_id] = max(found.get(row.decision.replica_id, 0), blocks * SIZE)
        return found

    def remove(self, decision: Decision) -> None:
        self.rows = [row for row in self.rows if row.decision != decision]


NUMBERS = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(KEYS), st.sampled_from(CHAINS), st.sampled_from(["", "a", "b"])),
        st.tuples(st.sampled_from(["release", "reroute", "report"]), NUMBERS),
        st.tuples(st.just("drop"), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, RESERVATION_TTL_S / 2, RESERVATION_TTL_S])),
    ),
    max_size=14,
)


@settings(max_examples=150)
@given(STEPS)
def test_what_is_in_flight_is_what_the_open_decisions_compute(steps: list[tuple[Any, ...]]) -> None:
    """Released, returned and old ones, those of lost replicas, and those of replicas that the caller saw die are not.

    Each ends once, and a repeated end changes nothing.
    """
    now_s, made, naive = 0.0, list[Decision](), Naive()
    core = core_of(NAMES, clock=lambda: now_s)
    for kind, *how in steps:
        if kind == "ask":
            key, chain, dead = how
            asked = ask(chain=chain, tokens=BLOCKS * SIZE + 5, key=key, dead=tuple(dead), avoid=tuple(dead))
            naive.rows = [row for row in naive.rows if now_s - row.made_s < RESERVATION_TTL_S]
            decision = core.decide(asked)
            assert decision is not None
            assert dead != decision.replica_id
            made.append(decision)
            naive.rows.append(Open(decision, key, chain, now_s))
            for row in [row for row in naive.rows if row.key == key and row.pending][:-4]:
                row.pending = False
        elif kind == "wait":
            now_s += how[0]
        elif kind == "drop":
            core.drop_replica(how[0])
            core.update_replicas(NAMES)
            naive.rows = [row for row in naive.rows if row.decision.replica_id != how[0]]
        elif made:
            decision = made[how[0] % len(made)]
            if kind == "report":
                core.reported(decision)
                for row in naive.rows:
                    row.reported |= row.decision == decision
            else:
                core.release(decision) if kind == "release" else core.rerouted(decision, load())
                naive.remove(decision)
        naive.rows = [row for row in naive.rows if now_s - row.made_s < RESERVATION_TTL_S]
        for key in KEYS:
            for dead in ((), ("a",), ("b", "c")):
                asked = ask(chain=CHAINS[2], tokens=BLOCKS * SIZE + 5, key=key, dead=dead)
                told = {row["replica_id"]: row for row in core.explain(asked, ["estimated_ttft"])["replicas"]}
                in_flight = {name: row["in_flight_tokens"] for name, row in told.items() if row["in_flight_tokens"]}
                assert in_flight == naive.pending(key, CHAINS[2], dead)
        assert core.state()["open_reservations"] == len(naive.rows)
        for name in NAMES:
            waiting = [row for row in naive.rows if row.decision.replica_id == name and not row.reported]
            assert len(core.loads.replicas[name].unreported) == len(waiting)


@given(st.sampled_from(KEYS), st.integers(0, 3), st.booleans())
def test_a_replica_that_the_caller_saw_die_is_as_good_as_empty(key: bytes, which: int, held: bool) -> None:
    """The router may learn of it later: neither its blocks nor what it computes count, in estimates or pulls."""
    chain, decisions = CHAINS[which], []
    for known in (True, False):
        core = core_of("ab", {"a": chain} if known and held else None)
        if known:
            first = core.decide(ask(chain=chain, key=key), ("b",))
            assert first is not None and first.replica_id == "a"
            core.reported(first)
        decisions.append(core.decide(ask(1, chain=chain, key=key, dead=("a",))))
    one, other = decisions
    assert one is not None and other is not None
    assert (one.best_cached_tokens, one.selected_cached_tokens, one.pull_from, one.estimated_ttft_s, one.reason) == (
        other.best_cached_tokens, other.selected_cached_tokens, other.pull_from, other.estimated_ttft_s, other.reason,
    )  # fmt: skip
