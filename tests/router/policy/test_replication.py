"""Hot prefixes get more holders before requests queue, but never too many, and no preference once demand falls."""

from collections import Counter
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.replication import PrefixDemand
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision
from tests.router.cores import ask, core_of, decided

PREFIX = Random(1).randbytes(16 * 128)
"""2,048 tokens."""


class Cluster:
    """Replicas that compute 1,000 tokens/s, never queue, and hold every prefix sent to them; one router, a clock."""

    def __init__(self, replicas: int = 6, pull_rate: float = 50_000.0, **scoring: object) -> None:
        self.now_s = 0.0
        self.names = "abcdef"[:replicas]
        self.core = core_of(self.names, clock=lambda: self.now_s, scoring={"min_pull_tokens": 1024, **scoring})
        for name in self.names:
            self.report(name, 0, pull_rate)
        self.sent = 0

    def report(self, name: str, queued: int, pull_rate: float = 50_000.0) -> None:
        report = LoadReport(queued, 0, 1 if queued else 0, 0, 0, 1000.0, pull_tokens_per_s=pull_rate)
        self.core.apply(name, [report])

    def send(self, prefix: bytes = PREFIX, new_tokens: int = 100) -> Decision:
        """Send one request that ends before the next one begins."""
        self.sent += 1
        chain = prefix + Random(self.sent + 1000).randbytes(16 * (new_tokens // 16))
        self.core.release(decision := decided(self.core, ask(self.sent, chain, len(prefix) + new_tokens)))
        self.core.apply(decision.replica_id, [BlocksStored(prefix)])
        return decision

    def holders(self) -> int:
        return sum(1 for name in self.names if self.core.directory.blocks_held(name))


@pytest.mark.parametrize(
    ("requests", "gap_s", "new_tokens", "pull_rate"),
    [
        pytest.param(20, 2.0, 32_000, 50_000.0, id="long requests: a second holder would be of no use to them"),
        pytest.param(300, 1.0, 100, 50_000.0, id="a tenth of a replica's time"),
        pytest.param(600, 1 / 30, 100, 0.0, id="a copy must be computed: only load decides"),
    ],
)
def test_a_prefix_keeps_its_one_holder(requests: int, gap_s: float, new_tokens: int, pull_rate: float) -> None:
    cluster = Cluster(pull_rate=pull_rate)
    for _ in range(requests):
        cluster.now_s += gap_s
        cluster.send(new_tokens=new_tokens)
    assert cluster.holders() == 1


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2), st.sampled_from([b"a", b"b"])), max_size=40))
def test_demand_is_a_decayed_sum(events: list[tuple[float, float, bytes]]) -> None:
    """It equals the sum over all events, and never rises by itself."""
    demand, now_s, seen = PrefixDemand(memory_s=3.0), 0.0, list[tuple[float, float, bytes]]()
    for gap_s, work_s, key in events:
        now_s += gap_s
        seen.append((now_s, work_s, key))
        expected = sum(work * exp((at - now_s) / 3.0) / 3.0 for at, work, k in seen if k == key)
        assert demand.add(key, work_s, now_s) == pytest.approx(expected)
    for key in (b"a", b"b", b"never"):
        assert demand.rate_with(key, 0.0, now_s + 1.0) <= demand.rate_with(key, 0.0, now_s)


def test_demand_is_bounded() -> None:
    """The key without events for longest is dropped first."""
    demand = PrefixDemand(max_keys=3)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        demand.add(key, 1.0, 0.0)
    assert len(demand._rates) == 3
    assert (demand.rate_with(b"b", 0.0, 0.0), demand.rate_with(b"a", 0.0, 0.0) > 0) == (0.0, True)


def test_a_prefix_in_demand_gets_holders_before_anything_queues() -> None:
    """Work for three replicas gets at least four holders, before any queue was reported. (docs: routing)

    When demand falls, one of them keeps all the work, so the others' copies become the oldest blocks of their caches.
    """
    cluster = Cluster()
    decisions = []
    for _ in range(1500):
        cluster.now_s += 1 / 30
        decisions.append(cluster.send())
    assert 4 <= cluster.holders() <= 6
    spread = [decision for decision in decisions if decision.reason == "hot_prefix"]
    assert len(spread) == cluster.holders() - 1
    assert all(decision.pull_from and decision.pull_tokens == 2048 for decision in spread)
    sent = Counter[str]()
    for _ in range(50):
        cluster.now_s += 10.0
        sent[cluster.send().replica_id] += 1
    assert len(sent) == 1


def test_holders_are_bounded_by_demand_and_by_load() -> None:
    """Neither demand nor queues at the holders exceed max_holders; a full holder does."""
    cluster = Cluster(max_holders=2)
    for _ in range(1500):
        cluster.now_s += 1 / 30
        cluster.send()
    assert cluster.holders() == 2
    for name in cluster.names:
        if cluster.core.directory.blocks_held(name):
            cluster.report(name, 100_000)
    held = {name for name in cluster.names if cluster.core.directory.blocks_held(name)}
    assert {cluster.send().replica_id for _ in range(20)} <= held
    for name in held:
        cluster.core.apply(name, [LoadReport(0, 0, 4, 4, 4, 1000.0, pull_tokens_per_s=50_000.0)])
    assert cluster.send().replica_id not in held


def test_a_hot_opening_of_many_conversations_moves_no_conversation() -> None:
    """Every conversation stays with its own holder: all holders share the opening, and each conversation is cool."""
    cluster = Cluster()
    home: dict[int, str] = {}
    for turn in range(2000):
        cluster.now_s += 1 / 30
        conversation = turn % 100
        decision = cluster.send(PREFIX + Random(conversation).randbytes(16 * 128))
        if turn >= 300:
            assert decision.replica_id == home.setdefault(conversation, decision.replica_id)
    assert len(set(home.values())) > 1


def test_a_long_prefix_is_counted_once_its_opening_is_in_demand() -> None:
    """A long prefix alone in demand gets its holders as a short one does; among many with its opening, only it does."""
    cluster = Cluster()
    long = PREFIX + Random(2).randbytes(16 * 384)
    for _ in range(600):
        cluster.now_s += 1 / 30
        cluster.send(long)
    assert cluster.holders() >= 3
    for conversation in range(40):
        cluster.now_s += 0.5
        cluster.send(PREFIX + Random(conversation + 50).randbytes(16 * 384))
    holders = {name for name in cluster.names if cluster.core.directory.match(long).get(name, 0) == 8192}
    assert len(holders) >= 3
