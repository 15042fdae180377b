"""Laws of the autoscaling policy, over any signals."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.protocol.autoscaling import Bounds
from serve_app.autoscaling.policy import CONTROL_PERIOD_S, ScalingDecision, State, decide
from serve_app.autoscaling.signals import Signals

BOUNDS = Bounds(1, 64, 2.0, 10.0, 600.0)
PERIODS = int(BOUNDS.downscale_delay_s / CONTROL_PERIOD_S)

any_signals = st.builds(
    Signals,
    target=st.integers(1, 64),
    running=st.integers(1, 64),
    fault=st.sampled_from(["", "", "", "1 of 3 replicas have not reported lately"]),
    bounds=st.just(BOUNDS),
    arrived_tokens=st.integers(0, 10**6).map(lambda tokens: (("one", float(tokens)),)),
    token_s=st.sampled_from([1e-4, 2.5e-4, 1e-3]),
    backlog_s=st.floats(0, 1e4),
    decoding=st.floats(0, 1e3),
    slots=st.sampled_from([0.0, 8.0, 256.0]),
    used_tokens=st.floats(0, 1e6),
    pool_tokens=st.sampled_from([0.0, 1e5]),
    pinned_tokens=st.floats(0, 1e5),
    pin_budget_tokens=st.sampled_from([0.0, 2.5e4]),
    working_set_tokens=st.floats(0, 1e6),
    requests=st.floats(0, 1e3),
    p90_ttft_s=st.floats(0, 100),
    p90_own_s=st.floats(0, 10),
)


class Deployment:
    """Applies decisions as a controller does: sets the decided target, and starts replicas at once or never."""

    def __init__(self, target: int, bounds: Bounds = BOUNDS, *, starts: bool = True) -> None:
        self.signals = Signals(target, target, "", bounds, (("one", 0.0),), 2.5e-4)
        self.state: State | None = None
        self.now_s = 1000.0
        self.starts = starts

    def tick(self, work: float, periods: int = 1, **changed: object) -> list[ScalingDecision]:
        """Advance by some control periods, with this many replicas' worth of incoming work."""
        decided = []
        for _ in range(periods):
            self.now_s += CONTROL_PERIOD_S
            [(name, tokens)] = self.signals.arrived_tokens
            tokens += work * CONTROL_PERIOD_S / self.signals.token_s
            self.signals = replace(self.signals, arrived_tokens=((name, tokens),), **changed)  # type: ignore[arg-type]
            decision, self.state = decide(self.state, self.signals, self.now_s)
            running = decision.target if self.starts else min(self.signals.running, decision.target)
            self.signals = replace(self.signals, target=decision.target, running=running)
            decided.append(decision)
        return decided


def after(seen: list[Signals]) -> tuple[State | None, float]:
    """Return the state and the time after some control periods."""
    state, now_s = None, 0.0
    for signals in seen:
        now_s += CONTROL_PERIOD_S
        _, state = decide(state, signals, now_s)
    return state, now_s


@given(st.lists(any_signals, min_size=1, max_size=30))
def test_a_target_is_within_the_bounds_or_untouched(seen: list[Signals]) -> None:
    """The number stays unchanged if reports are missing, and is within the bounds otherwise."""
    state, now_s = None, 0.0
    for each in seen:
        now_s += CONTROL_PERIOD_S
        decision, state = decide(state, each, now_s)
        if each.fault:
            assert (decision.target, decision.reason) == (each.target, "hold")
        else:
            assert BOUNDS.min_replicas <= decision.target <= BOUNDS.max_replicas


@given(st.lists(any_signals, min_size=1, max_size=20), any_signals)
def test_a_tick_that_is_repeated_changes_nothing(seen: list[Signals], last: Signals) -> None:
    """Asking again at the same moment, with its own target, gives the same target."""
    state, now_s = after(seen)
    first, state = decide(state, last, now_s)
    again, left = decide(state, replace(last, target=first.target), now_s)
    assert again.target == first.target
    assert decide(left, replace(last, target=first.target), now_s)[1] == left


@given(st.lists(any_signals, min_size=1, max_size=20), any_signals, st.floats(1, 10))
def test_more_load_never_means_fewer_replicas(seen: list[Signals], last: Signals, more: float) -> None:
    """After the same past, more arrivals, backlog, decoding, usage or a later first token give no smaller target."""
    state, now_s = after(seen)
    now_s += CONTROL_PERIOD_S
    loaded = replace(
        last,
        arrived_tokens=tuple((name, tokens * more) for name, tokens in last.arrived_tokens),
        backlog_s=last.backlog_s * more,
        decoding=last.decoding * more,
        used_tokens=last.used_tokens * more,
        p90_ttft_s=last.p90_ttft_s * more,
        requests=last.requests * more,
    )
    assert decide(state, loaded, now_s)[0].target >= decide(state, last, now_s)[0].target


TOTALS = st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e5), max_size=3)
"""By reporting replica, the tokens that arrived since the last report."""


@given(st.lists(TOTALS, min_size=1, max_size=20), st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e7)))
@example([{"a": 0.0}, {"a": 1.05}], {"a": 1.0})  # sums that differ in their last bit, on both sides of a rounding
def test_what_arrived_before_a_replica_was_seen_is_no_work(
    came: list[dict[str, float]], before: dict[str, float]
) -> None:
    """A total says nothing, only its growth between two reports: replicas join or miss one, controllers restart."""

    def decided(start: dict[str, float]) -> tuple[list[int], list[float], list[float]]:
        state, total, targets, needed, work = None, dict(start), list[int](), list[float](), list[float]()
        for number, grown in enumerate(came):
            total |= {name: total.get(name, 0.0) + tokens for name, tokens in grown.items()}
            arrived = tuple((name, total[name]) for name in sorted(grown))
            seen = Signals(2, 2, "", BOUNDS, arrived, 2.5e-4)
            decision, state = decide(state, seen, CONTROL_PERIOD_S * (number + 1))
            targets.append(decision.target)
            needed.append(decision.needed)
            work.append(state.work[-1][1])
        return targets, needed, work

    naive, known, work = [], dict[str, float](), 0.0
    for grown in came:
        work += sum(tokens for name, tokens in grown.items() if name in known) * 2.5e-4
        naive.append(work)
        known = grown
    (targets, needed, totals), later = decided({}), decided(before)
    assert later[0] == targets
    assert later[1] == pytest.approx(needed, abs=1e-5)
    assert later[2] == pytest.approx(totals, abs=1e-5)
    assert totals == pytest.approx(naive, abs=1e-5)


def test_a_target_that_was_raised_from_outside_is_not_lowered_by_a_backlog() -> None:
    """A deploy raised the number after a smaller one was wanted."""
    deployment = Deployment(1)
    deployment.tick(1.0)
    deployment.tick(1.0, backlog_s=70.0)
    deployment.signals = replace(deployment.signals, target=3, running=3)
    decided = deployment.tick(1.0, 3, backlog_s=200.0)
    assert min(decision.target for decision in decided) >= 3


@given(st.floats(0.2, 40), st.integers(1, 64), st.lists(st.sampled_from([0.95, 1.0, 1.05]), min_size=1, max_size=12))
@settings(max_examples=25)
def test_no_flap_while_the_load_is_flat(work: float, first: int, noise: list[float]) -> None:
    """Within 5 % of one load it grows at the beginning, or shrinks after the delay, and never reverses.

    docs: autoscaling
    """
    deployment = Deployment(first)
    targets = [first]
    for number in range(6 * PERIODS):
        [decision] = deployment.tick(work * noise[number % len(noise)])
        targets.append(decision.target)
    changes = [(number, after - before) for number, (before, after) in enumerate(pairwise(targets)) if after != before]
    ups = [number for number, change in changes if change > 0]
    downs = [number for number, change in changes if change < 0]
    # While the windows fill, each tick sees more of the same load.
    assert not ups or max(ups) * CONTROL_PERIOD_S <= 360
    assert not downs or not ups or min(downs) > max(ups)


@given(st.floats(1, 50), st.integers(0, 64), st.integers(0, 64))
@settings(max_examples=25)
def test_it_never_shrinks_below_the_need_of_caches(work: float, set_pools: int, saved_budgets: int) -> None:
    """The working set and explicit saves keep their replicas through any time without work; the others end."""
    kept = {"working_set_tokens": set_pools * 0.9e5, "pool_tokens": 1e5}
    kept |= {"pinned_tokens": saved_budgets * 2.5e4, "pin_budget_tokens": 2.5e4}
    deployment = Deployment(64)
    deployment.tick(work, 30, **kept)
    last = deployment.tick(0.0, 2 * PERIODS, **kept)[-1]
    assert last.target in (floor := max(set_pools, saved_budgets, 1), floor + 1)  # one more by rounding
    assert last.reason in ("floor", "steady")


def test_saves_that_nobody_hands_over_keep_every_replica() -> None:
    """Any leaving replica may be the one that holds them."""
    for hands_over, left in ((False, 12), (True, 1)):
        deployment = Deployment(12)
        kept = {"pinned_tokens": 100.0, "pin_budget_tokens": 2.5e4, "hands_over": hands_over}
        assert deployment.tick(0.0, 2 * PERIODS, **kept)[-1].target == left


@given(st.floats(1, 40), st.integers(1, 200))
@settings(max_examples=25)
def test_after_a_restart_of_the_controller_the_number_stays(work: float, periods: int) -> None:
    """State, replicas and reports are missing, then return: nothing shrinks before a whole delay has passed."""
    deployment = Deployment(48)
    deployment.tick(work, periods)
    target = deployment.signals.target
    deployment.state = None
    for fault in ("no replica runs", "3 of 48 replicas have not reported lately", "no ingress has reported lately"):
        [held] = deployment.tick(work, fault=fault)
        assert (held.target, held.reason) == (target, "hold")
    reported = deployment.tick(0.0, PERIODS, fault="")
    assert min(decision.target for decision in reported[:-1]) == target
    assert deployment.tick(0.0, 2)[-1].target == 1


def test_it_grows_by_as_many_as_the_work_needs_and_asks_once() -> None:
    """Twelve replicas' worth of work give one decision, after the delay, and no second one while they start.

    A backlog that grows because no replica starts requests no more of them, and the reason is given.
    """
    deployment = Deployment(2, starts=False)
    deployment.tick(1.0, 30, requests=600.0)
    decided = deployment.tick(12.0, 60)
    grown = [each for each in decided if each.reason not in ("steady", "starting")]
    targets = [each.target for each in decided]
    assert 12 < targets[-1] <= 17
    assert len({*targets}) <= 7, "while the window fills, and never again"
    assert grown[-1].reason in ("work", "ttft")
    assert len({each.target for each in decided[36:]}) == 1
    stuck = deployment.tick(12.0, 200, backlog_s=1e6)
    assert {each.target for each in stuck[70:]} == {64} or stuck[-1].reason == "starting"


def test_the_smallest_size_is_reached_within_two_periods_of_the_delay() -> None:
    """It shrinks in one step even from a large deployment, for every allowed delay. (docs: autoscaling)"""
    for delay_s in (10.0, 60.0, 600.0, 3600.0):
        deployment = Deployment(1, replace(BOUNDS, downscale_delay_s=delay_s))
        deployment.tick(20.0, 800)
        assert deployment.signals.target > 20
        gone_s = deployment.now_s
        while deployment.signals.target > 1:
            deployment.tick(0.0)
        assert deployment.now_s - gone_s <= delay_s + 2 * CONTROL_PERIOD_S


def test_a_late_first_token_takes_replicas_and_the_requests_own_prefill_does_not() -> None:
    """Beta rises only if a p90 can be reduced, not below the requests' own prefill time."""
    late, own = Deployment(12), Deployment(12)
    few = late.tick(8.0, 60, requests=100.0, p90_ttft_s=1.0, p90_own_s=0.5)[-1]
    assert late.tick(8.0, 120, requests=100.0, p90_ttft_s=6.0, p90_own_s=0.5)[-1].target > few.target
    own.tick(8.0, 60, requests=100.0, p90_ttft_s=1.0, p90_own_s=0.5)
    assert own.tick(8.0, 120, requests=100.0, p90_ttft_s=6.0, p90_own_s=5.8)[-1].target == few.target


def test_slots_and_the_pool_take_replicas_too() -> None:
    """Long answers need little prefill, but fill the decode slots and the pool."""
    for changed, reason in (
        ({"decoding": 200.0, "slots": 16.0}, "decode_slots"),
        ({"used_tokens": 9.5e5, "pool_tokens": 1e5}, "kv_pool"),
    ):
        deployment = Deployment(4)
        deployment.tick(1.0, 30)
        [*_, before, last] = deployment.tick(1.0, 4, **changed)
        assert max(before.target, last.target) >= 11
        assert reason in [each.reason for each in (*_, before, last)]


def test_new_bounds_hold_at_once() -> None:
    """The bounds may change while it runs."""
    deployment = Deployment(4)
    deployment.tick(3.0, 10)
    [raised] = deployment.tick(3.0, bounds=replace(BOUNDS, min_replicas=9))
    assert (raised.target, raised.reason) == (9, "bounds")
    [lowered] = deployment.tick(3.0, bounds=replace(BOUNDS, max_replicas=2))
    assert (lowered.target, lowered.reason) == (2, "bounds")


def test_time_without_reports_is_no_time_in_which_the_first_token_was_late() -> None:
    """After an update of ten minutes caches are cold and the TTFT is high: beta rises from then on, step by step."""
    deployment = Deployment(12)
    before = deployment.tick(8.0, 60, requests=100.0, p90_ttft_s=1.5, p90_own_s=0.5)[-1]
    deployment.tick(8.0, 120, fault="replicas of two versions run")
    late = deployment.tick(8.0, 4, fault="", p90_ttft_s=6.0)[-1]
    assert late.target == before.target


ZERO = replace(BOUNDS, min_replicas=0.0)


@given(st.integers(0, 100), st.integers(0, 3))
def test_the_first_replica_starts_for_the_first_request_without_delay(waiting: int, least: int) -> None:
    now = Signals(0, 0, "", replace(ZERO, min_replicas=float(least)), waiting=float(waiting))
    decision, state = decide(None, now, 1000.0)
    assert decision.target == max(least, int(waiting > 0))
    again, _ = decide(state, now, 1000.25)
    assert again.target == decision.target


def test_the_last_replica_stops_only_after_the_delay_without_any_work() -> None:
    """What the caches hold does not keep it: tiers do, if there are any. With some work it stays."""
    kept = {"pinned_tokens": 1e4, "pin_budget_tokens": 2.5e4, "pool_tokens": 1e5, "working_set_tokens": 1e5}
    idle, busy = Deployment(1, ZERO), Deployment(1, ZERO)
    assert min(one.target for one in idle.tick(0.0, PERIODS, **kept)) == 1
    assert idle.tick(0.0, 2 * PERIODS, **kept)[-1].target == 0
    assert min(one.target for one in busy.tick(0.01, 3 * PERIODS, **kept)) == 1


IDLE_S = [2592000.0 ** (step / 19) for step in range(20)]


@pytest.mark.parametrize("asked", [2, 50])
def test_a_model_at_zero_starts_for_its_first_request_after_any_time(asked: int) -> None:
    """Twenty idle times from a second to 30 days, with decisions now and then; it stays its whole delay."""
    for idle_s in IDLE_S:
        model = Deployment(1, ZERO)
        for _ in range(2):
            model.tick(0.0, 2 * PERIODS)
            assert model.signals.target == 0
            for _ in range(asked):
                model.now_s += idle_s / asked
                assert model.tick(0.0)[-1].target == 0
            assert model.tick(0.0, waiting=1.0)[-1].target == 1
            assert {one.target for one in model.tick(0.0, PERIODS - 1, waiting=0.0)} == {1}
            assert model.tick(0.0, 3)[-1].target == 0
