"""Laws of admission by session: bounded waiting, no waiting with space, and none within a tenant's share."""

from itertools import combinations
from math import exp, inf, isclose

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.protocol.samples import HEAT_MEMORY_S
from serve_app.replica.session_gate import AGING_SHARE, MUCH, PATIENCE, SMALL_PART, Admission
from serve_app.sessions import Sessions
from tests.serve_app.sessions.test_sessions import SIZE, Clock, chain

POOL = 64 * 1000
WAIT_S = 100.0


def price_s(tokens: int, others: int) -> float:
    """Return the idle time that a start beside contexts of ``others`` tokens takes, at a token a second."""
    return PATIENCE * max(0, min(tokens, others + tokens - POOL))


class Bench:
    """Sessions of one turn each over a pool of ``POOL`` tokens. ``pace``: so slow that each context is worth 120 s."""

    def __init__(self, wait_s: float = WAIT_S, pinned: int = 0, pace: float = 1.0) -> None:
        self.clock = Clock()
        self.sessions = Sessions(SIZE, self.clock, lambda: pace)
        self.admission = Admission(
            self.sessions,
            POOL,
            pinned_tokens=lambda: pinned,
            clock=self.clock,
            wait_s=wait_s,
        )
        self.made = 0
        self.cached_tokens = 0

    def arrive(
        self, tokens: int, tenant: str = "a", name: str = "", parent: str = "", again: str = "", timeout_s: float = inf
    ) -> str:
        """Start a new session, or go on with that of the request ``again``, of which nothing is cached any more."""
        request_id = str(self.made)
        self.made += 1
        text = again or request_id
        session = self.sessions.begin(request_id, tenant, chain((f"{text}-", 20)), tokens, 0, name, parent=parent)
        self.admission.waits(session, tokens, lambda: self.cached_tokens, timeout_s)
        return request_id

    def end(self, request_id: str) -> None:
        """End a request, which may still be waiting."""
        self.sessions.end(request_id)
        self.admission.forget(request_id)


def test_a_context_that_does_not_fit_beside_live_ones_waits_until_one_of_them_is_left() -> None:
    bench = Bench(wait_s=1000.0)
    first, second = bench.arrive(40_000), bench.arrive(40_000)
    assert bench.admission.admitted() == [first]
    bench.end(first)
    assert bench.admission.admitted() == []
    assert bench.admission.look_again_s() == 120.0
    bench.clock.now_s = 120.0
    assert bench.admission.admitted() == [second]


def test_a_wait_ends_once_the_replica_was_idle_for_what_the_context_may_evict() -> None:
    """Prompts alone make it busy, and what one start takes of its idle time is no other's."""
    bench = Bench(wait_s=1000.0, pace=1000.0)
    first, second, third = (bench.arrive(40_000) for _ in range(3))
    assert bench.admission.admitted() == [first]
    bench.clock.now_s = 30.0
    assert bench.admission.admitted() == [], "it computes a prompt"
    assert bench.admission.look_again_s() == 1000.0
    bench.sessions.first_token(first)
    assert isclose(bench.admission.look_again_s(), 30.0 + PATIENCE * 16), "16,000 of its 40,000 tokens find no space"
    bench.clock.now_s = 29.9 + PATIENCE * 16
    assert bench.admission.admitted() == []
    bench.clock.now_s = 30.1 + PATIENCE * 16
    assert bench.admission.admitted() == [second]
    assert bench.admission.look_again_s() == 1000.0
    bench.clock.now_s = 60.0
    bench.sessions.first_token(second)
    idle_s = 0.1 + bench.admission.look_again_s() - 60.0
    assert isclose(idle_s, PATIENCE * 40), "all of its tokens may evict others; the time before counts too"
    bench.clock.now_s = 60.0 + idle_s
    assert bench.admission.admitted() == [third]


def test_a_wait_leaves_half_of_a_requests_time_for_its_answer() -> None:
    bench = Bench(wait_s=3600.0)
    first, second, _ = bench.arrive(60_000), bench.arrive(60_000, timeout_s=600.0), bench.arrive(60_000)
    assert bench.admission.admitted() == [first]
    assert bench.admission.look_again_s() == 300.0
    bench.clock.now_s = 299.0
    assert bench.admission.admitted() == []
    bench.clock.now_s = 300.0
    assert bench.admission.admitted() == [second]
    assert bench.admission.look_again_s() == 3600.0


def test_a_session_gives_way_to_the_one_that_began_it() -> None:
    """Among those that wait, the least served starts first, but a child has its parent's service; so has a liar."""
    bench = Bench(wait_s=10_000.0, pace=1000.0)
    first = bench.arrive(60_000)
    assert bench.admission.admitted() == [first]
    root, child = bench.arrive(60_000, name="root"), bench.arrive(50_000, name="child", parent="root")
    loop = [bench.arrive(55_000, name=name, parent=parent) for name, parent in (("u", "v"), ("v", "u"))]
    strange = bench.arrive(51_000, parent="none")
    started = []
    for _ in range(5):
        bench.end(first)
        bench.clock.now_s += 1000.0
        (first,) = bench.admission.admitted()
        started.append(first)
    assert started == [strange, root, child, *reversed(loop)]


def test_nobody_waits_where_the_pool_is_free_nor_for_little_nor_without_a_wait() -> None:
    bench = Bench()
    first, second = bench.arrive(30_000), bench.arrive(34_000)
    assert bench.admission.admitted() == [first, second]
    session = bench.sessions.begin("turn", "a", chain(("t", 20)), 60_000, 59_500)
    assert not bench.admission.waits(session, POOL // SMALL_PART, int)
    without = Bench(wait_s=0.0)
    assert not without.admission.waits(session, POOL, int)


def test_a_prompt_computed_meanwhile_needs_no_space() -> None:
    """Of two choices of one prompt, the second starts once the first has computed it."""
    bench = Bench()
    first, second = bench.arrive(40_000), bench.arrive(40_000)
    assert bench.admission.admitted() == [first]
    bench.cached_tokens = 39_000
    assert bench.admission.admitted() == [second]


def test_pinned_tokens_are_no_room() -> None:
    bench = Bench(pinned=10_000)
    first, second = bench.arrive(30_000), bench.arrive(30_000)
    assert bench.admission.admitted() == [first]
    assert second not in bench.admission.admitted()


def test_a_context_larger_than_the_pool_starts_alone() -> None:
    bench = Bench()
    first = bench.arrive(POOL + 1)
    assert bench.admission.admitted() == [first]


def test_a_tenant_within_its_share_waits_for_nobody() -> None:
    bench = Bench()
    flood = [bench.arrive(20_000) for _ in range(50)]
    started = bench.admission.admitted()
    assert started == flood[:3]
    polite = bench.arrive(30_000, "b")
    assert bench.admission.admitted() == [polite]
    assert bench.arrive(30_000, "b") not in bench.admission.admitted()


def test_the_least_to_compute_starts_first_of_those_that_came_together() -> None:
    bench = Bench(wait_s=1000.0)
    running = bench.arrive(60_000)
    assert bench.admission.admitted() == [running]
    _, little = bench.arrive(60_000), bench.arrive(20_000)
    bench.end(running)
    bench.clock.now_s = 120.0
    assert bench.admission.admitted() == [little]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_laws(data: st.DataObject) -> None:
    """Any order of arrivals, ends and pauses agrees with a fresh count of all contexts at each step."""
    bench = Bench()
    arrivals: dict[str, tuple[str, int, float]] = {}
    waiting: set[str] = set()
    running: set[str] = set()
    ended: dict[str, float] = {}
    idle_s = 0.0  # since the first one waits, without what starts took

    def held(tenant: str | None = None) -> int:
        live = running | {name for name, at in ended.items() if at + 120.0 > bench.clock.now_s}
        return sum(arrivals[name][1] for name in live if tenant in (None, arrivals[name][0]))

    def passed(name: str) -> int:
        """The contexts of its tenant that pause and have had much more service."""
        tenant, service = arrivals[name][0], served(*arrivals[name][1:])
        own = [arrivals[other] for other, at in ended.items() if at + 120.0 > bench.clock.now_s]
        return sum(one[1] for one in own if one[0] == tenant and served(*one[1:]) > MUCH * service)

    def served(tokens: int, arrival_s: float) -> float:
        return tokens * exp((arrival_s - bench.clock.now_s) / HEAT_MEMORY_S)

    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["arrive", "end", "pause"]))
        if action == "arrive":
            tenant, tokens = data.draw(st.sampled_from("abc")), data.draw(st.integers(1_001, POOL))
            name = bench.arrive(tokens, tenant)
            arrivals[name] = (tenant, tokens, bench.clock.now_s)
            idle_s = idle_s if waiting else 0.0
            waiting.add(name)
        elif action == "end" and (running or waiting):
            name = data.draw(st.sampled_from(sorted(running | waiting)))
            bench.end(name)
            if name in running:
                ended[name] = bench.clock.now_s
            running.discard(name)
            waiting.discard(name)  # a client that left before its start: its session holds nothing
        else:
            pause_s = data.draw(st.floats(0.0, 60.0))
            bench.clock.now_s += pause_s
            idle_s += 0.0 if running else pause_s
        before = held()
        started = bench.admission.admitted()
        assert set(started) <= waiting
        for name in started:
            tenant, tokens, arrival_s = arrivals[name]
            tenants = {arrivals[other][0] for other in running | waiting} | {
                arrivals[other][0] for other, at in ended.items() if at + 120.0 > bench.clock.now_s
            }
            fits = (
                held() - passed(name) + tokens <= POOL
                or held(tenant) - passed(name) + tokens <= POOL / len(tenants)
                or not before
            )
            price = 0.0 if fits else price_s(tokens, held() - passed(name))
            is_idle = not running and idle_s >= price - 1e-6
            may = fits or is_idle or arrival_s + WAIT_S <= bench.clock.now_s
            assert may, "it was admitted without space, share, idle time or a long wait"
            idle_s -= price
            waiting.remove(name)
            running.add(name)
        for name in waiting:
            tenant, tokens, arrival_s = arrivals[name]
            assert arrival_s + WAIT_S > bench.clock.now_s, "nobody waits for longer"
            assert held() - passed(name) + tokens > POOL, "nobody waits while others of its kind leave room"
        if waiting:
            assert bench.admission.look_again_s() > bench.clock.now_s
    bench.clock.now_s += 1000.0
    assert set(bench.admission.admitted()) == waiting


def test_a_short_session_passes_long_ones_that_pause() -> None:
    """Not one alike, nor one that runs; a long one waits for the short one's place when it returns without its KV."""
    bench = Bench(wait_s=1000.0, pace=10.0)
    long = bench.arrive(60_000)
    assert bench.admission.admitted() == [long]
    short = bench.arrive(10_000)
    assert bench.admission.admitted() == [], "one that runs holds its blocks"
    bench.end(long)
    alike = bench.arrive(40_000)
    assert bench.admission.admitted() == [short]
    back = bench.arrive(62_000, again=long)
    assert bench.admission.admitted() == [alike], "it waited for the return"
    for request in (short, alike):
        bench.end(request)
    assert bench.admission.admitted() == []
    bench.clock.now_s = 999.0
    assert bench.admission.admitted() == [back], "with time, every session starts"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_turns_inside_a_tenant_are_by_service(data: st.DataObject) -> None:
    """Each start agrees with a ledger of everything that was computed, read anew each time; nobody starves.

    A session waits only behind those that run, those that pause with at most ``MUCH`` times its service, and those
    that came before it or were served less. It starts once there was idle time for it, and after ``WAIT_S``.
    """
    bench = Bench()
    ledger: dict[str, list[tuple[float, int]]] = {}
    sizes: dict[str, int] = {}
    ended: dict[str, float] = {}
    running: dict[str, str] = {}
    waiting: dict[str, tuple[str, float, float]] = {}
    idle_s = 0.0  # since the first one waits, without what starts took

    def served(name: str) -> float:
        return sum(tokens * exp((at - bench.clock.now_s) / HEAT_MEMORY_S) for at, tokens in ledger[name])

    def expected() -> list[str]:
        """The requests that may start now, in their order."""
        nonlocal idle_s
        live = {name: sizes[name] for name in running.values()}
        paused = {name: sizes[name] for name, at in ended.items() if at + 120.0 > bench.clock.now_s}
        started = []
        near = [(served(other), MUCH * served(name)) for other in paused for name, _, _ in waiting.values()]
        near += combinations((turn_s for _, _, turn_s in waiting.values()), 2)
        assume(all(one == other or not isclose(one, other) for one, other in near))  # rounding decides
        for request, (name, since_s, _) in sorted(waiting.items(), key=lambda one: one[1][2]):
            behind = [tokens for other, tokens in paused.items() if served(other) <= MUCH * served(name)]
            others = sum(live.values()) + sum(behind)
            fits = others + sizes[name] <= POOL or not (live or paused)
            price = 0.0 if fits else price_s(sizes[name], others)
            assume(fits or not isclose(idle_s, price, abs_tol=1e-6))
            is_idle = not live and idle_s > price
            if fits or is_idle or since_s + WAIT_S <= bench.clock.now_s:
                idle_s -= price
                started.append(request)
                live[name] = sizes[name]
        return started

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["arrive", "return", "end", "pause"]))
        now_s, tokens = bench.clock.now_s, 2 * data.draw(st.integers(501, POOL // 2)) - 1
        if action == "arrive" or (action == "return" and ended):
            again = data.draw(st.sampled_from(sorted(ended))) if action == "return" else ""
            request = bench.arrive(tokens, again=again)
            name = again or request
            ended.pop(name, None)
            sizes[name] = tokens
            ledger.setdefault(name, []).append((now_s, tokens))
            idle_s = idle_s if waiting else 0.0
            waiting[request] = name, now_s, now_s + served(name) / AGING_SHARE
        elif action == "end" and running:
            request = data.draw(st.sampled_from(sorted(running)))
            bench.end(request)
            ended[running.pop(request)] = now_s
        else:
            pause_s = data.draw(st.floats(0.0, 60.0))
            bench.clock.now_s += pause_s
            idle_s += 0.0 if running else pause_s
        right = expected()
        assert bench.admission.admitted() == right
        for request in right:
            running[request] = waiting.pop(request)[0]
        assert all(since_s + WAIT_S > bench.clock.now_s for _, since_s, _ in waiting.values())
