"""Pulls: priced in prefill tokens, planned only if copying beats computing."""

from random import Random

import pytest

from router.candidates import RoutingView, plan_pull, work_tokens
from router.core import RoutingCore
from router.load import PULL_PRICE, LoadTable
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import RoutedRequest
from router.settings import PolicySettings
from tests.router import cores
from tests.router.cores import CHAIN, ask, core_of, decided

PULLING = PolicySettings(min_pull_tokens=100)
REQUEST = RoutedRequest("q", b"", 1000, b"k" * 16)


PRICED = 10_000.0 * PULL_PRICE
"""Tokens/s of a pull of which each costs a tenth of one computed at 1,000 tokens/s."""


def load(queued: int, pull_rate: float = PRICED) -> LoadReport:
    return cores.load(queued, 0, int(queued > 0), pull_tokens_per_s=pull_rate)


def pulling(policy: str, chain: bytes) -> RoutingCore:
    """Return a router of a busy holder and an idle replica."""
    scoring = {"min_pull_tokens": 100}
    return core_of({"b": load(90_000), "a": load(0)}, {"b": chain}, policy=policy, scoring=scoring)


def loads_of(pull_rate: float = PRICED, **queued: int) -> LoadTable:
    """Return replicas that compute 1,000 tokens/s and pull at a tenth of the cost."""
    loads = LoadTable("me")
    for name, tokens in queued.items():
        loads.add_replica(name)
        loads.report(name, load(tokens, pull_rate), 0.0)
    return loads


def view_of(match: dict[str, int], loads: LoadTable) -> RoutingView:
    return RoutingView(REQUEST, match, loads, 1, Random(0), PULLING)


@pytest.mark.parametrize(
    ("match", "pull_rate", "expected"),
    [
        pytest.param({"b": 600}, PRICED, [460, 400, 460], id="600 pulled tokens weigh as 60 computed ones"),
        pytest.param({"b": 600}, PRICED / 3, [580, 400, 580], id="at a third of the rate three times as much"),
        pytest.param({"b": 600}, 10_000.0, [400 + 60 * PULL_PRICE, 400, 400 + 60 * PULL_PRICE], id="more by the price"),
        pytest.param({"b": 600}, 1001.0, [1000, 400, 1000], id="never more than computing"),
        pytest.param({"b": 600, "c": 300}, PRICED, [460, 400, 430], id="a holder of a part pulls the rest"),
        pytest.param({"b": 600, "c": 501}, PRICED, [460, 400, 499], id="a short pull is not worth its set-up"),
        pytest.param({"b": 600}, 900.0, [1000, 400, 1000], id="a link slower than computing"),
    ],
)
def test_the_work_that_is_left(match: dict[str, int], pull_rate: float, expected: list[float]) -> None:
    loads = loads_of(pull_rate, a=0, b=0, c=0)
    assert work_tokens(view_of(match, loads)).tolist() == pytest.approx(expected)
    assert (plan_pull(view_of(match, loads), "a", 0) == ("", 0)) == (pull_rate < 1000.0)


def test_tokens_below_the_pool_cost_their_load() -> None:
    """600 tokens at ten times the rate of computing weigh as 60; a load that was never measured costs nothing."""
    loads = loads_of(a=0, b=0)
    loads.report("b", cores.load(0, 0, 0, tier_tokens_per_s=10_000.0), 1.0)
    assert loads.num_loading == 1
    view = view_of({"b": 600}, loads)._replace(loaded={"b": 600, "a": 600})
    assert work_tokens(view)[1] == pytest.approx(460)
    assert work_tokens(view._replace(loaded={"b": 200}))[1] == pytest.approx(420)
    loads.report("b", cores.load(0, 0, 0, tier_tokens_per_s=1.0), 2.0)
    assert work_tokens(view)[1] == pytest.approx(1000), "never more than computing"
    loads.remove_replica("b")
    assert loads.num_loading == 0


def test_a_prefix_in_the_pool_is_preferred_to_one_below_it() -> None:
    core = core_of("ab", {"b": CHAIN})
    core.apply("a", [BlocksStored(CHAIN, "host")])
    for name in "ab":
        core.apply(name, [cores.load(0, 0, 0, tier_tokens_per_s=5_000.0)])
    assert {decided(core, ask(number)).replica_id for number in range(4)} == {"b"}
    told = core.explain(ask(9), ["estimated_ttft"])["replicas"]
    assert {row["replica_id"]: row["cached_tokens_by_tier"] for row in told}["a"]["host"] > 0


def test_each_replica_pulls_at_the_rate_it_reports() -> None:
    """Rates differ; a replica with no valid rate pulls nothing; a departed one is forgotten."""
    loads = LoadTable("me")
    rates = {"fast": 2 * PRICED, "slow": PRICED / 5, "silent": 0.0, "nonsense": float("nan"), "holder": -1.0}
    for name, rate in rates.items():
        loads.add_replica(name)
        loads.report(name, load(0, rate), 0.0)
    left = work_tokens(view_of({"holder": 600}, loads)).tolist()
    assert left == pytest.approx([430, 700, 1000, 1000, 400])
    assert loads.num_pulling == 2
    loads.remove_replica("fast")
    assert loads.num_pulling == 1
    assert loads_of(0.0, a=0).num_pulling == 0


def test_the_holder_with_the_least_work_is_asked() -> None:
    """Of equal holders the idle one exports its KV; departed replicas and holders of less are not asked."""
    loads = loads_of(a=0, b=5000, c=10, d=0)
    view = view_of({"a": 100, "b": 600, "c": 600, "d": 400, "gone": 500}, loads)
    assert plan_pull(view, "a", 100) == ("c", 600)
    assert plan_pull(view_of({"b": 600}, loads), "a", 550) == ("", 0)
    assert plan_pull(view_of({"gone": 600}, loads), "a", 0) == ("", 0)


@pytest.mark.parametrize("policy", ["estimated_ttft", "round_robin"])
def test_a_decision_names_the_holder_and_reserves_the_remaining_work(policy: str) -> None:
    """A pull from a busy holder reserves only the remaining prefill; a request that stores nothing reserves all of it.

    Such a request pulls nothing, and the next one with its prefix does not follow it. (docs: routing, caching)
    """
    chain = Random(0).randbytes(16 * 50)
    core = pulling(policy, chain)
    decision = next(d for n in range(2) if (d := decided(core, ask(n, chain, 1000))).replica_id == "a")
    assert (decision.pull_from, decision.pull_tokens, decision.selected_cached_tokens) == ("b", 800, 0)
    assert core.loads.queue_ahead("a") in (200, 400)
    core = pulling(policy, chain)
    for number in range(2):
        assert not decided(core, ask(number, chain, 1000, store_kv=False)).pull_from
    if policy == "estimated_ttft":
        other = Random(1).randbytes(16 * 50)
        sent = [decided(core, ask(n, other, 1000, store_kv=stores)) for n, stores in enumerate((False, True, True))]
        assert [decision.reason == "in_flight" for decision in sent] == [False, False, True]
