"""Requests without any replica: each waits its own time, by a clock that the tests move past every limit."""

import asyncio
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.request import NoReplicaLeft, RoutedRequest
from router.serve import request_router
from router.settings import RouterSettings
from tests.harness.eventually import let_others_run
from tests.router.cores import load
from tests.router.serve.test_wait_queue import Case

pytestmark = pytest.mark.anyio

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0
WAITS_S = (0.0, 0.2, 5.0, 30.0, 600.0)
TIMES = (0.0, 0.5, 1.0, 2.0, 1000.0)
IDLE_S = (
    *(1.0, 2.0, 4.9, 5.0, 5.1, 9.0, 10.0, 29.0, 31.0, MINUTE_S),
    *(2 * MINUTE_S, 9 * MINUTE_S, 10 * MINUTE_S, 11 * MINUTE_S, HOUR_S),
    *(5 * HOUR_S, DAY_S, 2 * DAY_S, 7 * DAY_S, 30 * DAY_S),
)
NUMBERS = count()
NOBODY = ("never started", "stopped", "died", "out", "one out, one away")


async def turn() -> None:
    """Let all that can go on do so."""
    await let_others_run(12)


class Waits(Case):
    """A router with a clock that the test moves. ``asked``: the tasks of its requests."""

    def __init__(self, name: str, wait_s: float) -> None:
        super().__init__(f"{name} {next(NUMBERS)}")  # each has its own core
        self.router._among_peers = True  # no sockets
        self.now_s = 1000.0
        self.router._clock = lambda: self.now_s
        self.router._backoff = self._at_once
        self.core.configure(RouterSettings(block_size=16, no_replica_wait_s=wait_s))
        self.wait_s = wait_s
        self.asked: list[asyncio.Task[str]] = []

    async def _at_once(self, attempt: int) -> None:
        await let_others_run()

    def set(self, letters: str) -> None:
        """Make Serve name a new set of replicas, of which the core learns too, as in an ingress."""
        super().set(letters)
        self.core.update_replicas(self.router._by_name, self.router._away)

    def say(self, letter: str, *, out: bool) -> None:
        self.core.apply(letter, [load(out="its worker is away" if out else "")])

    def nobody(self, how: str) -> None:
        """Take every replica away."""
        if how == "never started":
            return
        self.set("ab")
        if how == "stopped":
            self.set("")
        elif how == "died":
            for letter in "ab":
                self.router.on_replica_actor_died(self.ids[letter])
        else:
            self.say("a", out=True)
            if how == "out":
                self.say("b", out=True)
            else:
                self.set("a")

    def somebody(self, how: str) -> None:
        """Let one replica take requests again."""
        if "out" in how:
            self.say("a", out=False)
        else:
            self.set("a")

    def ask(self, tenant: str = "", order: int = 0, *, target: str | None = None) -> asyncio.Task[str]:
        """Send a request."""
        number = len(self.asked)
        route = RoutedRequest(f"r{number}", bytes(16), 20, bytes(16), tenant=tenant, order=order)
        pending: Any = SimpleNamespace(args=[route], kwargs={} if target is None else {"target": target})

        async def chosen() -> str:
            replica = await self.router._choose_replica_for_request(pending)
            return str(replica.replica_id.unique_id)

        self.asked.append(asyncio.create_task(chosen()))
        return self.asked[-1]

    async def pass_s(self, seconds: float) -> None:
        """Move the clock, and let everybody look at it."""
        self.now_s += seconds
        await turn()

    async def end(self) -> None:
        for task in self.asked:
            task.cancel()
        await asyncio.gather(*self.asked, return_exceptions=True)
        assert not self.router._wait_queue._lines and not self.router._wait_queue._by_arrival


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_router, "LOOK_S", 0.0)


async def waits_its_time(name: str, how: str, wait_s: float, idle_s: float) -> None:
    """After ``idle_s`` without a replica, a request finds the next one until its own wait is over, not longer."""
    case = Waits(f"{name} {how} {wait_s} {idle_s}", wait_s)
    case.nobody(how)
    before = case.ask()
    await turn()
    await case.pass_s(idle_s)
    assert before.done() == (idle_s >= wait_s), "the one that was there at the beginning"
    if wait_s:
        served = case.ask()
        await turn()
        await case.pass_s(0.99 * wait_s)
        assert not served.done(), "it has waited less than it may"
        case.somebody(how)
        await turn()
        assert served.done() and served.result() in "ab"
        case.nobody("stopped" if how == "never started" else how)
        await turn()
    refused = case.ask()
    await turn()
    assert refused.done() == (wait_s == 0.0)
    await case.pass_s(1.01 * wait_s)
    assert refused.done()
    with pytest.raises(NoReplicaLeft):
        refused.result()
    await case.end()


@pytest.mark.parametrize("how", NOBODY)
@pytest.mark.parametrize("wait_s", WAITS_S)
async def test_a_request_waits_its_own_time_however_long_there_was_no_replica(how: str, wait_s: float) -> None:
    """docs: routing, autoscaling"""
    for times in TIMES:
        await waits_its_time("times", how, wait_s, times * wait_s)


@pytest.mark.parametrize("how", NOBODY)
async def test_a_model_that_slept_a_second_or_a_month_is_waited_for(how: str) -> None:
    """Twenty idle times; the wait is that of a model at zero."""
    for idle_s in IDLE_S:
        await waits_its_time("idle", how, 600.0, idle_s)


@dataclass(frozen=True)
class _Sent:
    at_s: float
    task: asyncio.Task[str]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("xyz"), st.integers(-1, 1)),
        st.tuples(st.just("pass"), st.sampled_from([0.5, 1.0, 2.5, 5.0, 10.0, 5000.0]), st.just(0)),
        st.tuples(st.sampled_from(["none", "some", "out", "in"]), st.just(""), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(STEPS)
async def test_each_waits_its_own_time_in_any_place_of_the_queue(steps: list[tuple[str, Any, int]]) -> None:
    """A plain rule tells who is refused when: by its own arrival, or the last moment with a replica if that is later.

    Tenants and orders decide who asks; they lengthen and shorten nobody's wait.
    """
    wait_s = 5.0
    case = Waits("law", wait_s)
    waiting: list[_Sent] = []
    none_since_s: float | None = case.now_s
    there = out = False
    for what, how, order in [*steps, ("pass", 5000.0, 0)]:
        if what == "ask":
            waiting.append(_Sent(case.now_s, case.ask(how, order)))
        elif what == "pass":
            case.now_s += how
        elif what in ("none", "some"):
            there = what == "some"
            case.set("a" if there else "")
        else:
            out = what == "out" and there
            case.say("a", out=out)
        if not there:
            out = out and case.core.all_out
        able = there and not case.core.all_out
        none_since_s = None if able else case.now_s if none_since_s is None else none_since_s
        await turn()
        for sent in list(waiting):
            over = none_since_s is not None and case.now_s - max(sent.at_s, none_since_s) >= wait_s
            assert sent.task.done() == (able or over), (what, how, case.now_s, sent.at_s, none_since_s)
            if sent.task.done():
                waiting.remove(sent)
                assert isinstance(sent.task.exception(), NoReplicaLeft) if over else sent.task.result() == "a"
    await case.end()


async def test_a_call_of_one_replica_by_name_waits_behind_nobody() -> None:
    """Those that wait need a replica that can take requests; a replica that is out still ends calls and sends KV."""
    case = Waits("named", 5.0)
    case.nobody("out")
    waits = case.ask()
    await turn()
    await case.pass_s(4.0)
    named = case.ask(target="a")
    await turn()
    assert named.result() == "a" and not waits.done()
    await case.pass_s(1.5)
    assert isinstance(waits.exception(), NoReplicaLeft), "the other call has not lengthened its wait"
    await case.end()
