"""One contract for every policy, then the purpose of each policy, and the bound on holders."""

from collections import Counter
from math import exp
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidates import SHARED_PREFILL, Candidate, RoutingView, estimate
from router.load import LoadTable
from router.policies import POLICIES
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision, Reason, RoutedRequest
from router.settings import DEFAULT_POLICY, POLICY_NAMES, PolicySettings
from tests.router.cores import ask, core_of, decided

NAMES = [f"replica-{number}" for number in range(6)]


def request(prompt_tokens: int = 1000, key: bytes = b"k" * 16, avoid: tuple[str, ...] = ()) -> RoutedRequest:
    return RoutedRequest("q", b"", prompt_tokens, key, avoid=avoid)


def loads_of(*rows: tuple[int, int, int], rate: float = 1000.0) -> LoadTable:
    """Rows are (queued tokens, running, waiting); a replica with 16 waiting sequences is full."""
    loads = LoadTable("me")
    for name, (queued, running, waiting) in zip(NAMES, rows, strict=False):
        loads.add_replica(name)
        loads.report(name, LoadReport(queued, running, waiting, 64, 16, rate), 0.0)
    return loads


def rank(
    policy: str,
    loads: LoadTable,
    match: dict[str, int] | None = None,
    asked: RoutedRequest | None = None,
    limit: int | None = None,
    **context: object,
) -> list[Candidate]:
    facts = {"turn": 1, "rng": Random(7), **context}
    view = RoutingView(asked or request(), match or {}, loads, **facts)  # type: ignore[arg-type]
    return POLICIES[policy].rank(view, limit)


def estimated_s(loads: LoadTable, held: int, settings: PolicySettings | None = None, in_flight: int = 0) -> float:
    scoring, pending = settings or PolicySettings(), {NAMES[0]: in_flight}
    view = RoutingView(request(), {NAMES[0]: held}, loads, 1, Random(7), scoring, pending=pending)
    return estimate(view, NAMES[0]).estimated_ttft_s


rows = st.lists(
    st.tuples(st.integers(0, 50_000), st.integers(0, 64), st.integers(0, 18)), min_size=0, max_size=len(NAMES)
)
matches = st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.integers(0, 2000), max_size=6)
some_names = st.lists(st.sampled_from([*NAMES, "gone"]), max_size=4)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60)
@given(
    rows=rows, match=matches, blocked=some_names, avoid=some_names, prompt=st.integers(0, 3000), turn=st.integers(0, 99)
)
def test_contract(
    policy: str,
    rows: list[tuple[int, int, int]],
    match: dict[str, int],
    blocked: list[str],
    avoid: list[str],
    prompt: int,
    turn: int,
) -> None:
    """A ranking permutes all eligible replicas and is reproducible; with limit 1 it is its first. (docs: routing)"""
    loads = loads_of(*rows)
    asked = request(prompt, avoid=tuple(avoid))
    context = {"turn": turn, "blocked": blocked}
    ranked = rank(policy, loads, match, asked, **context)
    names = [candidate.replica_id for candidate in ranked]
    open_names = {name for name in loads.replica_ids if not loads.is_full(name) and name not in blocked}
    assert set(names) == (open_names - set(avoid) or open_names)
    assert len(names) == len(set(names))
    assert all(candidate.reason in get_args(Reason) for candidate in ranked)
    assert all(candidate.score == candidate.score and abs(candidate.score) < 1e15 for candidate in ranked)
    assert ranked == rank(policy, loads, match, asked, **context)
    assert rank(policy, loads, match, asked, limit=1, **context) == ranked[:1]
    if len(ranked) == 1:
        assert ranked[0].reason == "only_replica"


@pytest.mark.parametrize("policy", ["estimated_ttft", "lmetric", "sglang"])
def test_cache_aware_policies_choose_the_holder_until_it_is_overloaded(policy: str) -> None:
    head = rank(policy, loads_of(*[(100, 2, 1)] * 4), {NAMES[2]: 900, NAMES[1]: 800})[0]
    assert (head.replica_id, head.reason) == (NAMES[2], "cached")
    head = rank(policy, loads_of((60_000, 64, 8), (0, 0, 0), (0, 0, 0)), {NAMES[0]: 600})[0]
    assert head.replica_id != NAMES[0]
    assert head.reason == "load_spill"


def test_policies_are_those_that_settings_name() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert DEFAULT_POLICY in POLICY_NAMES


def test_score_is_the_documented_formula() -> None:
    """The score equals (ahead + own x (1 + behind)) x seconds per token, computed term by term."""
    assert estimated_s(loads_of((5000, 0, 5)), 600, PolicySettings(shortest_first=False)) == pytest.approx(5.4)
    for jobs in (1, 5, 15):
        loads = loads_of((50_000, 10, jobs))
        own, queued = 400.0, 50_000.0
        x = own / (queued / jobs)
        ahead = queued * (1 - (1 + x) * exp(-x))
        behind = jobs * exp(-x)
        head = rank("estimated_ttft", loads, {NAMES[0]: 600})[0]
        assert head.score == pytest.approx((ahead + own * (1 + behind)) * 0.0011)
        assert estimated_s(loads, 600) == pytest.approx((ahead + own) * 0.0011)


def test_committed_tokens_are_ahead_of_everyone() -> None:
    """Even the shortest request waits for an uninterruptible prefill, and then delays nobody."""
    loads = LoadTable("me")
    loads.add_replica(NAMES[0])
    loads.report(NAMES[0], LoadReport(5000, 0, 1, 64, 16, 1000.0, committed_prefill_tokens=5000), 0.0)
    head = rank("estimated_ttft", loads, {NAMES[0]: 900})[0]
    assert head.score == pytest.approx(5.1)
    assert estimated_s(loads, 900) == pytest.approx(5.1)
    head = rank("estimated_ttft", loads, pending={NAMES[0]: 900})[0]
    assert head.score == pytest.approx(5.1 - SHARED_PREFILL * 0.9), "that prefill computes its own prefix"
    assert estimated_s(loads, 0, in_flight=900) == pytest.approx(5.1), "but it waits for all of it"
    loads.report(NAMES[0], LoadReport(9000, 0, 3, 64, 16, 1000.0, committed_prefill_tokens=5000), 0.0)
    x = 100 / 2000
    ahead, behind = 5000 + 4000 * (1 - (1 + x) * exp(-x)), 2 * exp(-x)
    head = rank("estimated_ttft", loads, {NAMES[0]: 900})[0]
    assert head.score == pytest.approx((ahead + 100 * (1 + behind)) / 1000)
    assert estimated_s(loads, 900) == pytest.approx((ahead + 100) / 1000)


def test_cold_prompts_are_placed_by_rendezvous_while_idle() -> None:
    """Idle replicas share cold keys evenly; losing a replica moves only its own keys; noise in rates moves none."""
    idle = [(0, 0, 0)] * 6
    keys = [Random(number).randbytes(16) for number in range(600)]
    noisy = LoadTable("other")
    for index, name in enumerate(reversed(NAMES)):
        noisy.add_replica(name)
        noisy.report(name, LoadReport(0, 0, 0, 64, 16, 1000.0 + index), 0.0)
    before = [rank("estimated_ttft", loads_of(*idle), {}, request(key=key), limit=1)[0] for key in keys]
    assert {candidate.reason for candidate in before} == {"cold"}
    spread = Counter(candidate.replica_id for candidate in before)
    assert len(spread) == 6
    assert max(spread.values()) < 150
    other = [rank("estimated_ttft", noisy, {}, request(key=key), limit=1)[0].replica_id for key in keys]
    assert other == [candidate.replica_id for candidate in before]
    gone = before[0].replica_id
    noisy.remove_replica(gone)
    after = [rank("estimated_ttft", noisy, {}, request(key=key), limit=1)[0].replica_id for key in keys]
    assert all(new == old or old == gone for new, old in zip(after, other, strict=True))


def test_rates_of_equal_hardware_leave_cold_prompts_where_they_are() -> None:
    """Neighbours slow some replicas; only what is faster than they explain attracts prompts, and queues still count."""
    keys = [Random(number).randbytes(16) for number in range(300)]

    def placed(*rates: float, queued: int = 0) -> list[str]:
        loads = LoadTable("me")
        for name, rate in zip(NAMES, rates, strict=False):
            loads.add_replica(name)
            loads.report(name, LoadReport(queued if name == NAMES[0] else 0, 0, 0, 64, 16, rate), 0.0)
        return [rank("estimated_ttft", loads, {}, request(key=key), limit=1)[0].replica_id for key in keys]

    assert placed(1000.0, 1300.0, 800.0, 1000.0) == placed(1000.0, 1000.0, 1000.0, 1000.0)
    assert set(placed(1000.0, 4000.0, 800.0, 1000.0)) == {NAMES[1]}
    assert NAMES[0] not in placed(1300.0, 1000.0, 800.0, 1000.0, queued=100)


@pytest.mark.parametrize(
    ("policy", "rows", "match", "tokens", "chosen"),
    [
        ("estimated_ttft", [(50_000, 0, 5), (0, 0, 0)], 9_990, 10_000, 0),  # short work overtakes a long queue
        ("estimated_ttft", [(50_000, 0, 5), (0, 0, 0)], 1_000, 10_000, 1),
        ("sglang", [(0, 5, 0), (0, 1, 0), (0, 3, 0)], 400, 1000, 1),  # below half a match the shortest queue wins
        ("sglang", [(0, 5, 0), (0, 1, 0), (0, 3, 0)], 600, 1000, 0),
        ("least_loaded", [(500, 0, 1), (0, 9, 0), (50, 0, 1)], 900, 1000, 1),
        ("round_robin", [(0, 0, 0)] * 6, 900, 1000, 1),
    ],
)
def test_the_first_choice(policy: str, rows: list[tuple[int, int, int]], match: int, tokens: int, chosen: int) -> None:
    """The first replica holds ``match`` tokens of the prompt."""
    head = rank(policy, loads_of(*rows), {NAMES[0]: match}, request(tokens))[0]
    assert head.replica_id == NAMES[chosen]


def test_power_of_two_takes_the_shorter_of_two_and_round_robin_turns() -> None:
    loads, rng = loads_of((0, 0, 9), *[(0, 0, 1)] * 5), Random(1)
    assert {rank("power_of_two", loads, rng=rng)[0].replica_id for _ in range(300)} == set(NAMES[1:])
    assert {rank("round_robin", loads, turn=turn)[0].replica_id for turn in range(6)} == set(NAMES)


def test_bounded_hash_spills_only_over_the_bound() -> None:
    home = rank("bounded_hash", loads_of(*[(0, 0, 1)] * 6))[0]
    assert home.reason == "placement"
    rows = [(0, 9 if name == home.replica_id else 1, 0) for name in NAMES]
    spilled = rank("bounded_hash", loads_of(*rows))[0]
    assert spilled.replica_id != home.replica_id
    assert spilled.reason == "load_spill"


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
        pytest.param(3900, 0.0, None, id="without copies the prefix would be computed again"),
        pytest.param(4200, 0.0, 0, id="which costs less than a wait twice as long"),
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


def test_a_prefix_in_demand_is_computed_again_as_soon_as_waiting_takes_longer() -> None:
    """Without copies. One that nobody else asks for now waits for its holder. (docs: routing)"""
    for wanted, holder_keeps_it in ((False, True), (True, False)):
        cluster = Cluster(pull_rate=0.0)
        first = cluster.send().replica_id
        if wanted:
            assert decided(cluster.core, ask(1, PREFIX, 2049)).replica_id == first
        cluster.report(first, 2200)
        assert (cluster.send().replica_id == first) == holder_keeps_it


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
