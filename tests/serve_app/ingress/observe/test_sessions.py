"""GET /v1/cache/sessions: each key sees its own, for any number of clients; replicas are asked once a second."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.errors import Overloaded
from serve_app.ingress.observe import sessions as module
from serve_app.ingress.observe.sessions import SessionList
from serve_app.ingress.routes.application import make_application
from serve_app.sessions.report import session_report
from serve_app.tenants.tenants import make_api_key
from tests.serve_app.ingress.routes.test_application import services_of
from tests.serve_app.sessions.test_admission import Bench

PATH = "/v1/cache/sessions"
KEYS = {name: make_api_key() for name in ("acme", "globex", "operator")}
TENANTS = [TenantConfig(name=name, key_sha256=[KEYS[name][1]]) for name in ("acme", "globex")]
CLOSED = AppConfig(model="demo", tenants=TENANTS, operator_key_sha256=[KEYS["operator"][1]])


class Replicas:
    """Two replicas with sessions of their own: ``r1`` of both tenants, ``r2`` of acme alone."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.benches = {"r1": Bench(), "r2": Bench()}
        for name, tokens, tenant in (("r1", 100, "acme"), ("r1", 200, "globex"), ("r2", 300, "acme")):
            bench = self.benches[name]
            bench.end(bench.arrive(tokens, tenant))
            bench.clock.now_s += 10.0

    async def __call__(self, method: str, tenant: str | None, timeout_s: float) -> list[Any]:
        assert method == "sessions"
        self.asked.append(tenant)
        await asyncio.sleep(0)
        return [
            {"replica": name, **session_report(bench.sessions, bench.admission, tenant, bench.clock())}
            for name, bench in self.benches.items()
        ]


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


def get(config: AppConfig, replicas: Any, *names: str) -> list[httpx.Response]:
    """Return each key holder's answer, all at once."""

    async def answers() -> list[httpx.Response]:
        application = make_application(services_of(config, sessions=SessionList(replicas)))
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = [{"authorization": f"Bearer {KEYS[name][0]}"} if name else {} for name in names]
            return await asyncio.gather(*(client.get(PATH, headers=one) for one in headers))

    return asyncio.run(answers())


def test_each_key_sees_its_own(replicas: Replicas) -> None:
    """The operator sees all, with the pools' capacity; a tenant sees no trace of another."""
    acme, globex, operator = (answer.json() for answer in get(CLOSED, replicas, "acme", "globex", "operator"))
    seen = [
        {(row["replica"], row["tenant"], row["tokens"]) for row in each["sessions"]}
        for each in (acme, globex, operator)
    ]
    assert seen[0] == {("r1", "acme", 100), ("r2", "acme", 300)}
    assert seen[1] == {("r1", "globex", 200)}
    assert seen[2] == seen[0] | seen[1]
    assert (acme["viewer"], acme["tenant"]) == ("tenant", "acme")
    assert (operator["viewer"], operator["tenant"]) == ("operator", None)
    assert globex["replicas"] == [
        {"replica": "r1", "sessions": 1, "live_tokens": 200},
        {"replica": "r2", "sessions": 0, "live_tokens": 0},
    ]
    assert [set(row) - {"replica", "sessions", "live_tokens"} for row in operator["replicas"]] == [{"room_tokens"}] * 2
    assert "acme" not in str(globex)


def test_without_tenants_everybody_sees_all(replicas: Replicas) -> None:
    (answer,) = get(AppConfig(model="demo"), replicas, "")
    assert len(answer.json()["sessions"]) == 3


def test_sessions_used_last_come_first(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order covers all replicas, and the number is bounded."""
    monkeypatch.setattr(module, "MOST_TOLD", 2)
    (answer,) = get(CLOSED, replicas, "operator")
    assert [(row["tokens"], row["idle_s"]) for row in answer.json()["sessions"]] == [(200, 10.0), (300, 10.0)]


def test_replicas_are_asked_once_for_many_clients(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each viewer has its own answer; a leaving client affects no other; later the replicas are asked again."""
    asking = SessionList(replicas)

    async def ask() -> None:
        first, second = (asyncio.create_task(asking.of("acme")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second)["sessions"]) == 2
        assert await asking.of("acme") is await asking.of("acme")
        await asking.of(None)
        assert replicas.asked == ["acme", None]
        later_s = time.monotonic() + module.FRESH_S
        monkeypatch.setattr(module.time, "monotonic", lambda: later_s)
        await asking.of("acme")
        assert replicas.asked == ["acme", None, "acme"]

    asyncio.run(ask())


def test_a_silent_replica_is_a_sentence() -> None:
    async def silent(*_: Any, **__: Any) -> list[Any]:
        raise TimeoutError

    (answer,) = get(CLOSED, silent, "acme")
    assert (answer.status_code, answer.headers["retry-after"]) == (Overloaded.status, "5")
    assert answer.json()["error"]["message"] == "A replica does not report its sessions; ask again."
