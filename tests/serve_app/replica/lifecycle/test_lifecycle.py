"""A replica's reactions to a stop, real or only supposed, its notices, its departure, and real engines. No Ray."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from router.serve.core_registry import RunningReplicas
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import Save
from serve_app.engine.token_channel import TokenSender
from serve_app.replica.lifecycle import lifecycle
from serve_app.replica.lifecycle import lifecycle as departure
from serve_app.replica.lifecycle.handover import HandOver, MoveMeters, Receipt
from serve_app.replica.lifecycle.lifecycle import MISSING_S, NOTICED_S, Departure, Lifecycle
from serve_app.replica.lifecycle.prewarm import Prewarm
from serve_app.replica.running_calls import RunningCalls
from tests.harness.eventually import let_others_run
from tests.harness.virtual_time import passes, run_at_once
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import Collector, prompt, request, run_all
from tests.serve_app.replica.lifecycle.peers import SIZE, Local, fill, make_engine
from tests.serve_app.replica.lifecycle.test_prewarm import no_adapter

pytestmark = pytest.mark.anyio


class Stage:
    """A replica called "me", and the peers of ``local``; ``posted``: the states of its notices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: TorchEngine, local: Local) -> None:
        self.posted: asyncio.Queue[str] = asyncio.Queue()
        self.running = local.running = RunningReplicas()
        self._engine, self._local = engine, local
        context = SimpleNamespace(
            app_name="app",
            deployment="Replica",
            replica_id=SimpleNamespace(unique_id="me"),
            _deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=60.0),
        )
        monkeypatch.setattr(lifecycle.serve, "get_replica_context", lambda: context)
        monkeypatch.setattr(lifecycle.notices, "post", self._post)
        monkeypatch.setattr(departure, "MISSING_S", 0.05)

    def open(self) -> Lifecycle:
        self._loop = asyncio.get_running_loop()
        adapters: Any = SimpleNamespace(loaded=tuple)
        running = RunningCalls(TokenSender(), self._engine.cancel)
        config = AppConfig(block_size=SIZE)
        return Lifecycle(config, self._engine, adapters, self._local, running, MoveMeters())

    async def said(self) -> str:
        return await asyncio.wait_for(self.posted.get(), 60)

    def _post(self, app_name: str, kind: str, name: str, notice: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self.posted.put_nowait, notice["state"])


async def test_one_that_returns_says_so_and_hands_its_saves_over_again_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer's pin from the first time may have expired in the meantime."""
    engine, peer = make_engine(pins=40), make_engine(pins=40)
    fill(peer, [1] * 40)
    engine.cache.pin(b"key", fill(engine, [1] * 40), None)
    stage = Stage(monkeypatch, engine, Local({"peer": peer}))
    mine = stage.open()
    stage.running.heard(["me", "peer"])
    await let_others_run()
    stage.running.heard(["peer"])
    assert await stage.said() == "running"
    assert list(peer.cache.pins) == [b"key"]
    stage.running.heard(["me", "peer"])
    assert await stage.said() == "returned"
    peer.cache.unpin(b"key")
    await mine.finish()
    assert (await stage.said(), await stage.said()) == ("running", "done")
    assert list(peer.cache.pins) == [b"key"]


async def test_the_last_notice_says_that_it_is_over_though_no_peer_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fill(engine, [1] * 40)
    stage = Stage(monkeypatch, engine, Local({"peer": make_engine()}, {"peer": 0}))
    mine = stage.open()
    stage.running.heard(["me", "peer"])
    await mine.finish()
    assert (await stage.said(), await stage.said()) == ("running", "done")


async def test_without_peers_it_says_that_it_leaves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the last replica of a model at zero: the page would take it for one that died."""
    stage = Stage(monkeypatch, make_engine(), Local({}))
    await stage.open().finish()
    await let_others_run()
    assert await stage.said() == "done"
    assert stage.posted.empty()


WAIT_S = 4 * MISSING_S


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (["other"], []),
        (["me other", "other", "wait", ""], ["leave"]),
        (["me", "", "me"], []),
        (["me", "", "wait", "me"], ["leave", "stay"]),
        (["me", "reconfigure", "", "wait", "reconfigured", "me"], []),
        (["me", "reconfigure", "", "wait", "reconfigured"], ["leave"]),
        (["me", "", "turn", "stopped"], ["leave"]),
        (["me", "turn", "stopped", "me other", "other"], ["leave"]),
    ],
    ids=[
        "one that starts", "missing for long, once", "returns soon", "returns late", "returns after a reconfigure",
        "leaves after a reconfigure", "stopped while missing", "stopped while listed, and listed again",
    ],
)  # fmt: skip
def test_an_absence_is_an_end_when_it_lasts(steps: list[str], told: list[str]) -> None:
    """Steps are the running replicas, or other events. Serve may stop one before its absence is long enough."""
    calls: list[str] = []

    async def run() -> None:
        replicas, loop = RunningReplicas(), asyncio.get_running_loop()
        departure = Departure("me", lambda _: calls.append("leave"), lambda: calls.append("stay"), loop)
        replicas.listen(departure.heard)
        with ExitStack() as reconfigures:
            for step in steps:
                match step:
                    case "wait":
                        await passes(WAIT_S)
                    case "turn":
                        await let_others_run()
                    case "reconfigure":
                        reconfigures.enter_context(departure.reconfiguring())
                    case "reconfigured":
                        reconfigures.close()
                    case "stopped":
                        departure.stopped()
                    case names:
                        replicas.heard(names.split())
        await passes(WAIT_S)
        assert departure.leaving == (calls[-1:] == ["leave"])

    run_at_once(run())
    assert calls == told


def test_time_away_in_a_reconfigure_is_not_taken_from_the_time_to_leave() -> None:
    async def run() -> None:
        loop, left = asyncio.get_running_loop(), list[float]()
        departure = Departure("me", left.append, lambda: None, loop)
        departure.heard({"me"})
        with departure.reconfiguring():
            departure.heard(set())
            await passes(WAIT_S)
            ended_s = loop.time()
        await passes(WAIT_S)
        assert left[0] >= ended_s - NOTICED_S

    run_at_once(run())


def test_moved_kv_is_computed_kv(make_engine: MakeEngine, reference: Reference) -> None:
    """KV is handed over while a stream runs, then copied by a joining replica; the save survives both."""
    first, second, third = (make_engine(pin_budget_blocks=64) for _ in range(3))
    ids, saved = prompt(200), prompt(100, 3)
    run_all(first, [request("a", ids, 1), structs.replace(request("b", saved, 1), saves=(Save(b"key", 96),))])
    stream = Collector()
    first.submit(request("stream", prompt(40, 4), 300), stream)
    stream.wait_tokens("stream", 3)
    receipt = Receipt()

    peers = Local({"peer": second})
    asyncio.run(HandOver(first, peers, 16, lambda: True, receipt).run(["peer"], 60.0))
    assert receipt.saves == 1
    assert receipt.bytes == receipt.blocks.total() * first.kv_block_bytes
    prewarm = Prewarm(third, peers, no_adapter, AppConfig(prewarm_timeout_s=60.0))
    assert asyncio.run(prewarm.run(["peer"])).blocks["save"] == 6
    for name, engine in (("second", second), ("third", third)):
        got = run_all(engine, [request(name, ids, 8), request(f"{name} saved", saved, 8)])
        assert got.cached == {name: 192, f"{name} saved": 96}
        assert got.tokens[name] == reference("qwen3", ids, 8)
        assert got.tokens[f"{name} saved"] == reference("qwen3", saved, 8)
    again = run_all(second, [structs.replace(request("again", saved, 1), saves=(Save(b"key", 96),))])
    assert again.cached["again"] == 96
    stream.wait(["stream"])
    assert stream.tokens["stream"] == reference("qwen3", prompt(40, 4), 300)
