"""Replicas use the weights of tenants that operators set: soon, also if they start later, and over the settings'."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from router.background import run_in_background
from serve_app.config.app import AppConfig
from serve_app.tenancy import weights
from serve_app.tenancy.weights import TenantWeights, post_weights, stored_weights
from tests.serve_app.tenancy.test_registry import Ingress, settings


class Stage:
    """A board in a dictionary, ingresses that post there, and replicas that look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self.file, self.board, self.tasks = file, dict[str, Any](), list[asyncio.Task[None]]()
        self.fail = 0
        monkeypatch.setattr(weights, "post", self.post)
        monkeypatch.setattr(weights, "read", lambda board, kind: [self.board[board]] if board in self.board else [])
        monkeypatch.setattr(weights, "LOOK_S", 0.001)
        monkeypatch.setattr("router.background.PAUSE_S", 0.001)

    def post(self, board: str, kind: str, name: str, notice: dict[str, Any]) -> None:
        if self.fail:
            self.fail -= 1
            raise ConnectionError("no GCS")
        self.board[board] = notice

    async def ingress(self, config: AppConfig) -> Ingress:
        one = Ingress(self.file, config)
        await one.follow()
        self.tasks.append(run_in_background(lambda: post_weights("app", one.registry)))
        return one

    def replica(self, declared: Mapping[str, float]) -> "Replica":
        one = Replica(declared)
        self.tasks.append(run_in_background(lambda: one.weights.follow("app")))
        return one

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Replica:
    def __init__(self, declared: Mapping[str, float]) -> None:
        self.used, self.changed, self.fail = dict[str, float](), asyncio.Event(), 0
        self.weights = TenantWeights(declared, self.use)

    async def use(self, shares: Mapping[str, float]) -> None:
        if self.fail:
            self.fail -= 1
            raise ConnectionError("the engine is busy")
        self.used = dict(shares)
        self.changed.set()

    async def until(self, shares: Mapping[str, float]) -> None:
        while self.used != shares:
            self.changed.clear()
            async with asyncio.timeout(10):
                await self.changed.wait()


def test_replicas_learn_the_weights_in_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tenants with a weight and without, since a tenant that is unknown there has no share of saved prompts."""

    async def run() -> None:
        stage = Stage(monkeypatch, tmp_path / "db")
        one = await stage.ingress(settings("acme", "globex"))
        early = stage.replica({"acme": 1.0, "globex": 1.0})
        await early.until({"acme": 1.0, "globex": 1.0})
        stage.fail = early.fail = 2
        await one.registry.change("o", lambda edit: edit.add_tenant("b", {"cache_share": 3}))
        await one.registry.change("o", lambda edit: edit.add_tenant("c", {}))
        await one.registry.change("o", lambda edit: edit.set_tenant("acme", {"cache_share": 5}))
        await one.registry.change("o", lambda edit: edit.set_tenant("globex", {"tokens_per_minute": 5}))
        both = {"acme": 5.0, "globex": 1.0, "b": 3.0, "c": 1.0}
        await early.until(both)
        late = stage.replica({"acme": 1.0, "globex": 1.0})
        await late.until(both)
        await early.weights.declare({"acme": 2.0, "globex": 4.0})
        assert early.used == {"acme": 5.0, "globex": 4.0, "b": 3.0, "c": 1.0}
        await one.registry.change("o", lambda edit: edit.reset_tenant("acme"))
        await one.registry.change("o", lambda edit: edit.remove_tenant("b"))
        await early.until({"acme": 2.0, "globex": 4.0, "c": 1.0})
        await stage.end()

    asyncio.run(run())


def test_an_ingress_that_cannot_read_posts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take away what others have posted. One that reads posts, even that there is nothing any more."""

    async def run() -> None:
        unread = Ingress(tmp_path / "db", settings("acme"))
        assert stored_weights(unread.registry) is None
        stage = Stage(monkeypatch, tmp_path / "db")
        stage.board["app"] = {"weights": {"of an earlier deployment": 7.0}}
        task = run_in_background(lambda: post_weights("app", unread.registry))
        replica = stage.replica({"acme": 1.0})
        await replica.until({"acme": 1.0, "of an earlier deployment": 7.0})
        stage.tasks.append(task)
        await stage.ingress(settings("acme"))
        await replica.until({"acme": 1.0})
        await stage.end()

    asyncio.run(run())
