"""Sessions are found by their prompts' prefixes, by tenant, and their number per tenant is bounded."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.block_hash import HASH_BYTES
from serve_app import sessions as module
from serve_app.sessions import FIRST_HOLD_S, LEAST_HOLD_S, MOST_HOLD_S, WORTH, Session, Sessions
from tests.harness.virtual_time import Clock

SIZE = 16
SLOW = 1.0
"""Tokens a second: every context is worth its room."""


def chain(*parts: tuple[str, int]) -> bytes:
    """Return a chain with this many blocks of each text."""
    return b"".join(f"{text}{i}".encode().ljust(HASH_BYTES, b".") for text, count in parts for i in range(count))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(SIZE, clock, lambda: SLOW)


def held_s(sessions: Sessions, session: Session) -> float:
    """How long a session is live after its answer."""
    return sessions.live_until_s(session, sessions.pace()) - session.used_s


def turn(
    sessions: Sessions, request_id: str, prompt: bytes, *, tenant: str = "a", cached: int = 0, name: str = ""
) -> Session:
    session = sessions.begin(request_id, tenant, prompt, len(prompt) // HASH_BYTES * SIZE, cached, name)
    sessions.end(request_id, SIZE)
    return session


def test_a_prompt_that_goes_on_is_the_same_session(sessions: Sessions, clock: Clock) -> None:
    first = turn(sessions, "1", chain(("x", 40)))
    clock.now_s = 5.0
    assert turn(sessions, "2", chain(("x", 40), ("y", 4))) is first
    assert first.turns == 2 and first.began_s == 0.0 and first.used_s == 5.0
    assert first.tokens == 44 * SIZE + SIZE


def test_reminders_at_the_end_of_a_prompt_may_change(sessions: Sessions) -> None:
    first = turn(sessions, "1", chain(("x", 38), ("reminder", 2)))
    assert turn(sessions, "2", chain(("x", 38), ("y", 9))) is first


@pytest.mark.parametrize(
    "prompt", [chain(("x", 30), ("z", 30)), chain(("z", 40), ("x", 40)), chain(("x", 20)), b""], ids=range(4)
)
def test_another_prompt_is_another_session(sessions: Sessions, prompt: bytes) -> None:
    first = turn(sessions, "1", chain(("x", 40)))
    assert turn(sessions, "2", prompt) is not first


def test_other_tenants_and_other_names_are_other_sessions(sessions: Sessions) -> None:
    first = turn(sessions, "1", chain(("x", 40)), name="one")
    assert turn(sessions, "2", chain(("x", 41)), tenant="b") is not first
    assert turn(sessions, "3", chain(("x", 41)), name="two") is not first
    assert turn(sessions, "4", chain(("x", 42)), name="one") is first


def test_a_second_request_beside_a_running_one_is_a_session_of_its_own(sessions: Sessions) -> None:
    first = sessions.begin("1", "a", chain(("x", 40)), 640, 0)
    second = sessions.begin("2", "a", chain(("x", 41)), 656, 640)
    assert second is not first
    assert second.own_tokens == 16
    sessions.end("1")
    assert sessions.state(first, SLOW) == "paused" and sessions.state(second, SLOW) == "running"


def test_a_session_that_goes_on_expects_none_of_those_that_it_began(sessions: Sessions) -> None:
    """Their answers are what it waited for. One that runs, another's, and another tenant's stay live."""
    begun = {"paused": ("a", "root"), "other": ("a", "else"), "strange": ("b", "root"), "runs": ("a", "root")}
    for name, (tenant, parent) in begun.items():
        sessions.begin(name, tenant, chain((name, 40)), 640, 0, name, parent=parent)
        if name != "runs":
            sessions.end(name)
    turn(sessions, "1", chain(("x", 40)), name="root")
    states = {session.name: sessions.state(session, SLOW) for session in sessions.all()}
    assert states == {"paused": "left", "other": "paused", "strange": "paused", "runs": "running", "root": "paused"}
    again = sessions.begin("again", "a", chain(("paused", 41)), 656, 0, "paused")
    assert again.turns == 2 and sessions.state(again, SLOW) == "running"


def test_sessions_close_with_the_one_that_began_them(sessions: Sessions) -> None:
    for name, parent in (("root", ""), ("child", "root"), ("grandchild", "child"), ("", "child"), ("other", "")):
        sessions.begin(f"of {name}", "a", chain((f"{name}-", 40)), 640, 0, name, parent=parent)
        sessions.end(f"of {name}")
    sessions.begin("loop", "a", chain(("loop", 40)), 640, 0, "root", parent="grandchild")
    assert len(sessions.close("a", ["root"])) == 4, "one runs"
    assert [session.name for session in sessions.all()] == ["other", "root"]
    sessions.end("loop")
    assert [session.name for session in sessions.all()] == ["other"]


def test_an_expected_answer_is_part_of_the_context_until_the_real_one(sessions: Sessions) -> None:
    session = sessions.begin("1", "a", chain(("x", 40)), 640, 0, expected_tokens=300)
    assert sessions.held() == {"a": 940}
    sessions.end("1", 10)
    assert session.own_tokens == 650 and sessions.held() == {"a": 650}


def test_a_session_is_live_as_long_as_nine_of_ten_returns_took(sessions: Sessions, clock: Clock) -> None:
    session = turn(sessions, "0", chain(("x", 20)))
    assert held_s(sessions, session) == FIRST_HOLD_S
    for number in range(1, 41):
        clock.now_s += 40.0 if number % 20 == 0 else 20.0
        turn(sessions, str(number), chain(("x", 20 + number)))
    assert held_s(sessions, session) == 20.0
    assert sessions.held() == {"a": session.own_tokens}
    assert sessions.next_end_s() == clock.now_s + 20.0
    clock.now_s += 20.0
    assert sessions.held() == {} and sessions.state(session, SLOW) == "left"


def test_quick_returns_leave_a_least_time(sessions: Sessions) -> None:
    for number in range(20):
        session = turn(sessions, str(number), chain(("x", 20 + number)))
    assert held_s(sessions, session) == LEAST_HOLD_S


def test_nobody_waits_longer_for_a_context_than_it_is_worth(clock: Clock) -> None:
    """A small context, or one on a fast replica, is computed again in a moment."""
    fast = Sessions(SIZE, clock, lambda: 1000.0)
    session = turn(fast, "0", chain(("x", 124)))
    assert held_s(fast, session) == WORTH * 125 * SIZE / 1000.0
    shared = turn(fast, "1", chain(("y", 124)), cached=100 * SIZE)
    assert held_s(fast, shared) == WORTH * 25 * SIZE / 1000.0


def test_contexts_of_a_tenant_that_never_returns_are_hardly_held(clock: Clock) -> None:
    """A tenant with questions about documents has no sessions; with few that return, few are worth their room."""
    sessions = Sessions(SIZE, clock, lambda: 100.0)
    first = turn(sessions, "first", chain(("first", 124)))
    before_s = held_s(sessions, first)
    for number in range(60):
        clock.now_s += MOST_HOLD_S / 10
        last = turn(sessions, str(number), chain((f"x{number}-", 124)))
    assert held_s(sessions, last) < before_s / 40
    for number in range(200):
        clock.now_s += 30.0
        turn(sessions, f"back {number}", chain(("x59-", 124), ("y", number)))
    assert held_s(sessions, last) == 30.0


def test_a_late_return_is_a_return(clock: Clock) -> None:
    """After the longest hold it counts as gone, until it is back; then its pause counts with the others'."""
    sessions = Sessions(SIZE, clock, lambda: SLOW)
    for number in range(20):
        clock.now_s += MOST_HOLD_S + 10.0
        turn(sessions, f"other {number}", chain((f"x{number}-", 20)))
        session = turn(sessions, str(number), chain(("x", 20 + number)))
    assert held_s(sessions, session) == MOST_HOLD_S


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1.0, 60.0, MOST_HOLD_S / 2, 2 * MOST_HOLD_S])), max_size=30)
)
def test_a_session_counts_as_gone_until_it_is_back(asked: list[tuple[int, float]]) -> None:
    """Each return is one pause, and each session now away for longer than the longest hold is one that has none."""
    clock, used_s, lengths = Clock(), dict[int, float](), Counter[int]()
    sessions, returns = Sessions(SIZE, clock, lambda: SLOW), list[float]()
    for number, (which, pause_s) in enumerate(asked):
        clock.now_s += pause_s
        if which in used_s:
            returns.append(clock.now_s - used_s[which])
        lengths[which] += 1
        turn(sessions, str(number), chain((f"{which}-", 20 + lengths[which])))
        used_s[which] = clock.now_s
        gone = [which for which, at_s in used_s.items() if clock.now_s - at_s > MOST_HOLD_S]
        assert sorted(sessions._tenants["a"].pauses_s) == sorted(returns) + [math.inf] * len(gone)
        assert sessions._tenants["a"].worth == WORTH * (len(returns) + 1) / (len(returns) + len(gone) + 1)


def test_sessions_that_are_forgotten_early_did_not_return(clock: Clock) -> None:
    """A tenant may ask for more than are remembered before the longest pause is over."""
    sessions = Sessions(SIZE, clock, lambda: 100.0, most=4)
    for number in range(40):
        last = turn(sessions, str(number), chain((f"x{number}-", 124)))
    assert held_s(sessions, last) < WORTH * 125 * SIZE / 100.0 / 30


def test_a_tenant_has_so_many_sessions_and_takes_nobody_elses(clock: Clock) -> None:
    sessions = Sessions(SIZE, clock, lambda: SLOW, most=8)
    polite = turn(sessions, "polite", chain(("polite", 20)), tenant="b")
    for number in range(100):
        turn(sessions, str(number), chain((f"flood{number}-", 20)))
    assert len(sessions.all("a")) == 8
    assert sessions.all("b") == [polite]


def test_requests_of_forgotten_sessions_end_all_the_same(clock: Clock) -> None:
    sessions = Sessions(SIZE, clock, lambda: SLOW, most=2)
    for number in range(5):
        sessions.begin(str(number), "a", chain((f"x{number}", 20)), 320, 0)
    for number in range(5):
        sessions.end(str(number))
    assert all(not session.running for session in sessions.all())


def test_long_unused_sessions_are_forgotten_and_counted(sessions: Sessions, clock: Clock) -> None:
    turn(sessions, "1", chain(("x", 20)))
    sessions.begin("2", "b", chain(("y", 20)), 320, 0)
    clock.now_s = 3601.0
    sessions.expire()
    assert [session.tenant for session in sessions.all()] == ["b"]
    samples = {(name, labels): value for name, labels, value in sessions.samples()}
    assert samples["warmpath_session_unused_tokens_total", ()] == 21 * SIZE
    assert samples["warmpath_sessions", (("state", "running"),)] == 1


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0, 1000.0])
def test_a_paused_session_holds_its_room_for_its_time_and_is_forgotten_after_its_own(
    sessions: Sessions, clock: Clock, times: float
) -> None:
    """Each by its own limit; a clock that is set back brings nothing back."""
    session = turn(sessions, "1", chain(("x", 20)))
    clock.now_s = times * FIRST_HOLD_S
    live = times < 1
    assert (bool(sessions.held()), sessions.state(session, SLOW)) == (live, "paused" if live else "left")
    clock.now_s = 0.0
    assert (bool(sessions.held()), sessions.state(session, SLOW)) == (live, "paused" if live else "left")
    clock.now_s = times * 3600.0
    sessions.expire()
    kept = times <= 1
    assert (len(sessions.all()), sessions.held()) == (kept, {})
    clock.now_s = 0.0
    again = turn(sessions, "2", chain(("x", 21)))
    assert (again is session) == kept and len(sessions.all()) == 1


def test_returns_that_find_their_context_are_told_from_those_that_do_not(sessions: Sessions) -> None:
    turn(sessions, "1", chain(("x", 40)))
    turn(sessions, "2", chain(("x", 41)), cached=40 * SIZE)
    turn(sessions, "3", chain(("x", 42)), cached=20 * SIZE)
    samples = {(name, labels): value for name, labels, value in sessions.samples()}
    assert samples["warmpath_session_returns_total", (("outcome", "hit"),)] == 1
    assert samples["warmpath_session_returns_total", (("outcome", "missed"),)] == 1


ACTIONS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from("ab"), st.integers(0, 6), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("start"), st.integers(0, 9)),
    st.tuples(st.just("first_token"), st.integers(0, 9)),
    st.tuples(st.just("pause"), st.sampled_from([0.0, 1.0, 7.0, 30.0, 160.0, 4000.0])),
    st.tuples(st.just("pace"), st.sampled_from([0.0, 5.0, 40.0, 41.0, 900.0])),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_the_sums_are_those_of_all_sessions(actions: list[Any]) -> None:
    """Tokens, ends and counts agree with a look at every session, in any order of events and at any pace."""
    clock, pace = Clock(), [40.0]
    sessions = Sessions(SIZE, clock, lambda: pace[0])
    open_ones: list[Session] = []
    lengths: Counter[tuple[str, int]] = Counter()
    computing: set[str] = set()
    idle_s = 0.0
    for number, (action, *how) in enumerate(actions):
        if action == "begin":
            tenant, which, waits = how
            lengths[tenant, which] += 1
            prompt = chain((f"{which}-", 20 + lengths[tenant, which]))
            open_ones.append(sessions.begin(str(number), tenant, prompt, len(prompt), 16 * which))
            sessions.set_waiting(open_ones[-1], waits=waits)
            computing |= set() if waits else {str(number)}
        elif action == "pause":
            clock.now_s += how[0]
            idle_s += 0.0 if computing else how[0]
            sessions.expire()
        elif action == "pace":
            pace[0] = how[0]
        elif open_ones and action == "start":
            started = open_ones[how[0] % len(open_ones)]
            computing |= {started.running} if started.waits else set()
            sessions.set_waiting(started, waits=False)
        elif open_ones and action == "first_token":
            begun = open_ones[how[0] % len(open_ones)].running
            computing.discard(begun)
            sessions.first_token(begun)
        elif open_ones:
            ended = open_ones.pop(how[0] % len(open_ones)).running
            computing.discard(ended)
            sessions.end(ended, 30)
        held: Counter[str] = Counter()
        rate, ends_s, states = sessions.pace(), [math.inf], Counter[str]()
        for session in sessions.all():
            state = sessions.state(session, rate)
            states[state] += 1
            if state in ("running", "paused"):
                held[session.tenant] += session.own_tokens
                ends_s.append(sessions.live_until_s(session, rate))
        assert sessions.held() == held
        assert sessions.held().keys() == held.keys()
        assert sessions.next_end_s() == min(ends_s)
        assert sessions.idle == (not computing) and sessions.idle_s() == pytest.approx(idle_s)
        told = {dict(labels)["state"]: value for name, labels, value in sessions.samples() if name.endswith("sessions")}
        assert {state: told[state] for state in states} == states


def test_a_look_costs_no_more_with_many_sessions(clock: Clock) -> None:
    """Neither the sums nor the next end read every session again."""
    sessions = Sessions(SIZE, clock, lambda: SLOW)
    for tenant in range(4):
        for number in range(module.MOST_SESSIONS):
            turn(sessions, f"{tenant}-{number}", chain((f"{number}-", 20)), tenant=str(tenant))
    assert sessions.held().total() == 4 * module.MOST_SESSIONS * 21 * SIZE
    reads = 0

    def counted(session: Session, pace: float) -> float:
        nonlocal reads
        reads += 1
        return Sessions.live_until_s(sessions, session, pace)

    sessions.live_until_s = counted  # type: ignore[method-assign]
    for number in range(10):
        sessions.begin(f"more {number}", "other", chain((f"other {number}-", 20)), 320, 0)
        sessions.held()
        sessions.next_end_s()
        sessions.end(f"more {number}")
        list(sessions.samples())
    assert reads < 100
