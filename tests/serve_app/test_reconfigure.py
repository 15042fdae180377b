"""A replica takes other settings while it runs: a bad user_config changes nothing, and nothing raises."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app import reconfigure
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings
from serve_app.reconfigure import LiveSettings
from serve_app.replica.engine_factory import refused_while_running

ACME = {"name": "acme", "key_sha256": ["a" * 64]}


class Board(dict[str, dict[str, Any]]):
    """Notices by name; out of reach when told so."""

    reachable = True

    def change(self, what: str, app: str, kind: str, *rest: Any) -> None:
        assert (app, kind) == ("app", "configuration")
        if not self.reachable:
            raise ConnectionError
        if what == "post":
            self[rest[0]] = rest[1]
        elif what == "clear":
            self.clear()
        else:
            self.pop(rest[0], None)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board()
    for what in ("post", "remove", "clear"):
        monkeypatch.setattr(reconfigure, what, partial(made.change, what))
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
    with pytest.raises(BadSettings, match="cache_share"):
        start({"tenants": [{**ACME, "cache_share": 2}]}, engine="vllm")


@pytest.mark.parametrize(
    ("engine", "tenants", "accepted", "words"),
    [
        ("vllm", [{**ACME, "cache_share": 2}], False, "cache_share: with engine=vllm"),
        ("torch", [{**ACME, "cache_share": 2}], True, ""),
        ("torch", [], False, "everybody"),
        ("torch", [{**ACME, "trust_group": "g"}], True, "acme"),
    ],
    ids=["share", "share of the other engine", "none", "salt"],
)
def test_tenants_change_as_far_as_that_is_safe(
    start: Any, board: Board, engine: str, tenants: list[Any], accepted: bool, words: str
) -> None:
    """What the engine cannot follow is refused, as is an instance that is open to everybody; another salt is told.

    docs/cluster.md
    """
    settings, applied = start({"tenants": [ACME]}, engine=engine), Applied()
    assert asyncio.run(settings.reconfigure({"tenants": tenants}, applied)) is accepted
    assert len(applied) == accepted and settings.config.tenants
    notice = board.get("Ingress r1")
    assert (notice is None) == (words == "")
    assert notice is None or (notice["accepted"] is accepted and words in notice["why"])


def test_a_replica_that_starts_takes_down_what_is_over(start: Any, board: Board) -> None:
    """The settings that it could use are everybody's; a replica that is gone takes no notice down."""
    board["Ingress gone"] = {"accepted": False}
    with pytest.raises(BadSettings):
        start({"polcy": "lmetric"})
    assert board
    start()
    assert not board
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
        assert board["Ingress r1"]["accepted"] is False
        assert "tenants" in board["Ingress r1"]["why"] == live.why
        assert await live.reconfigure({"policy": "lmetric"}, applied)
        assert board == {} and len(applied) == 1 and live.why == ""
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
        assert "secret" not in board["Ingress r1"]["why"]
        board.reachable = False
        assert not await live.reconfigure({"policy": "best"}, fail)
        assert live.config == AppConfig()

    asyncio.run(run())
