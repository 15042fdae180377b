"""Shares depend on the active tenants; budgets grant shares, and lend all but an eighth."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.fairness.queue import TenantQueue
from serve_app.fairness.shares import ACTIVE_S, Budget, Claim, Shares, verdict
from tests.harness.virtual_time import Clock

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}


def test_shares_are_those_of_recently_active_tenants() -> None:
    """A lone tenant counts as one of two; a tenant not seen for a minute has no share."""
    clock = Clock()
    shares = Shares(WEIGHTS, clock)
    shares.touch("b")
    assert shares.fraction("b") == 2 / 3
    shares.touch("a")
    assert (shares.fraction("a"), shares.fraction("b")) == (1 / 3, 2 / 3)
    assert shares.fraction("c") == 1 / 4
    clock.now_s = ACTIVE_S
    shares.touch("a")
    clock.now_s += 1
    shares.touch("a")
    assert shares.fraction("a") == 1 / 2


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([-1000.0, -1.0, 0.0, 0.5, 1.0, 2.0, 1000.0])), max_size=20
    )
)
def test_a_tenant_competes_for_its_time_wherever_the_clock_goes(steps: list[tuple[str, float]]) -> None:
    """By a list of who was seen when. Who has lost its share stays without one if the clock is set back."""
    clock, seen_s = Clock(), dict[str, float]()
    shares = Shares(WEIGHTS, clock)
    for tenant, times in steps:
        clock.now_s += times * ACTIVE_S
        seen_s = {name: at_s for name, at_s in seen_s.items() if clock.now_s - at_s <= ACTIVE_S}
        assert shares.contested == (len(seen_s) > 1)
        shares.touch(tenant)
        seen_s[tenant] = clock.now_s
        if len(seen_s) > 1:
            assert shares.fraction(tenant) == WEIGHTS[tenant] / sum(WEIGHTS[name] for name in seen_s)


@given(st.lists(st.sampled_from("abc")), st.lists(st.floats(0.1, 9), min_size=3, max_size=3))
def test_other_weights_hold_as_if_they_had_always_been(seen: list[str], weights: list[float]) -> None:
    """Settings may change while tenants are active; several may become one, and one may become several."""
    new = dict(zip("abc", weights, strict=True))
    changed, fresh = Shares({}, Clock()), Shares(new, Clock())
    for tenant in seen:
        changed.touch(tenant)
        fresh.touch(tenant)
    changed.set_weights(new)
    assert changed.several
    for tenant in "abcd":
        assert changed.fraction(tenant) == pytest.approx(fresh.fraction(tenant))


def test_where_there_is_one_tenant_all_is_its() -> None:
    shares = Shares({})
    budget = Budget(shares, lambda: 8)
    shares.touch("default")
    assert shares.fraction("default") == 1.0
    budget.take("default", 7)
    assert budget.verdict("default", 1) == "granted"
    assert budget.verdict("default", 2) in ("over_share", "no_room")


@given(
    total=st.integers(1, 40),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.booleans()), max_size=60),
)
def test_budgets_conserve_and_keep_an_eighth(total: int, steps: list[tuple[str, int, bool]]) -> None:
    """Holdings add up; a borrower leaves an eighth; a tenant within its share gets anything free."""
    shares = Shares(WEIGHTS)
    budget = Budget(shares, lambda: total)
    held: Counter[str] = Counter()
    for tenant, amount, back in steps:
        shares.touch(tenant)
        if back:
            amount = min(amount, held[tenant])
            budget.give_back(tenant, amount)
            held[tenant] -= amount
        else:
            free = total - held.total()
            share = max(1, int(total * shares.fraction(tenant)))
            within = not held[tenant] or held[tenant] + amount <= share
            granted = budget.verdict(tenant, amount) == "granted"
            if within:
                assert granted == (amount <= free or not held.total())
            else:
                assert granted == (free - amount >= max(1, total // 8))
            if granted:
                budget.take(tenant, amount)
                held[tenant] += amount
        assert budget.used == held.total()
        assert {name: budget.held(name) for name in "abc"} == {name: held[name] for name in "abc"}


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 9), min_size=1), st.sampled_from("abc"))
def test_shares_beside_named_tenants_do_not_depend_on_requests(weights: dict[str, float], seen: str) -> None:
    """Those of pins and of sessions add up to the whole, whoever sends requests."""
    shares = Shares(weights)
    shares.touch(seen)
    assert sum(shares.fraction(tenant, among=weights) for tenant in weights) == pytest.approx(1.0)
    assert shares.fraction("new", among=()) == 1.0


def test_who_exceeds_one_share_leaves_every_reserve() -> None:
    """Slots and blocks are claimed together: blocks within a share are not free for a borrower of slots."""
    within, beyond = Claim(1, 1, 2.0, 5, 1), Claim(1, 2, 2.0, 5, 1)
    assert verdict(within, within) == verdict(within, beyond) == "granted"
    assert verdict(within, Claim(6, 0, 2.0, 5, 1)) == "no_room", "who holds nothing is within its share"
    assert verdict(Claim(5, 1, 9.0, 5, 1), within) == "granted"
    assert verdict(Claim(5, 1, 9.0, 5, 1), beyond) == "over_share"


def test_a_tenant_without_work_keeps_its_debt_for_a_while_but_no_credit() -> None:
    """The turns of others pay it back, as if it waited; nobody is remembered for ever."""
    clock = Clock()
    turns: TenantQueue[str] = TenantQueue(lambda _: 100, clock)

    def left(tenant: str, cost: int) -> None:
        turns.join(tenant)
        assert turns.next([tenant]) == tenant
        turns.charge(tenant, cost)
        turns.leave(tenant)

    def credit(tenant: str) -> int:
        turns.join(tenant)
        found = turns.credit[tenant]
        turns.leave(tenant)
        return found

    left("thrifty", 30)
    assert credit("thrifty") == 0
    turns.join("b")
    turns.join("c")
    left("a", 1000)
    for round_ in range(5):
        assert credit("a") == credit("a") == -900 + 100 * max(0, round_ - 1), "its own turn was in the first round"
        for _ in "bc":
            turns.charge(turns.next(["b", "c"]), 100)
    for _ in range(100):
        turns.charge(turns.next(list(turns.credit)), 100)
    assert credit("a") == 0
    left("a", 1000)
    clock.now_s = ACTIVE_S + 1
    for number in range(50):
        left(f"once {number}", 1000)
    assert "a" not in turns._debts and credit("a") == 0
    clock.now_s *= 3
    turns.leave("b")
    assert not turns._debts


@given(
    costs=st.fixed_dictionaries({name: st.sampled_from([50, 100, 150, 700]) for name in "abc"}),
    turn=st.sampled_from([100, 150]),
)
def test_turns_differ_by_one_and_the_excess_of_one_request(costs: dict[str, int], turn: int) -> None:
    """Also where costs are exactly a turn, and nobody's credit is left."""
    turns: TenantQueue[str] = TenantQueue(lambda _: turn)
    used = Counter[str]()
    for tenant in costs:
        turns.join(tenant)
    for _ in range(200):
        tenant = turns.next(list(turns.credit))
        turns.charge(tenant, costs[tenant])
        used[tenant] += costs[tenant]
        assert max(used.values()) - min(used[name] for name in costs) <= turn + max(costs.values())


def test_one_tenant_is_not_several() -> None:
    """Nothing is kept from it for others that cannot come."""
    for weights, several in (({}, False), ({"only": 2.0}, False), ({"a": 1.0, "b": 1.0}, True)):
        shares = Shares(weights)
        shares.touch(next(iter(weights), "default"))
        assert shares.several == several
        assert (shares.fraction(next(iter(weights), "default")) == 1.0) == (not several)
