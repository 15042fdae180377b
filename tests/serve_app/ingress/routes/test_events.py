"""GET /v1/cache/events over a real socket: each viewer's events, and the end of a stream."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import FirstToken
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.routes import event_stream as route
from serve_app.ingress.routes.application import make_application
from serve_app.tenants.tenants import Tenants, make_api_key
from tests.serve_app.ingress.scripted import PATIENCE_S, Loopback, partial_services
from tests.serve_app.live.test_live import Ingresses
from tests.serve_app.live.traffic import decision, generation, is_idle

PATH = "/v1/cache/events"
KEYS = {name: make_api_key() for name in ("a", "b", "operator")}


class Stage(Loopback):
    """One ingress on loopback with nothing behind it."""

    def __init__(self, tenants: tuple[str, ...]) -> None:
        configs = [TenantConfig(name=name, key_sha256=[KEYS[name][1]]) for name in tenants]
        operators = [KEYS["operator"][1]] if tenants else []
        self.tenants = Tenants(configs, b"s" * 32, operator_key_sha256=operators)
        self.drain = Drain()
        super().__init__(self._application)

    def _application(self) -> Any:
        self.live = Ingresses().first
        guard = RouteGuard(self.tenants, IngressMetrics(), self.drain)
        return make_application(
            partial_services(
                config=AppConfig(model="demo"), tenants=self.tenants, drain=self.drain, guard=guard, live=self.live
            )
        )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name, seconds in (("CHECK_S", 0.1), ("WAIT_S", 0.05)):
        monkeypatch.setattr(route, name, seconds)
    with Stage(("a", "b")) as made:
        yield made


def auth(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name][0]}"}


@contextmanager
def stream(stage: Stage, name: str) -> Iterator[Iterator[str]]:
    with httpx.stream("GET", stage.url + PATH, headers=auth(name), timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.iter_lines()


def following(lines: Iterator[str], kind: str) -> dict[str, Any]:
    for line in lines:
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if event["type"] == kind:
                return event
    raise AssertionError(f"the stream ended without {kind}")


def test_a_stream_has_retry_ids_heartbeats_and_each_viewers_part(stage: Stage) -> None:
    """A browser's EventSource reads it; one tenant's decision goes to it and to operators, not to another tenant."""

    def first_token(tenant: str) -> None:
        stage.live.delivered(generation(tenant, [1, 2]), decision(), FirstToken(0), 0.5)

    with stream(stage, "a") as mine, stream(stage, "operator") as all_of_it:
        assert next(mine) == "retry: 2000"
        assert following(mine, "snapshot")["tenant"] == "a"
        assert following(all_of_it, "snapshot")["viewer"] == "operator"
        assert ":" in (next(mine) for _ in range(100))
        stage.call(lambda: first_token("b"))
        stage.call(lambda: first_token("a"))
        assert following(mine, "decision")["tenant"] == "a"
        assert [following(all_of_it, "decision")["tenant"] for _ in range(2)] == ["b", "a"]
    deadline_s = time.monotonic() + PATIENCE_S
    while not stage.call(lambda: is_idle(stage.live)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_once_is_the_snapshot_alone(stage: Stage) -> None:
    """It is for scripts. Without keys everybody sees everything, because an open deployment has one tenant."""
    for name in ("a", "operator"):
        once = httpx.get(f"{stage.url}{PATH}?once=true", headers=auth(name)).json()
        assert (once["type"], once["viewer"]) == ("snapshot", "operator" if name == "operator" else "tenant")
    assert httpx.get(f"{stage.url}{PATH}?once=maybe", headers=auth("a")).status_code == 400
    assert stage.call(lambda: is_idle(stage.live))
    with Stage(()) as of_everybody:
        assert httpx.get(f"{of_everybody.url}{PATH}?once=true").json()["viewer"] == "operator"


def test_a_stream_ends_with_its_key(stage: Stage) -> None:
    """The stream gives the reason; the other tenant's continues."""
    with stream(stage, "a") as mine, stream(stage, "b") as other:
        following(other, "snapshot")
        left = [TenantConfig(name="b", key_sha256=[KEYS["b"][1]])]
        stage.call(lambda: stage.tenants.configure(left, [KEYS["operator"][1]]))
        assert following(mine, "end")["reason"] == "key"
        stage.call(lambda: stage.live.delivered(generation("b", [1]), decision(), FirstToken(0), 0.5))
        assert following(other, "decision")["tenant"] == "b"


def test_a_stop_waits_for_no_stream(stage: Stage) -> None:
    """This includes a stream with a reader that takes nothing: soon after, no answers are in progress."""
    with stream(stage, "a") as mine, stream(stage, "b") as stuck:
        following(stuck, "snapshot")
        stage.call(stage.live.close)
        assert stage.call(lambda: stage.drain.run(PATIENCE_S)) == 0
        assert following(mine, "end")["reason"] == "stopping"
        assert httpx.get(stage.url + PATH, headers=auth("a")).status_code == 503
    assert stage.call(lambda: is_idle(stage.live))
