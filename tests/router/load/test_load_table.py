"""LoadTable counts nothing twice, loses nothing, and survives nonsense."""

from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.load.load_table import LoadTable
from router.protocol.events import LoadReport


@pytest.fixture(autouse=True)
def _round_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.load.replica_load.DEFAULT_PREFILL_TOKENS_PER_S", 100.0)
    monkeypatch.setattr("router.load.load_table.RESERVATION_TTL_S", 10.0)


def table(*replicas: str) -> LoadTable:
    made = LoadTable("me")
    for name in replicas or ("a",):
        made.add_replica(name)
    return made


def report(queued: int = 0, running: int = 0, waiting: int = 0, rate: float = 0.0, **admitted: int) -> LoadReport:
    return LoadReport(queued, running, waiting, 8, 16, rate, admitted)


class ReplicaQueue:
    """The truth: a replica's queued tokens, by router, and those still in transit to it."""

    def __init__(self) -> None:
        self.on_the_way: dict[int, int] = {}
        self.mine: dict[int, int] = {}
        self.others = 0
        self.last = 0

    def report(self) -> LoadReport:
        return report(sum(self.mine.values()) + self.others, 0, len(self.mine), me=self.last, other=99)


@settings(max_examples=200)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["send", "arrive", "compute", "other", "report"]), st.integers(1, 1000)), max_size=60
    )
)
def test_queue_ahead_counts_everything_once(steps: list[tuple[str, int]]) -> None:
    """After a report, queue ahead = tokens queued at the replica + tokens in transit. (docs: routing)"""
    loads, truth = table(), ReplicaQueue()
    for action, tokens in steps:
        if action == "send":
            truth.on_the_way[loads.reserve("a", tokens, 0.0)] = tokens
        elif action == "arrive" and truth.on_the_way:
            number = min(truth.on_the_way)
            truth.mine[number] = truth.on_the_way.pop(number)
            truth.last = number
        elif action == "compute" and truth.mine:
            number = min(truth.mine)
            del truth.mine[number]
            loads.release(number)
        elif action == "other":
            truth.others = tokens
        elif action == "report":
            loads.report("a", truth.report(), 0.0)
            expected = sum(truth.mine.values()) + truth.others + sum(truth.on_the_way.values())
            assert loads.queue_ahead("a") == expected
            assert loads.waiting[0] == len(truth.mine) + len(truth.on_the_way)


def test_full_by_waiting_bound_and_by_own_reservations() -> None:
    loads = table("a", "b")
    loads.report("a", report(0, 0, 16), 0.0)
    assert loads.is_full("a")
    assert not loads.is_full("b")
    loads.report("a", report(0, 8, 13), 0.0)
    for _ in range(2):
        loads.reserve("a", 1, 0.0)
    assert not loads.is_full("a")
    number = loads.reserve("a", 1, 0.0)
    assert loads.is_full("a")
    assert loads.num_full == 1
    loads.release(number)
    assert loads.num_full == 0
    assert loads.is_full("unknown")


def test_sequences_with_committed_tokens_only_are_no_jobs_to_overtake() -> None:
    """Two of five waiting sequences have only committed tokens: three jobs share the other tokens."""
    loads = table()
    loads.report("a", LoadReport(900, 1, 5, 8, 16, 0.0, committed_prefill_tokens=300, committed_sequences=2), 0.0)
    assert (loads.committed_tokens[0], loads.overtakable_tokens[0], loads.falloff[0]) == (300, 600, -3 / 600)
    assert loads.waiting[0] == 5, "they still wait"
    loads.report("a", LoadReport(900, 1, 5, 8, 16, 0.0, committed_sequences=2), 0.0)
    assert loads.falloff[0] == -5 / 900, "without committed tokens, all sequences can be overtaken"


def test_the_first_request_to_an_idle_replica_is_not_overtaken() -> None:
    """An idle replica computes its first request before any report shows it; only later requests can be overtaken."""
    loads = table()
    loads.report("a", report(), 0.0)
    first = loads.reserve("a", 500, 0.0)
    assert (loads.committed_tokens[0], loads.overtakable_tokens[0], loads.falloff[0]) == (500, 0, 0)
    loads.reserve("a", 300, 0.0)
    assert (loads.committed_tokens[0], loads.overtakable_tokens[0], loads.falloff[0]) == (500, 300, -1 / 300)
    loads.release(first)
    assert (loads.committed_tokens[0], loads.overtakable_tokens[0]) == (300, 0)
    loads.report("a", report(900, 0, 3), 1.0)
    assert (loads.committed_tokens[0], loads.overtakable_tokens[0]) == (0, 1200)


def test_a_nonsense_number_does_not_hide_later_reservations() -> None:
    """A report that acknowledges reservations never made covers only the ones made so far."""
    loads = table()
    loads.reserve("a", 10, 0.0)
    loads.report("a", report(me=1 << 60), 0.0)
    assert loads.queue_ahead("a") == 0
    loads.reserve("a", 20, 0.0)
    assert loads.queue_ahead("a") == 20


@given(ops=st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60))
def test_rows_follow_their_replicas(ops: list[tuple[bool, int]]) -> None:
    loads = table("seed-holder")
    known: dict[str, int] = {}
    for joins, number in ops:
        name = f"r{number}"
        if joins and name not in known:
            loads.add_replica(name)
            known[name] = 100 + number
            loads.report(name, report(known[name], 0, 16 if number % 2 else 0), 0.0)
        elif not joins:
            loads.remove_replica(name)
            known.pop(name, None)
    assert set(loads.replica_ids) == {*known, "seed-holder"}
    for name, queued in known.items():
        assert loads.queue_ahead(name) == queued
        assert loads.is_full(name) == bool((queued - 100) % 2)
    assert loads.num_full == int(loads.full.sum())
    assert len(set(loads.seeds.tolist())) == len(loads.replica_ids)


def test_a_rate_over_few_tokens_is_believed_in_part() -> None:
    """A rate measured over less than 8,192 tokens is blended with the rate of all replicas. (docs: routing)"""
    loads = table("thin", "sure", "known")
    reports = {"thin": (200.0, 1024), "sure": (2000.0, 9000), "known": (1000.0, 0)}

    def tell() -> None:
        for name, (rate, tokens) in reports.items():
            loads.report(name, msgspec.structs.replace(report(rate=rate), prefill_rate_tokens=tokens), 0.0)

    tell()
    tell()
    common_rate = (1024 + 2 * 8192) / (1024 / 200 + 8192 / 2000 + 8192 / 1000)
    believed = 8192 / (1024 / 200 + 7168 / common_rate)
    assert loads.seconds_per_token.tolist() == pytest.approx([1 / believed, 1 / 2000, 1 / 1000])
    loads.remove_replica("sure")
    loads.remove_replica("known")
    tell()
    assert loads.seconds_per_token.tolist() == pytest.approx([1 / 200])


def test_a_rate_that_no_replica_has_measured_is_the_usual_one() -> None:
    """A replica has the default prefill rate until it reports one, and pulls nothing until it reports a pull rate."""
    loads = table("a", "b")
    loads.report("b", msgspec.structs.replace(report(rate=50.0), pull_tokens_per_s=1000.0), 0.0)
    assert loads.seconds_per_token.tolist() == [1 / 100, 1 / 50]
    assert [loads.replicas[name].pull_pace for name in "ab"] == [inf, 0.05]
    assert (loads.num_pulling, loads.pull_shares.tolist()) == (1, [1.0, 0.1])
    loads.remove_replica("a")
    assert loads.pull_shares.tolist() == [0.1]


@given(order=st.permutations(range(6)), queued=st.lists(st.integers(0, 1000), min_size=6, max_size=6))
def test_of_two_reports_the_later_one_counts(order: list[int], queued: list[int]) -> None:
    """An earlier report changes neither the queue nor this router's part of it. (docs: routing)"""
    loads = table()
    for _ in queued:
        loads.reserve("a", 7, 0.0)
    newest = -1
    for number in order:
        told = msgspec.structs.replace(report(queued[number], 0, 1, me=number), taken_at_s=float(number))
        loads.report("a", told, 0.0)
        newest = max(newest, number)
        assert loads.queue_ahead("a") == queued[newest] + 7 * (len(queued) - newest)


def test_routers_that_go_quiet_are_not_counted() -> None:
    """A replica remembers routers for long, but a router without new requests for half a minute is not active."""
    loads = table()
    assert loads.active_routers == 1
    loads.report("a", report(me=3, you=5, them=1), 0.0)
    assert loads.active_routers == 3
    loads.report("a", report(me=4, you=6, them=1), 20.0)
    loads.report("a", report(me=4, you=6, them=1), 35.0)
    assert loads.active_routers == 2
    loads.report("a", report(me=4, you=6, them=1), 100.0)
    assert loads.active_routers == 1
