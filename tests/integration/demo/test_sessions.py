"""Sessions of a real instance: a session id passes HAProxy and Ray to its replica; each client sees only its own."""

from typing import Any

import pytest

from serve_app.generation.keys import session_key
from tests.integration.conftest import HTTP, eventually
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
