"""A prefix gets one more holder when waiting costs more than a copy, at most ``max_holders``, and ties keep to one."""

from collections import Counter
from random import Random

import pytest

from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision
from tests.router.cores import ask, core_of, decided

PREFIX = Random(1).randbytes(16 * 128)
"""2,048 tokens. A copy at 10,000 tokens/s takes as long as computing 205 of them, and is priced as 287."""


class Cluster:
    """Replicas that compute 1,000 tokens/s, queue only what is reported, and hold every prefix sent to them."""

    def __init__(self, replicas: int = 6, pull_rate: float = 10_000.0, **scoring: object) -> None:
        self.names = "abcdef"[:replicas]
        self.core = core_of(self.names, scoring={"shortest_first": False, **scoring})
        self.pull_rate = pull_rate
        for name in self.names:
            self.report(name, 0)
        self.sent = 0

    def report(self, name: str, queued: int) -> None:
        report = LoadReport(queued, 0, 1 if queued else 0, 0, 0, 1000.0, pull_tokens_per_s=self.pull_rate)
        self.core.apply(name, [report])

    def send(self, new_tokens: int = 100) -> Decision:
        """Send one request that ends before the next one begins."""
        self.sent += 1
        chain = PREFIX + Random(self.sent + 1000).randbytes(16 * (new_tokens // 16))
        self.core.release(decision := decided(self.core, ask(self.sent, chain, 2048 + new_tokens)))
        self.core.apply(decision.replica_id, [BlocksStored(PREFIX)])
        return decision

    def holders(self) -> set[str]:
        return {name for name in self.names if self.core.directory.blocks_held(name)}


@pytest.mark.parametrize(
    ("queued", "pull_rate", "pulled"),
    [
        pytest.param(280, 10_000.0, None, id="a copy costs more than the wait"),
        pytest.param(300, 10_000.0, 2048, id="a copy costs less"),
        pytest.param(1900, 0.0, None, id="without copies the prefix would be computed"),
        pytest.param(2200, 0.0, 0, id="which costs less than a longer wait"),
    ],
)
def test_a_prefix_gets_one_more_holder_when_waiting_costs_more(
    queued: int, pull_rate: float, pulled: int | None
) -> None:
    """Only load decides, however many requests there are. (docs: routing)"""
    cluster = Cluster(pull_rate=pull_rate)
    first = cluster.send().replica_id
    assert {cluster.send().replica_id for _ in range(200)} == {first}
    cluster.report(first, queued)
    decision = cluster.send()
    assert (decision.replica_id != first, decision.pull_tokens) == (pulled is not None, pulled or 0)
    assert decision.pull_from == (first if pulled else "")
    assert decision.reason == ("cached" if pulled is None else "load_spill")


def test_when_load_falls_one_holder_keeps_all_the_work() -> None:
    """The others' copies become the oldest blocks of their caches."""
    cluster = Cluster()
    for _ in range(3):
        cluster.report(cluster.send().replica_id, 50_000)
    assert len(cluster.holders()) == 3
    for name in cluster.names:
        cluster.report(name, 0)
    assert len(Counter(cluster.send().replica_id for _ in range(50))) == 1


def test_holders_are_bounded_whatever_the_load() -> None:
    """Queues at the holders do not exceed max_holders; a full holder does."""
    cluster = Cluster(max_holders=2)
    for _ in range(20):
        cluster.report(cluster.send().replica_id, 100_000)
    held = cluster.holders()
    assert len(held) == 2
    for name in held:
        cluster.core.apply(name, [LoadReport(0, 0, 4, 4, 4, 1000.0, pull_tokens_per_s=10_000.0)])
    assert cluster.send().replica_id not in held
