"""Sessions before a real engine: contexts that would evict live ones wait in its queue, and may end there."""

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import TokenArray, hash_blocks
from router.protocol.events import StatsReport
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest
from serve_app.replica.session_gate import LOOK_S, SessionGate
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import Collector, prompt, request, sample
from tests.serve_app.sessions.test_sessions import Clock

pytestmark = pytest.mark.anyio

POOL_BLOCKS = 64
PAUSE_S = 125.0


class Bench:
    """An engine with space for a context of 600 tokens and a small one, and its gate on the test's clock."""

    def __init__(self, engine: TorchEngine, wait_s: float = 1000.0, host_blocks: int = 0) -> None:
        self.engine = engine
        self.clock = Clock()
        config = AppConfig(session_wait_s=wait_s, host_cache_bytes=host_blocks * engine.kv_block_bytes)
        self.gate = SessionGate(engine, config, clock=self.clock)
        self.told = Collector()

    def submit(self, name: str, ids: TokenArray, session: str = "", system_tokens: int = 0, **more: Any) -> bool:
        """Submit a request as a replica does; return whether it waits for space."""
        item: EngineRequest = request(name, ids, 4)
        item = structs.replace(
            item,
            block_hashes=hash_blocks(item.root, item.token_ids, 16),
            session=session,
            system_tokens=system_tokens,
            **more,
        )
        held = self.gate.begin(item)
        self.engine.submit(structs.replace(item, remote_kv=held), self.told)
        return held is not None

    async def ended(self, name: str) -> None:
        """Wait for the end of a request, and report it, as a replica does."""
        await asyncio.to_thread(self.told.wait, [name])
        self.gate.end(name, 4)

    def figure(self, name: str, **labels: str) -> float:
        """Return one of the gate's figures."""
        wanted = tuple(labels.items())
        return sum(value for found, given, value in self.gate.samples() if found == name and given == wanted)


@pytest.fixture
def bench(make_engine: MakeEngine) -> Bench:
    return Bench(make_engine(num_blocks=POOL_BLOCKS))


def other(seed: int, tokens: int = 600) -> TokenArray:
    """Return another prompt for each seed."""
    return np.roll(prompt(tokens), 7 * seed + 1)


async def test_a_context_waits_while_another_session_is_about_to_return(bench: Bench) -> None:
    assert not bench.submit("a", prompt(600))
    await bench.ended("a")
    assert not bench.submit("busy", other(4, 16)), "its prompt is computed until its end here"
    assert bench.submit("b", other(1))
    await asyncio.to_thread(bench.told.wait, ["busy"])
    assert bench.engine.load().waiting_sequences == 1
    bench.clock.now_s = 5.0
    assert not bench.submit("a2", np.concatenate([prompt(600), other(2, 16)])), "a return never waits"
    await bench.ended("a2")
    assert bench.told.cached["a2"] == 592, "its context is still cached"
    assert bench.figure("warmpath_sessions", state="waiting") == 1
    assert bench.figure("warmpath_session_returns_total", outcome="hit") == 1
    bench.clock.now_s += PAUSE_S
    await bench.ended("busy")
    await bench.ended("b")
    assert bench.engine.load().waiting_sequences == 0
    assert bench.figure("warmpath_wait_seconds_sum", place="session") == 5.0 + PAUSE_S


async def test_none_waits_for_a_pool_that_is_unknown(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of others tells its size once it is found, after its gate begins."""
    config = AppConfig(engine="remote", workers=["http://127.0.0.1:1"], session_wait_s=1000.0)
    with monkeypatch.context() as unknown:
        unknown.setattr(bench.engine, "stats", lambda: StatsReport(()))
        bench.gate = SessionGate(bench.engine, config, clock=bench.clock)
        for name in ("a", "b"):
            assert not bench.submit(name, other(ord(name)), name)
    for name in ("a", "b"):
        await bench.ended(name)
    bench.clock.now_s = LOOK_S
    assert not bench.submit("c", other(1), "c")
    await bench.ended("c")
    assert bench.submit("d", other(2), "d")
    assert bench.gate.close("default", ["c"]) == 1
    await bench.ended("d")


async def test_a_first_token_lets_it_start_in_time(bench: Bench) -> None:
    """A prompt that takes as long as another session's answer delays nobody once it has been computed."""
    assert not bench.submit("a", prompt(600))
    assert bench.submit("b", other(1))
    task = asyncio.create_task(bench.gate.run())
    await asyncio.to_thread(bench.told.wait, ["a"])
    assert bench.figure("warmpath_sessions", state="waiting") == 1
    bench.gate.first_token("a")
    bench.clock.now_s = 1.0
    await bench.ended("b")
    assert bench.figure("warmpath_sessions", state="running") == 1, "the other one has not ended"
    task.cancel()


async def test_time_alone_lets_it_start(bench: Bench) -> None:
    """The gate checks again by itself when the hold of the last session ends."""
    assert not bench.submit("a", prompt(600))
    await bench.ended("a")
    assert bench.submit("b", other(1))
    bench.clock.now_s = PAUSE_S
    task = asyncio.create_task(bench.gate.run())
    await bench.ended("b")
    task.cancel()


async def test_a_closed_session_makes_space_at_once(bench: Bench) -> None:
    """One whose request runs closes with its end. Neither says anything about the pauses of others."""
    assert not bench.submit("a", prompt(600), "one")
    await bench.ended("a")
    assert bench.submit("b", other(1), "two")
    others = (("other", "one"), ("default", "none"), ("default", ""))
    assert [bench.gate.close(tenant, [name]) for tenant, name in others] == [0, 0, 0]
    assert bench.engine.load().waiting_sequences == 1
    assert bench.gate.close("default", ["one"]) == 1
    assert bench.gate.close("default", ["two"]) == 0
    await bench.ended("b")
    assert bench.gate.sessions.all() == []
    assert not bench.submit("c", other(2))
    await bench.ended("c")


async def test_a_last_answer_closes_its_session(bench: Bench) -> None:
    """It needs no name."""
    assert not bench.submit("a", prompt(600), final=True)
    assert bench.submit("b", other(1))
    await bench.ended("a")
    await bench.ended("b")
    assert len(bench.gate.sessions.all()) == 1


async def test_a_closed_sessions_own_blocks_go_first_with_its_answer(make_engine: MakeEngine) -> None:
    """What it shares with another session stays, and its system prompt, which nobody else has used yet."""
    bench, system = Bench(make_engine(num_blocks=POOL_BLOCKS), wait_s=0.0), prompt(160)
    alone, shares = (np.concatenate([head, other(3, 160)]) for head in (system, other(5, 160)))
    beside = np.concatenate([other(5, 160), other(7, 160)])
    for name, ids, tokens in (("alone", alone, 160), ("beside", beside, 0), ("shares", shares, 0)):
        bench.submit(name, ids, name, tokens)
        await bench.ended(name)
    assert bench.gate.close("default", ["alone", "shares"]) == 2
    bench.submit("new", other(9, 450))
    await bench.ended("new")
    chains = [hash_blocks(request("x", ids).root, ids, 16) for ids in (alone, shares, beside)]
    held = [bench.engine.cached_blocks(chain, 20) for chain in chains]
    assert held[0] >= 10 and held[1] >= 10 and held[2] == 20
    assert held[0] + held[1] < 30, "the oldest go first, but what is closed before them"


async def test_a_request_that_leaves_while_waiting_holds_nothing(bench: Bench) -> None:
    assert not bench.submit("a", prompt(600))
    await bench.ended("a")
    assert bench.submit("b", other(1))
    bench.engine.cancel("b")
    await bench.ended("b")
    bench.clock.now_s = PAUSE_S
    assert not bench.submit("c", other(2))
    await bench.ended("c")
    assert sample(bench.engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert sum(session.own_tokens for session in bench.gate.sessions.all()) == 2 * 604


async def test_without_a_wait_nothing_waits(make_engine: MakeEngine) -> None:
    bench = Bench(make_engine(num_blocks=POOL_BLOCKS), wait_s=0.0)
    for number in range(3):
        assert not bench.submit(str(number), other(number))
        await bench.ended(str(number))


async def test_the_hosts_memory_is_room_too(make_engine: MakeEngine) -> None:
    bench = Bench(make_engine(num_blocks=POOL_BLOCKS), host_blocks=POOL_BLOCKS)
    waits = []
    for number in range(4):
        waits.append(bench.submit(str(number), other(number)))
        if not waits[-1]:
            await bench.ended(str(number))
    assert waits == [False, False, False, True]
    bench.engine.cancel("3")
    await bench.ended("3")


async def test_waiting_sessions_are_reported_with_the_reason(bench: Bench) -> None:
    """The reason has admission's own numbers; at its turn it runs, and the previous session has left."""
    bench.submit("first", other(1))
    await bench.ended("first")
    assert bench.submit("second", other(2))
    bench.clock.now_s += 1e-6
    told = bench.gate.report(None)
    assert [row["state"] for row in told["rows"]] == ["waiting", "paused"]
    assert told["rows"][0]["waited_s"] == 0.0
    assert told["rows"][0]["why"] == "It waits for space: live sessions hold 604 of 1,024 tokens, and it needs 600."
    running = asyncio.create_task(bench.gate.run())
    bench.clock.now_s += PAUSE_S
    await asyncio.to_thread(bench.told.wait, ["second"])
    assert [row["state"] for row in bench.gate.report(None)["rows"]] == ["running", "left"]
    bench.gate.end("second", 4)
    running.cancel()


async def test_an_unstored_request_is_no_session(bench: Bench) -> None:
    """Its KV does not outlive the answer, so it neither waits nor makes others wait."""
    for name in "ab":
        item = structs.replace(request(name, other(ord(name)), 4), store_kv=False)
        item = structs.replace(item, block_hashes=hash_blocks(item.root, item.token_ids, 16))
        assert bench.gate.begin(item) is None
        bench.gate.end(name, 4)
    assert bench.gate.sessions.all() == []


async def test_a_tenant_that_lies_in_every_hint_takes_nothing_from_another(make_engine: MakeEngine) -> None:
    """Its sessions never close, have parents in a circle, end with each answer, and promise endless ones."""
    bench = Bench(make_engine(num_blocks=POOL_BLOCKS))
    bench.engine.set_tenant_shares({"polite": 1.0, "liar": 1.0})
    bench.gate.set_shares({"polite": 1.0, "liar": 1.0})
    turn = prompt(160)
    for number in range(60):
        lies: dict[str, Any] = {"parent": str((number + 1) % 60), "expected_tokens": 4, "final": number % 2 == 0}
        bench.submit(f"l{number}", other(number, 300), str(number), tenant="liar", **lies)
        if number % 6 == 0:
            turn = np.concatenate([turn, other(100 + number, 16)])
            assert not bench.submit(f"p{number}", turn, "own", tenant="polite"), "it waits for nobody's lies"
            await bench.ended(f"p{number}")
            if number:
                assert bench.told.cached[f"p{number}"] >= len(turn) - 32, "all that its last turn left"
        bench.clock.now_s += 5.0
        for name in [name for name in bench.told.finish if name.startswith("l")]:
            bench.gate.end(name, 4)
    assert len(bench.gate.sessions.all("polite")) == 1
    assert len(bench.gate.sessions.all("liar")) <= 60
