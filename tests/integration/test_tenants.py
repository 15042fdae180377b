"""Several tenants on one instance: keys are needed, and of another's cache only what is public is of use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.common.server import instance
from serve_app.cli.main import app
from serve_app.prompts.lock import PromptDirectory
from serve_app.tenants.tenants import make_api_key
from tests.browser import chromium
from tests.integration.conftest import PATIENCE_S, alone, eventually, wait_until_cached

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
NAMES = ("acme", "globex", "initech", "initrode", "limited", "passing", "narrow", "expired", "revoked", "operator")
KEYS = {name: make_api_key() for name in NAMES}
RULES = "You advise on berths and tides. Name the ship before any advice, and the hour after it. " * 6
BODY = {
    "model": "demo",
    "messages": [{"role": "system", "content": "Shared words. " * 100}, {"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "temperature": 0,
}


def auth(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name][0]}"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of prompts: a public clerk, and acme's own pilot."""
    directory = tmp_path_factory.mktemp("prompts")
    for name, tenant in (("clerk", None), ("pilot", "acme")):
        (directory / name).mkdir()
        (directory / name / "1.txt").write_text(f"You are the {name}. " * (60 if name == "clerk" else 30))
        PromptDirectory(directory).add(f"{name}@1", None, tenant)
    return directory


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, prompts: Path) -> Iterator[str]:
    settings: Path = tmp_path_factory.mktemp("tenants") / "settings.yaml"
    tenants = [{"name": name, "key_sha256": [KEYS[name][1]]} for name in ("acme", "globex")]
    tenants += [
        {"name": name, "key_sha256": [KEYS[name][1]], "trust_group": "init"} for name in ("initech", "initrode")
    ]
    keys = {name: KEYS[name][1] for name in KEYS}
    ended = [
        {"sha256": keys["expired"], "expires": "2001-01-01T00:00:00Z"},
        {"sha256": keys["revoked"], "revoked": True},
    ]
    limits = {"requests_per_second": 0.01, "concurrent_requests": 1, "tokens_per_minute": 5000}
    tenants += [
        {"name": "limited", "key_sha256": [keys["limited"], *ended], **limits},
        {"name": "passing", "key_sha256": [keys["passing"]], "store_kv": False},
        {"name": "narrow", "key_sha256": [keys["narrow"]], "models": ["pirate"]},
    ]
    (settings.parent / "rules.txt").write_text(RULES)
    public = [{"name": "rules", "version": "2", "file": str(settings.parent / "rules.txt")}]
    operators = [KEYS["operator"][1]]
    prices = {"input_per_million": 3, "output_per_million": 15}
    usage = {"usage_file": str(settings.parent / "usage.sqlite"), "prices": prices}
    settings.write_text(
        yaml.safe_dump(
            {
                "model": "demo",
                "tenants": tenants,
                "public_prompts": public,
                "prompts_dir": str(prompts),
                "operator_key_sha256": operators,
                **usage,
            }
        )
    )
    with alone(instance("--config", str(settings), "--set", "dtype=float32")) as base:
        yield base


def ask(url: str, tenant: str, **extra: object) -> tuple[int, str]:
    answer = httpx.post(url + CHAT, json={**BODY, **extra}, headers=auth(tenant), timeout=PATIENCE_S).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]["content"]


def wait_until_held(url: str, tenant: str, tokens: int, **extra: object) -> None:
    """Wait until the router has heard that a replica holds so much of a tenant's prompt."""
    wait_until_cached(url, {**BODY, **extra, "tenant": tenant}, tokens, auth("operator"))


def test_a_key_is_needed(url: str) -> None:
    """No key, or an unknown one, is 401 in OpenAI's shape; health needs none."""
    for headers in ({}, {"authorization": "Bearer wp-guess"}, {"authorization": "Basic x"}):
        response = httpx.post(url + CHAT, json=BODY, headers=headers, timeout=PATIENCE_S)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(url + "/v1/models", timeout=PATIENCE_S).status_code == 401
    assert httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200


def test_only_the_holder_of_a_key_that_is_over_learns_it(url: str) -> None:
    """Both are 401 in OpenAI's shape; nothing else tells them from a guess."""
    said = {}
    for name in ("expired", "revoked"):
        response = httpx.post(url + CHAT, json=BODY, headers=auth(name), timeout=PATIENCE_S)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert not [header for header in response.headers if header.startswith("x-ratelimit")]
        said[name] = response.json()["error"]["message"]
    assert "expired at 2001-01-01" in said["expired"] and "revoked" in said["revoked"]


def test_a_tenant_beyond_its_limits_is_told_when_to_come_back(url: str) -> None:
    """One request in a hundred seconds; what it did not generate is given back, and others have no such headers."""
    small = {**BODY, "messages": said(("user", "Which berth?")), "max_tokens": 4}
    first = httpx.post(url + CHAT, json=small, headers=auth("limited"), timeout=PATIENCE_S)
    assert first.status_code == 200
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-limit-tokens"] == "5000"
    assert 5000 - used <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 5000
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    second = httpx.post(url + CHAT, json=small, headers=auth("limited"), timeout=PATIENCE_S)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(second.headers["retry-after"]) <= 100
    assert "1m" in second.headers["x-ratelimit-reset-requests"]
    listed = httpx.get(url + "/v1/models", headers=auth("limited"), timeout=PATIENCE_S)
    assert listed.headers["x-ratelimit-remaining-requests"] == "0"
    other = httpx.post(url + CHAT, json=small, headers=auth("acme"), timeout=PATIENCE_S)
    assert not [header for header in other.headers if header.startswith("x-ratelimit")]


def test_a_model_that_a_tenant_may_not_use_does_not_exist(url: str) -> None:
    """404, and no list names it; the sentence is that for a name which nobody has."""
    answers = [
        httpx.post(url + CHAT, json={**BODY, "model": name}, headers=auth("narrow"), timeout=PATIENCE_S)
        for name in ("demo", "none")
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].text.replace("demo", "none") == answers[1].text
    assert httpx.get(url + "/v1/models", headers=auth("narrow"), timeout=PATIENCE_S).json()["data"] == []


def test_a_request_that_stores_nothing_leaves_nothing(url: str) -> None:
    """A request's own wish, and a tenant's setting: the next one of the same prompt finds what was there before."""
    message = {"messages": said(("system", "What is passing leaves no trace. " * 30))}
    cold, text = ask(url, "globex", store_kv=False, **message)
    again, _ = ask(url, "globex", store_kv=False, **message)
    stored, stored_text = ask(url, "globex", **message)
    wait_until_held(url, "globex", 100, **message)
    warm, warm_text = ask(url, "globex", store_kv=False, **message)
    assert cold == again == stored == 0 < warm
    assert text == stored_text == warm_text
    assert [ask(url, "passing", **message)[0] for _ in range(2)] == [0, 0]
    for tenant, wanted in (("globex", {"store_kv": False}), ("passing", {})):
        body = {**BODY, "save_system_prompt_kv_cache": True, **wanted}
        refused = httpx.post(url + CHAT, json=body, headers=auth(tenant), timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "save_system_prompt_kv_cache")


def test_the_api_is_not_described_to_everyone(url: str) -> None:
    """With tenants the docs are as unknown as any other path, even to a tenant."""
    unknown = httpx.get(url + "/nothing", headers=auth("acme"), timeout=PATIENCE_S).json()["error"]
    for path in ("/docs", "/openapi.json", "/redoc"):
        response = httpx.get(url + path, headers=auth("acme"), timeout=PATIENCE_S)
        assert response.status_code == 404
        assert response.json()["error"] == {**unknown, "message": unknown["message"].replace("/nothing", path)}


def test_tenants_share_nothing(url: str) -> None:
    """The same prompt is cold for every tenant and for every cache_salt of one tenant; answers are equal."""
    cold, text = ask(url, "acme")
    wait_until_held(url, "acme", 100)
    warm, _ = ask(url, "acme")
    other, other_text = ask(url, "globex")
    salted, salted_text = ask(url, "acme", cache_salt="project-1")
    wait_until_held(url, "acme", 100, cache_salt="project-1")
    salted_again, _ = ask(url, "acme", cache_salt="project-1")
    other_salted, _ = ask(url, "globex", cache_salt="project-1")
    assert cold == other == salted == other_salted == 0
    assert warm > 100
    assert salted_again > 100
    assert text == other_text == salted_text


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def chat(url: str, tenant: str, *messages: tuple[str, str], **extra: object) -> tuple[int, int, str]:
    """Prompt tokens, cached ones among them, and the answer."""
    body = {"messages": said(*messages), **extra}
    answer = httpx.post(url + CHAT, json={**BODY, **body}, headers=auth(tenant), timeout=PATIENCE_S).json()
    usage = answer["usage"]
    return (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        answer["choices"][0]["message"]["content"],
    )


def test_a_public_prompt_is_shared_and_nothing_after_it(url: str) -> None:
    """Sent as text or by reference; the question behind it, though the same, is cold for every other tenant."""
    question = ("user", "And when does the tide turn? " * 12)
    tokens, cold, text = chat(url, "acme", ("system", RULES), question)
    wait_until_held(url, "acme", (tokens - 1) // 16 * 16, messages=said(("system", RULES), question))
    _, warm, _ = chat(url, "acme", ("system", RULES), question)
    _, other, other_text = chat(url, "globex", ("system", RULES), question)
    _, referred, referred_text = chat(url, "initech", question, prompt_ref="rules@2")
    assert cold == 0
    assert warm >= (tokens - 1) // 16 * 16
    assert 64 <= other == referred < warm - 64
    assert text == other_text == referred_text
    unknown = httpx.post(url + CHAT, json={**BODY, "prompt_ref": "rules@1"}, headers=auth("acme"), timeout=PATIENCE_S)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "prompt_not_found")
    assert "rules@2" in unknown.json()["error"]["message"]


def test_a_trust_group_shares_all_and_a_salt_divides_it(url: str) -> None:
    private = ("system", "The merger is called off. " * 30)
    tokens, cold, _ = chat(url, "initech", private)
    wait_until_held(url, "initech", (tokens - 1) // 16 * 16, messages=said(private))
    assert cold == 0
    assert chat(url, "initrode", private)[1] >= (tokens - 1) // 16 * 16
    assert chat(url, "initrode", private, cache_salt="mine")[1] == 0
    assert chat(url, "acme", private)[1] == 0


def test_a_conversation_returns_to_its_history(url: str) -> None:
    """Four turns beside another tenant's with the same key: each finds all full blocks of the turn before."""
    history: dict[str, list[tuple[str, str]]] = {
        name: [("system", f"You are {name}'s. " * 20)] for name in ("acme", "globex")
    }
    before = dict.fromkeys(history, 0)
    for turn in range(4):
        for name, messages in history.items():
            messages.append(("user", f"Question {turn} is a rather long one about {turn} things. " * 4))
            tokens, cached, answer = chat(url, name, *messages, prompt_cache_key="the same for both")
            assert cached >= before[name] // 16 * 16 - 16
            assert turn or not cached
            wait_until_held(url, name, (tokens - 1) // 16 * 16, messages=said(*messages))
            messages.append(("assistant", answer))
            before[name] = tokens
    # Another key, or none: the history is found all the same.
    for extra in ({"prompt_cache_key": "another"}, {}):
        assert chat(url, "acme", *history["acme"], ("user", "Done?"), **extra)[1] >= before["acme"] // 16 * 16 - 16


def metrics(url: str) -> str:
    return httpx.get(url + "/metrics", headers=auth("operator"), timeout=PATIENCE_S).text


def test_usage_adds_up_and_is_a_tenants_own(url: str) -> None:
    """What the answers told is what the ledger has; the operator sees everybody's. (docs/security.md)"""

    def row(key: str) -> dict[str, int]:
        found = httpx.get(url + "/v1/usage", headers=auth(key), timeout=PATIENCE_S).raise_for_status().json()
        assert key == "operator" or {each["tenant"] for each in found["data"]} <= {key}
        mine = [each for each in found["data"] if (each["tenant"], each["prompt"]) == ("initrode", "rules@2")]
        return mine[0] if mine else {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0}

    before = row("initrode")
    told = [chat(url, "initrode", ("user", "Which berth is free? " * 8), prompt_ref="rules@2") for _ in range(2)]
    after = row("initrode")
    assert after["requests"] == before["requests"] + 2
    assert after["prompt_tokens"] == before["prompt_tokens"] + sum(tokens for tokens, _, _ in told)
    assert after["cached_tokens"] == before["cached_tokens"] + sum(cached for _, cached, _ in told)
    assert after["output_tokens"] == before["output_tokens"] + 2 * 4
    assert after["uncached_tokens"] >= 0 and after["cost"]["openai"] > 0  # type: ignore[index]
    assert row("operator") == after
    assert row("acme")["requests"] == 0


def test_operator_endpoints_need_the_operator_key(url: str) -> None:
    """State and metrics name tenants, so that a tenant's key does not open them."""
    for path in ("/v1/cache/state", "/metrics"):
        assert httpx.get(url + path, timeout=PATIENCE_S).status_code == 401
        assert httpx.get(url + path, headers=auth("acme"), timeout=PATIENCE_S).status_code == 403
        assert httpx.get(url + path, headers=auth("operator"), timeout=PATIENCE_S).status_code == 200
    eventually(lambda: 'tenant="acme"' in metrics(url))


def test_explain_is_the_operators_and_says_where_a_tenants_request_would_go(url: str) -> None:
    """For the tenant named the holder wins, with a sentence; tenants' keys do not open it, and nothing is counted."""
    explain = url + "/v1/cache/explain"
    assert httpx.post(explain, json=BODY, timeout=PATIENCE_S).status_code == 401
    assert httpx.post(explain, json=BODY, headers=auth("acme"), timeout=PATIENCE_S).status_code == 403
    ask(url, "acme")

    def held(tenant: str) -> dict[str, object]:
        body = {**BODY, "tenant": tenant, "cache_salt": None}
        said = httpx.post(explain, json=body, headers=auth("operator"), timeout=PATIENCE_S).raise_for_status().json()
        prompt: dict[str, object] = said["prompts"][0]
        return prompt

    eventually(lambda: int(str(held("acme")["best_cached_tokens"])) > 100)

    def decisions() -> int:
        state = httpx.get(url + "/v1/cache/state", headers=auth("operator"), timeout=PATIENCE_S).json()
        return sum(policy["decisions"] for policy in state["regret"].values())

    before = decisions()
    said = held("acme")
    winner = said["winners"]["estimated_ttft"]  # type: ignore[index]
    assert winner["reason"] == "cached"
    assert winner["replica_id"] in winner["because"]
    assert said["replicas"][0]["replica_id"] == winner["replica_id"]  # type: ignore[index]
    assert said["replicas"][0]["cached_tokens_by_tier"]["pool"] > 100  # type: ignore[index]
    assert decisions() == before
    bad = httpx.post(explain, json=BODY, headers=auth("operator"), timeout=PATIENCE_S)
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "tenant"
    eventually(lambda: "warmpath_router_ttft_actual_to_estimated_ratio_count{ingress=" in metrics(url))


def test_a_retry_storm_shuts_nobody_out(url: str) -> None:
    """More prompts at once than replicas and queues hold, sent again when refused: another tenant is always answered.

    The storm gets all of its answers too: none of its requests is begun and thrown away.
    """
    prompts = {"model": "demo", "prompt": [f"storm {index}" for index in range(128)], "max_tokens": 1}
    small = {**BODY, "messages": [{"role": "user", "content": "Which berth?"}], "max_tokens": 1}

    async def run() -> None:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:

            async def storm() -> int:
                while True:
                    answer = await client.post("/v1/completions", json=prompts, headers=auth("acme"))
                    if answer.status_code == 200:
                        return len(answer.json()["choices"])
                    assert int(answer.headers["retry-after"]) >= 1

            storms = [asyncio.create_task(storm()) for _ in range(12)]
            statuses: list[int] = []
            while not all(task.done() for task in storms):
                statuses.append((await client.post(CHAT, json=small, headers=auth("globex"))).status_code)
            assert set(statuses) == {200}, statuses
            assert [task.result() for task in storms] == [128] * 12

    asyncio.run(run())


def cut_over(url: str, *arguments: str) -> str:
    """What `warmpath prompts` prints for the operator."""
    result = CliRunner().invoke(
        app, ["prompts", *arguments, "--url", url], env={"WARMPATH_OPERATOR_KEY": KEYS["operator"][0]}
    )
    assert result.exit_code == 0, result.output
    return result.output


def referring(url: str, tenant: str, path: str = CHAT, **extra: object) -> tuple[str, int]:
    """The version that answered, and the cached tokens."""
    body: dict[str, object] = {"model": "demo", "max_tokens": 1, "temperature": 0}
    body |= {"input": "Hi"} if path == "/v1/responses" else {"messages": said(("user", "Hi"))}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    answer = httpx.post(url + path, json={**body, **extra}, headers=auth(tenant), timeout=PATIENCE_S).raise_for_status()
    usage = answer.json()["usage"]
    found = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = found["cached_tokens"] if found else usage["cache_read_input_tokens"]
    return answer.headers["x-warmpath-prompt"], cached


def test_a_promoted_version_is_warm_for_everybody(url: str, prompts: Path) -> None:
    """From the first request on, in every API; a roll-back is warm, too.

    docs/prompts.md
    """
    shelf = PromptDirectory(prompts)
    assert "1 is promoted" in cut_over(url, "promote", "clerk@1")
    apis = (CHAT, "/v1/responses", "/v1/messages")
    for path in apis:
        for tenant in ("acme", "globex"):
            version, cached = referring(url, tenant, path, prompt_ref="clerk")
            assert (version, cached > 200) == ("clerk@1", True)
    (prompts / "clerk/2.txt").write_text("You are the new clerk. " * 60)
    shelf.add("clerk@2", None, None)
    assert "2 is promoted, before it 1" in cut_over(url, "promote", "clerk@2")
    for path in apis:
        for tenant in ("initech", "acme", "globex"):
            version, cached = referring(url, tenant, path, prompt_ref="clerk")
            assert (version, cached > 200) == ("clerk@2", True)
    assert referring(url, "acme", prompt_ref="clerk@1")[0] == "clerk@1"
    assert "1 is promoted" in cut_over(url, "rollback", "clerk")
    version, cached = referring(url, "globex", prompt_ref="clerk")
    assert (version, cached > 200) == ("clerk@1", True)
    shown = cut_over(url, "status", "clerk")
    assert shown.count(" 0 cold, warm TTFT ") == 2, shown


def test_a_private_prompt_is_its_tenants_and_a_changed_file_changes_nothing(url: str, prompts: Path) -> None:
    """Another tenant is told what it would be of no prompt at all; what runs goes on with what was locked."""
    cut_over(url, "promote", "pilot@1")
    assert referring(url, "acme", prompt_ref="pilot")[0] == "pilot@1"
    refused = [
        httpx.post(url + CHAT, json={**BODY, "prompt_ref": ref}, headers=auth("globex"), timeout=PATIENCE_S)
        for ref in ("pilot@1", "nobod@1")
    ]
    assert [answer.status_code for answer in refused] == [404, 404]
    assert refused[0].text.replace("pilot", "nobod") == refused[1].text
    for path in ("/v1/prompts", "/v1/prompts?name=clerk"):
        assert httpx.get(url + path, headers=auth("acme"), timeout=PATIENCE_S).status_code == 403
    (prompts / "pilot/1.txt").write_text("You are the Pilot. " * 30)
    broken = httpx.post(
        url + "/v1/prompts/warm", json={"prompt_ref": "clerk@1"}, headers=auth("operator"), timeout=PATIENCE_S
    )
    assert broken.status_code == 400
    message = broken.json()["error"]["message"]
    assert message.count("sha256:") == 2 and "the first differing byte is 12" in message
    version, cached = referring(url, "acme", prompt_ref="pilot")
    assert (version, cached > 50) == ("pilot@1", True)


SYSTEM_BARS = ".bar[aria-label^='acme’s system prompt'], .bar[aria-label^='system prompt']"
"""Of acme, in a list of several tenants' and where there is none but acme."""


def test_the_page_shows_each_key_its_own_part(url: str) -> None:
    """In a browser: a chat's second answer says what was reused, and of whom only its tenant and operators see.

    docs/page.md
    """
    with chromium() as browser:

        def opened(key: str, map_key: str = "") -> Any:
            page = browser.new_context().new_page()
            page.set_default_timeout(1000 * PATIENCE_S)
            page.goto(url)
            for label, secret in (("API key", key), ("Key for the map", map_key)):
                page.get_by_label(label, exact=True).fill(secret)
                page.get_by_label(label, exact=True).press("Tab")
            page.locator(".replica").nth(1).wait_for()
            return page

        page = opened(KEYS["acme"][0], KEYS["operator"][0])
        page.get_by_text("System prompt").click()
        page.get_by_label("What comes before every question").fill("The harbour opens at dawn. " * 60)
        page.get_by_label("At most, tokens").fill("8")
        for number, question in enumerate(("When does it open?", "And when not?")):
            page.get_by_label("Your message").fill(question)
            page.get_by_label("Your message").press("Enter")
            page.locator(".reuse").nth(number).get_by_text("reused:").wait_for()
            page.locator(".reuse").nth(number).get_by_text("replica").wait_for()
        reused = page.locator(".reuse .reused b").all_inner_texts()
        assert int(reused[0].removesuffix(" %")) < 50 < int(reused[1].removesuffix(" %"))
        page.locator(SYSTEM_BARS).first.wait_for()
        page.locator(".reuse button").nth(1).click()
        page.locator("#why td").first.wait_for()  # explained for the operator's key
        assert "cached" in page.locator("#why").inner_text()
        own, other = opened(KEYS["acme"][0]), opened(KEYS["globex"][0])
        held = page.locator(SYSTEM_BARS).first.get_attribute("data-id")
        own.locator(f".bar[data-id='{held}']").first.wait_for()
        assert other.locator(f".bar[data-id='{held}']").count() == 0
        assert "acme" not in other.content()


def test_events_are_each_ones_own(url: str) -> None:
    """A decision comes to its tenant and to operators, through HAProxy; a stream that is left leaves nothing."""

    def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))

    def streams() -> float:
        page = httpx.get(url + "/metrics", headers=auth("operator"), timeout=PATIENCE_S).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("warmpath_event_streams{"))

    path, options = url + "/v1/cache/events", {"timeout": PATIENCE_S}
    assert httpx.get(path, **options).status_code == 401
    with ExitStack() as stack:
        seen = {}
        for name in ("acme", "globex", "operator"):
            answer = stack.enter_context(httpx.stream("GET", path, headers=auth(name), **options))
            seen[name] = events(answer.iter_lines())
        first = {name: next(each) for name, each in seen.items()}
        assert [first[name]["tenant"] for name in seen] == ["acme", "globex", None]
        assert first["operator"]["replicas"][0]["blocks_total"] > 0
        assert "blocks_total" not in first["acme"]["replicas"][0]
        for name in ("globex", "acme"):
            ask(url, name)
        decided = {name: next(event for event in each if event["type"] == "decision") for name, each in seen.items()}
        assert {name: event["tenant"] for name, event in decided.items()} == {
            "acme": "acme", "globex": "globex", "operator": "globex",
        }  # fmt: skip
        assert "cold_ttft_s" in decided["operator"] and "cold_ttft_s" not in decided["acme"]
        held = (
            event["nodes"]
            for event in seen["acme"]
            if event["type"] == "prefixes" and any(row["kind"] == "system" and row["holders"] for row in event["nodes"])
        )
        assert {row["tenant"] for row in next(held)} <= {"acme", None}
        assert streams() == 3
    eventually(lambda: streams() == 0)
