"""A replica takes other settings while it runs: a bad user_config changes nothing, and nothing raises."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app import reconfigure
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings
from serve_app.reconfigure import LiveSettings
from serve_app.replica.engine_factory import refused_while_running

ACME = {"name": "acme", "key_sha256": ["a" * 64]}


class Board:
    """Notices by name; out of reach when told so."""

    def __init__(self) -> None:
        self.notices: dict[str, dict[str, Any]] = {}
        self.reachable = True

    def post(self, app: str, kind: str, name: str, notice: dict[str, Any]) -> None:
        assert (app, kind) == ("app", "configuration")
        if not self.reachable:
            raise ConnectionError
        self.notices[name] = notice

    def clear(self, app: str, kind: str) -> None:
        if not self.reachable:
            raise ConnectionError
        self.notices.clear()

    def remove(self, app: str, kind: str, name: str) -> None:
        self.notices.pop(name, None)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board()
    monkeypatch.setattr(reconfigure, "post", made.post)
    monkeypatch.setattr(reconfigure, "remove", made.remove)
    monkeypatch.setattr(reconfigure, "clear", made.clear)
    return made


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, board: Board) -> Any:
    """Make the settings of a replica that Serve starts with a user_config."""

    def started(user_config: Any = None, **args: Any) -> LiveSettings:
        context = SimpleNamespace(
            app_name="app",
            deployment="Ingress",
            replica_id=SimpleNamespace(unique_id="r1"),
            _deployment_config=SimpleNamespace(user_config=user_config),
        )
        monkeypatch.setattr(reconfigure.serve, "get_replica_context", lambda: context)
        return asyncio.run(LiveSettings.start(args, refused_while_running))

    return started


class Applied(list[AppConfig]):
    """Remembers what was put into force."""

    async def __call__(self, config: AppConfig) -> None:
        self.append(config)


def test_a_replica_starts_with_the_user_config_or_not_at_all(start: Any) -> None:
    """No request finds settings of args that the user_config replaces; a bad one ends the start."""
    assert start({"policy": "lmetric"}, policy="sglang").config.policy == "lmetric"
    with pytest.raises(BadSettings, match="did you mean policy"):
        start({"polcy": "lmetric"})


def test_what_the_engine_cannot_follow_is_refused(start: Any, board: Board) -> None:
    """vLLM's cache has no shares: a share that is given while it runs is told, and changes nothing."""
    shared = {"tenants": [{**ACME, "cache_share": 2}]}
    with pytest.raises(BadSettings, match="cache_share"):
        start(shared, engine="vllm")
    settings, applied = start({"tenants": [ACME]}, engine="vllm"), Applied()
    assert asyncio.run(settings.reconfigure(shared, applied)) is False
    assert applied == []
    assert "cache_share: with engine=vllm" in board.notices["Ingress r1"]["why"]
    assert asyncio.run(start({"tenants": [ACME]}, engine="torch").reconfigure(shared, applied)) is True


def test_a_replica_that_starts_takes_down_what_is_over(start: Any, board: Board) -> None:
    """The settings that it could use are everybody's; a replica that is gone takes no notice down."""
    board.notices["Ingress gone"] = {"accepted": False}
    with pytest.raises(BadSettings):
        start({"polcy": "lmetric"})
    assert board.notices
    start()
    assert not board.notices
    board.reachable = False
    assert start().config == AppConfig()


def test_a_good_one_is_applied_once_and_a_bad_one_never(start: Any, board: Board) -> None:
    """After a bad one the old settings are in force and the notice says why, until a good one comes.

    docs/cluster.md
    """
    live, applied = start(), Applied()

    async def run() -> None:
        assert await live.reconfigure({}, applied)
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert [config.policy for config in applied] == ["lmetric"]
        for bad in ({"policy": "best"}, {"model": "small"}, ["x"], {"tenants": 3}):
            assert not await live.reconfigure(bad, applied)
        assert live.config.policy == "lmetric" and len(applied) == 1 and live.refused == 4
        assert board.notices["Ingress r1"]["accepted"] is False
        assert "tenants" in board.notices["Ingress r1"]["why"] == live.why
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert board.notices == {} and len(applied) == 1 and live.why == ""
        assert await live.reconfigure({}, applied)
        assert live.config.policy == AppConfig().policy and len(applied) == 2

    asyncio.run(run())


def test_nothing_raises_whatever_fails(start: Any, board: Board) -> None:
    """Neither a fault in what is behind the settings nor a notice board that is away ends a replica."""
    live = start()

    async def fail(config: AppConfig) -> None:
        raise RuntimeError("secret details")

    async def run() -> None:
        assert not await live.reconfigure({"policy": "lmetric"}, fail)
        assert "secret" not in board.notices["Ingress r1"]["why"]
        board.reachable = False
        assert not await live.reconfigure({"policy": "best"}, fail)
        assert live.config == AppConfig()

    asyncio.run(run())


def test_an_instance_never_opens_to_everybody_while_it_runs(start: Any, board: Board) -> None:
    """A user_config that lost its tenants is a mistake, and not an invitation."""
    live, applied = start({"tenants": [ACME]}), Applied()
    assert not asyncio.run(live.reconfigure({}, applied))
    assert live.config.tenants and "everybody" in board.notices["Ingress r1"]["why"]


def test_a_salt_never_changes_silently(start: Any, board: Board) -> None:
    """A tenant that gets another trust group loses what it had cached, and the notice names it."""
    live, applied = start({"tenants": [ACME]}), Applied()
    assert asyncio.run(live.reconfigure({"tenants": [{**ACME, "trust_group": "g"}]}, applied))
    assert board.notices["Ingress r1"]["accepted"] is True
    assert "acme" in board.notices["Ingress r1"]["why"]
