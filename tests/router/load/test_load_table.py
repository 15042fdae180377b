"""LoadTable counts nothing twice, loses nothing, and survives nonsense."""

from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.load import DEFAULT_PREFILL_TOKENS_PER_S, PULL_PRICE, ROUTER_ACTIVE_S, LoadTable
from router.protocol.events import LoadReport


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
        st.tuples(st.sampled_from(["send", "arrive", "compute", "other", "report", "lie"]), st.integers(1, 1000)),
        max_size=60,
    )
)
def test_queue_ahead_counts_everything_once(steps: list[tuple[str, int]]) -> None:
    """After a report, queue ahead = tokens queued at the replica + tokens in transit. (docs: routing)

    A lie that acknowledges numbers never issued covers those issued so far, and no later one.
    """
    loads, truth, covered = table(), ReplicaQueue(), set[int]()
    ahead: int | None = None
    for action, tokens in steps:
        if action == "send":
            truth.on_the_way[loads.reserve("a", tokens, 0.0)] = tokens
            if ahead is not None:
                ahead += tokens
                assert loads.queue_ahead("a") == ahead, "no earlier report hides it"
        elif action == "arrive" and truth.on_the_way:
            number = min(truth.on_the_way)
            truth.mine[number] = truth.on_the_way.pop(number)
            truth.last = number
        elif action == "compute" and truth.mine:
            number = min(truth.mine)
            del truth.mine[number]
            loads.release(number)
            ahead = None
        elif action == "other":
            truth.others = tokens
        elif action in ("report", "lie"):
            told = truth.report()
            if action == "lie":
                lie = max(truth.last, 1 << (tokens % 62))
                told = msgspec.structs.replace(told, admitted={"me": lie, "other": 99})
                covered |= {number for number in truth.on_the_way if number <= lie}
            loads.report("a", told, 0.0)
            coming = [tokens for number, tokens in truth.on_the_way.items() if number not in covered]
            ahead = sum(truth.mine.values()) + truth.others + sum(coming)
            assert loads.queue_ahead("a") == ahead
            assert loads.waiting[0] == len(truth.mine) + len(coming)


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
    anew = table(*loads.replica_ids)
    for name in loads.replica_ids:
        anew.report(name, loads.replicas[name].report, 0.0)
    for column in LoadTable.__annotations__:
        assert getattr(loads, column).tolist() == getattr(anew, column).tolist(), column


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
    assert loads.seconds_per_token.tolist() == [1 / DEFAULT_PREFILL_TOKENS_PER_S, 1 / 50]
    loads.report("a", report(), 0.0)
    assert loads.seconds_per_token[0] == 1 / DEFAULT_PREFILL_TOKENS_PER_S, "another's rate is not its own"
    assert [loads.replicas[name].pull_pace for name in "ab"] == [inf, 0.05]
    assert (loads.num_pulling, loads.pull_shares.tolist()) == (1, [1.0, 0.05 * PULL_PRICE])
    loads.remove_replica("a")
    assert loads.pull_shares.tolist() == [0.05 * PULL_PRICE]


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


ROUTERS = ("me", "you", "them")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*"ab", "-a", "-b"]),
            st.dictionaries(st.sampled_from(ROUTERS), st.integers(0, 3)),
            st.sampled_from([0.0, 2.0, ROUTER_ACTIVE_S, 40.0]),
        ),
        max_size=30,
    )
)
def test_active_routers_are_those_whose_numbers_rose_lately(steps: list[tuple[str, dict[str, int], float]]) -> None:
    """By replica: one that comes back under its name begins to count anew, and nothing of it is kept meanwhile."""
    loads, now_s, rose_s = table("a", "b"), 0.0, dict[str, float]()
    numbers: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    for at, (name, admitted, pause_s) in enumerate(steps):
        now_s += pause_s
        if name.startswith("-"):
            loads.remove_replica(name[1:])
            loads.add_replica(name[1:])
            numbers[name[1:]] = {}
        else:
            told = msgspec.structs.replace(report(**admitted), taken_at_s=float(at))
            loads.report(name, told, now_s)
            rose_s |= {router: now_s for router, number in admitted.items() if number > numbers[name].get(router, 0)}
            numbers[name] = admitted
            active = {router for router, at_s in rose_s.items() if now_s - at_s <= ROUTER_ACTIVE_S}
            assert loads.active_routers == len({"me", *active})
        assert {name: dict(told) for name, told in loads._peers._admitted.items() if told} == {
            name: told for name, told in numbers.items() if told
        }


REPORTS = st.builds(
    LoadReport,
    *(st.integers(-5, 2000), st.integers(-1, 12), st.integers(-1, 20), st.integers(-1, 10), st.integers(-1, 18)),
    st.sampled_from([0.0, 50.0, 2000.0]),
    committed_prefill_tokens=st.integers(-1, 2000),
    committed_sequences=st.integers(-1, 9),
    pull_tokens_per_s=st.sampled_from([0.0, 900.0]),
)


@given(told=REPORTS, reserved=st.lists(st.integers(1, 900), max_size=4))
def test_of_a_report_that_is_not_believed_only_speeds_and_limits_count(told: LoadReport, reserved: list[int]) -> None:
    """A row is then that of an idle replica with this router's own requests; a later report counts in full."""
    work = ("queued_prefill_tokens", "committed_prefill_tokens", "committed_sequences")
    work += ("running_sequences", "waiting_sequences")
    idle = msgspec.structs.replace(told, **dict.fromkeys(work, 0))
    rows = []
    for reported in (told, idle):
        loads = table()
        loads.report("a", reported, 0.0)
        for tokens in reserved:
            loads.reserve("a", tokens, 0.0)
        loads.disbelieve("a")
        rows.append({name: getattr(loads, name).tolist() for name in LoadTable.__annotations__})
        assert loads.num_full == int(loads.full.sum()) == loads.is_full("a")
        loads.report("a", told, 1.0)
        rows[-1]["believed again"] = [loads.queue_ahead("a"), loads.waiting[0], loads.is_full("a")]
    assert rows[0] == rows[1]
