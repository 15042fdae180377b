"""A replica's sessions before a real engine: a context that does not fit waits there, is told so, and then starts."""

import asyncio
from dataclasses import replace

from router.protocol.block_hash import extend_chain
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import EngineRequest
from serve_app.replica.session_gate import SessionGate
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import Collector, prompt, request, root_of, run_all
from tests.serve_app.sessions.test_sessions import Clock

POOL_BLOCKS = 64


def asked(name: str, seed: int, tenant: str) -> EngineRequest:
    """A request of 640 tokens, more than half of the pool, as a router sends it."""
    made = request(name, prompt(640, seed), 4, tenant=tenant)
    return replace(made, block_hashes=extend_chain(root_of(made.scope), 0, made.token_ids, 16))


def test_a_context_that_does_not_fit_waits_and_says_why(make_engine: MakeEngine) -> None:
    """Until the session before it is left; the engine computes nothing of it meanwhile, and all of it then."""
    engine, clock = make_engine(num_blocks=POOL_BLOCKS), Clock()
    gate = SessionGate(engine, AppConfig(model="demo"), clock=clock)

    async def run() -> None:
        first, second = asked("first", 1, "acme"), asked("second", 2, "acme")
        assert gate.begin(first, name="one") is None
        run_all(engine, [first])
        gate.end("first", 4)
        held = gate.begin(second, name="two")
        assert held is not None
        waiting = Collector()
        engine.submit(replace(second, remote_kv=held), waiting)
        run_all(engine, [request("other", prompt(20, 3), 2)])  # others are served
        clock.now_s = 100.0
        told = gate.report(None)
        assert [(row["session"], row["state"]) for row in told["rows"]] == [("two", "waiting"), ("one", "paused")]
        assert told["rows"][0]["waited_s"] == 100.0
        assert told["rows"][0]["why"] == (
            "It waits for room: live sessions hold 644 of 1,024 tokens, and it needs 640."
        )
        assert "second" not in waiting.tokens
        running = asyncio.create_task(gate.run())
        await asyncio.sleep(0)
        clock.now_s = 120.0  # as long as a session is live that nothing is known of
        third = asked("third", 4, "globex")
        assert gate.begin(third) is not None, "by its arrival it is behind the second"
        await asyncio.to_thread(waiting.wait, ["second"])
        assert waiting.finish["second"] == "length"
        states = {row["session"]: row["state"] for row in gate.report("acme")["rows"]}
        assert states == {"two": "running", "one": "left"}
        gate.end("second", 4)
        gate.end("third", 0)
        running.cancel()

    asyncio.run(run())
