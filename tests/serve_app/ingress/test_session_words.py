"""A client's session id, in each API's place, over a real socket; an invalid id is no error."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.config.tenants import TenantConfig
from serve_app.generation.prepare import session_key
from serve_app.tenants import make_api_key
from tests.serve_app.api.test_agents import RECORDED
from tests.serve_app.ingress.apis import APIS
from tests.serve_app.ingress.scripted import Script, scripted

BODIES = {api.path: api.body for api in APIS}
OPENAI = [path for path in BODIES if path != "/v1/messages"]
KEYS = {name: make_api_key() for name in ("acme", "globex")}


def claude(word: Any) -> dict[str, Any]:
    return {"metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": word})}}


@pytest.fixture(scope="module")
def served(demo_model_path: Path) -> Iterator[tuple[str, Script]]:
    customers = [TenantConfig(name=name, key_sha256=[digest]) for name, (_, digest) in KEYS.items()]
    with scripted(demo_model_path, customers=customers, place="first") as running:
        yield running


@pytest.fixture
def told(served: tuple[str, Script]) -> Any:
    """Send the request, and return the session of the generation."""
    url, script = served
    script.clear()
    script.text = "Yes."

    def ask(path: str, headers: dict[str, str] | None = None, tenant: str = "acme", **fields: Any) -> str:
        keyed = {"authorization": f"Bearer {KEYS[tenant][0]}", **(headers or {})}
        answer = httpx.post(url + path, json={"model": "demo", **BODIES[path], **fields}, headers=keyed)
        assert answer.status_code == 200, answer.text
        return script.asked[-1].session

    return ask


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "header",
    [
        *("x-session-id", "X-Session-Id", "X-Claude-Code-Session-Id", "session-id", "x-session-affinity"),
        "X-Dynamo-Session-ID",
    ],
)
def test_headers_name_the_session_with_every_api(told: Any, path: str, header: str) -> None:
    """Ray never sees ``x-session-id`` (test_client_headers)."""
    assert told(path, {header: "one"}) == session_key("acme", "one")
    assert told(path) == ""


def test_the_body_names_it_in_each_apis_way(told: Any) -> None:
    for path in OPENAI:
        assert told(path, prompt_cache_key="one") == session_key("acme", "one")
    assert told("/v1/messages", **claude("one")) == session_key("acme", "one")


def test_the_first_of_several_words_counts(told: Any) -> None:
    headers = {"session-id": "c", "x-claude-code-session-id": "b", "x-session-id": "a"}
    for word in ("c", "b", "a"):
        assert told("/v1/responses", headers, prompt_cache_key="d") == session_key("acme", headers.popitem()[1]), word
    assert told("/v1/responses", prompt_cache_key="d") == session_key("acme", "d")
    assert told("/v1/messages", {"session-id": "c"}, **claude("d")) == session_key("acme", "c")


@pytest.mark.parametrize("word", ["", "x" * 257])
def test_a_header_that_is_no_word_gives_way_to_the_next(told: Any, word: str) -> None:
    assert told("/v1/responses", {"x-session-id": word, "session-id": "c"}) == session_key("acme", "c")


@pytest.mark.parametrize(
    "fields",
    [
        *(claude(word) for word in ("", "x" * 1025, "x" * 5000, 7, None, ["one"])),
        *({"metadata": {"user_id": word}} for word in ("user_1_account__session_2", "{", "[" * 2000, "7", '{"a": 1}')),
        *({"metadata": {"user_id": word}} for word in (7, None, {"session_id": "one"})),
        *({"metadata": metadata} for metadata in ({}, [], "one", 7)),
    ],
)
def test_other_users_of_messages_are_no_sessions(told: Any, fields: dict[str, Any]) -> None:
    """Anthropic accepts any string there."""
    assert told("/v1/messages", **fields) == ""


def test_a_long_body_names_it_too(told: Any) -> None:
    """Only known fields of a large body are decoded."""
    assert told("/v1/messages", unread="x" * 70_000, **claude("one")) == session_key("acme", "one")


def test_a_session_has_16_digits_which_tell_neither_the_word_nor_another_tenants(told: Any) -> None:
    words = {told("/v1/completions", {"x-session-id": "one"}, tenant) for tenant in KEYS}
    assert len(words) == 2
    assert all(len(word) == 16 and int(word, 16) >= 0 for word in words)


@pytest.mark.parametrize(
    ("agent", "path"), [("claude_code", "/v1/messages"), ("codex", "/v1/responses"), ("qwen_code", BODIES)]
)
def test_agents_name_their_sessions(told: Any, agent: str, path: Any) -> None:
    """This is as their packages did; Qwen Code does not."""
    recorded = json.loads((RECORDED / f"{agent}.json").read_text())
    if agent == "qwen_code":
        assert told("/v1/chat/completions", recorded["headers"]) == ""
        return
    word = session_key("acme", "fb30d6a5" if agent == "claude_code" else "01a216ee")
    assert told(path, recorded["headers"]) == word
    fields = ("metadata",) if agent == "claude_code" else ("prompt_cache_key",)
    assert told(path, **{name: recorded["body"][name] for name in fields}) == word
