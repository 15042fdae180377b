"""Laws of admission by session: bounded waiting, no waiting with space, and none within a tenant's share."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.replica.session_gate import SMALL_PART, Admission
from serve_app.sessions import Sessions
from tests.serve_app.sessions.test_sessions import SIZE, Clock, chain

POOL = 64 * 1000
WAIT_S = 100.0


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

    def arrive(self, tokens: int, tenant: str = "a", name: str = "", parent: str = "") -> str:
        """Start a new session; return its request."""
        request_id = str(self.made)
        self.made += 1
        session = self.sessions.begin(request_id, tenant, chain((f"{request_id}-", 20)), tokens, 0, name, parent=parent)
        self.admission.waits(session, tokens, lambda: self.cached_tokens)
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


def test_an_idle_replica_waits_for_no_return_longer_than_a_context_takes_to_compute() -> None:
    bench = Bench(wait_s=1000.0, pace=1000.0)
    first, second, third = (bench.arrive(40_000) for _ in range(3))
    assert bench.admission.admitted() == [first]
    bench.clock.now_s = 50.0
    assert bench.admission.admitted() == [], "it is not idle while one runs"
    bench.end(first)
    assert bench.admission.look_again_s() == 90.0
    bench.clock.now_s = 89.9
    assert bench.admission.admitted() == []
    bench.clock.now_s = 90.0
    assert bench.admission.admitted() == [second]
    assert bench.admission.admitted() == [] and third in bench.admission._waiting


def test_a_session_gives_way_to_the_one_that_began_it() -> None:
    """Among those that wait, a shorter context starts first, but not before its parent's; a liar's neither."""
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
    assert started == [strange, *loop, root, child]


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

    def held(tenant: str | None = None) -> int:
        live = running | {name for name, at in ended.items() if at + 120.0 > bench.clock.now_s}
        return sum(arrivals[name][1] for name in live if tenant in (None, arrivals[name][0]))

    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["arrive", "end", "pause"]))
        if action == "arrive":
            tenant, tokens = data.draw(st.sampled_from("abc")), data.draw(st.integers(1_001, POOL))
            name = bench.arrive(tokens, tenant)
            arrivals[name] = (tenant, tokens, bench.clock.now_s)
            waiting.add(name)
        elif action == "end" and (running or waiting):
            name = data.draw(st.sampled_from(sorted(running | waiting)))
            bench.end(name)
            if name in running:
                ended[name] = bench.clock.now_s
            running.discard(name)
            waiting.discard(name)  # a client that left before its start: its session holds nothing
        else:
            bench.clock.now_s += data.draw(st.floats(0.0, 60.0))
        before = held()
        started = bench.admission.admitted()
        assert set(started) <= waiting
        for name in started:
            tenant, tokens, arrival_s = arrivals[name]
            tenants = {arrivals[other][0] for other in running | waiting} | {
                arrivals[other][0] for other, at in ended.items() if at + 120.0 > bench.clock.now_s
            }
            may = (
                held() + tokens <= POOL
                or held(tenant) + tokens <= POOL / len(tenants)
                or not before
                or arrival_s + WAIT_S <= bench.clock.now_s
            )
            assert may, "it was admitted without space, share or a long wait"
            waiting.remove(name)
            running.add(name)
        for name in waiting:
            tenant, tokens, arrival_s = arrivals[name]
            assert arrival_s + WAIT_S > bench.clock.now_s, "nobody waits for longer"
            assert held() + tokens > POOL, "nobody waits while the pool is free"
        if waiting:
            assert bench.admission.look_again_s() > bench.clock.now_s
    bench.clock.now_s += 1000.0
    assert set(bench.admission.admitted()) == waiting
