"""Sessions of a real instance: a session id passes HAProxy and Ray to its replica; each client sees only its own."""

import json
from typing import Any

import httpx
import pytest

from serve_app.generation.prepare import session_key
from tests.integration.conftest import HTTP, PATIENCE_S, eventually
from tests.integration.demo.conftest import CHAT, Served, said

pytestmark = pytest.mark.integration

RULES = ("system", "The lock keeper writes down each ship and the hour. " * 40)
QUESTION = ("user", "Which ship came first?")


def test_a_session_is_told_to_its_tenant_and_to_operators(served: Served) -> None:
    """A session has two turns, named as in each API; another tenant learns nothing of it. (docs: api)"""

    def rows(name: str, word: str) -> list[dict[str, Any]]:
        told = served.get("/v1/cache/sessions", name).raise_for_status().json()["sessions"]
        return [row for row in told if row["session"] == session_key("acme", word)]

    def ask(path: str, headers: dict[str, str], **body: object) -> None:
        wanted = {"model": "demo", "max_tokens": 4, "temperature": 0, **body}
        HTTP.post(served.url + path, json=wanted, headers=served.headers("acme") | headers).raise_for_status()

    named = {"x-session-id": "the-lock"}
    ask(CHAT, named, messages=said(RULES, QUESTION))
    served.wait_until_held("acme", 400, RULES, QUESTION)
    ask(CHAT, named, messages=said(RULES, QUESTION, ("assistant", "The Anna."), ("user", "And then?")))
    eventually(lambda: [row["turns"] for row in rows("acme", "the-lock")] == [2])
    (row,) = rows("operator", "the-lock")
    assert (row["tenant"], row["state"]) == ("acme", "paused")
    assert row["tokens"] > 400
    assert row["replica"] in served.replicas()
    assert rows("globex", "the-lock") == []
    assert "acme" not in served.get("/v1/cache/sessions", "globex").text
    assert "room_tokens" not in served.get("/v1/cache/sessions", "acme").text
    ask("/v1/messages", {}, system=RULES[1], messages=said(QUESTION), metadata={"user_id": '{"session_id": "sluice"}'})
    ask("/v1/responses", {"session-id": "weir"}, max_tokens=None, input=RULES[1])
    eventually(lambda: [len(rows("acme", word)) for word in ("sluice", "weir")] == [1, 1])
    assert HTTP.get(f"{served.url}/v1/cache/sessions").status_code == 401
    for name, replicas in (("globex", 0), ("acme", 1), ("acme", 0)):
        closed = HTTP.delete(f"{served.url}/v1/sessions/the-lock", headers=served.headers(name)).raise_for_status()
        assert closed.json()["replicas"] == replicas
    assert rows("operator", "the-lock") == []


def test_a_tenants_sessions_are_limited_over_both_ingresses(served: Served) -> None:
    """The third is refused wherever it arrives, with the limit and the tenant's numbers, until one of two is left."""

    def open_chat(number: int) -> httpx.Response:
        wanted = {"model": "demo", "max_tokens": 4000, "ignore_eos": True, "stream": True, "messages": said(
            ("system", f"Lock {number}."), QUESTION)}  # fmt: skip
        client = httpx.Client(timeout=PATIENCE_S)  # a connection of its own, to any ingress
        request = client.build_request("POST", served.url + CHAT, json=wanted, headers=served.headers("seated"))
        return client.send(request, stream=True)

    streams = [open_chat(number).raise_for_status() for number in range(2)]
    for number in range(2, 8):
        refused = open_chat(number)
        assert refused.status_code == 429, "both sessions still run"
        reason = json.loads(refused.read())["error"]["reason"]
        assert {name: reason[name] for name in ("place", "limit", "used", "most")} == {
            "place": "ingress", "limit": "concurrent_sessions", "used": 2, "most": 2
        }  # fmt: skip
    for stream in streams:
        stream.close()  # the client leaves, long before the end
    eventually(lambda: open_chat(9).status_code == 200)
    counted = served.get("/metrics", "operator").text
    assert 'limit="concurrent_sessions",place="ingress",tenant="seated"' in counted
