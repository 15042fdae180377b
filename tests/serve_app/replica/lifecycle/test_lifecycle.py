"""A replica's reactions to a stop, real or only supposed, and its notices. No Ray runs."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from router.serve.core_registry import RunningReplicas
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.replica.lifecycle import departure, lifecycle
from serve_app.replica.lifecycle.lifecycle import Lifecycle
from serve_app.replica.lifecycle.receipt import MoveMeters
from serve_app.replica.running_calls import RunningCalls
from serve_app.replica.token_channel import TokenSender
from tests.serve_app.replica.lifecycle.peers import SIZE, Local, fill, make_engine

pytestmark = pytest.mark.anyio


class Stage:
    """A replica called "me", and the peers of ``local``; ``posted``: the states of its notices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: TorchEngine, local: Local) -> None:
        self.posted: asyncio.Queue[str] = asyncio.Queue()
        self.running = local.running = RunningReplicas()
        self._engine, self._local = engine, local
        context = SimpleNamespace(
            app_name="app",
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
    engine._cache.pin(b"key", fill(engine, [1] * 40), None)
    stage = Stage(monkeypatch, engine, Local({"peer": peer}))
    mine = stage.open()
    stage.running.heard(["me", "peer"])
    await asyncio.sleep(0)
    stage.running.heard(["peer"])
    assert await stage.said() == "running"
    assert list(peer._cache.pins) == [b"key"]
    stage.running.heard(["me", "peer"])
    assert await stage.said() == "returned"
    peer._cache.unpin(b"key")
    await mine.finish()
    assert (await stage.said(), await stage.said()) == ("running", "done")
    assert list(peer._cache.pins) == [b"key"]


async def test_the_last_notice_says_that_it_is_over_though_no_peer_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fill(engine, [1] * 40)
    stage = Stage(monkeypatch, engine, Local({"peer": make_engine()}, {"peer": 0}))
    mine = stage.open()
    stage.running.heard(["me", "peer"])
    await mine.finish()
    assert (await stage.said(), await stage.said()) == ("running", "done")


async def test_without_peers_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, make_engine(), Local({}))
    await stage.open().finish()
    await asyncio.sleep(0)
    assert stage.posted.empty()
