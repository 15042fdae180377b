"""Several tenants on one instance: keys are required, and tenants share only public prompts."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.integration.conftest import HTTP, PATIENCE_S, await_reports, clients, eventually, metric
from tests.integration.demo.conftest import CHAT, RULES, Served, said

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

BODY = {"model": "demo", "messages": said(("user", "hi")), "max_tokens": 4}
SHARED = ("system", "Shared words. " * 100), ("user", "hi")
ADAPTER = {"lora_name": "x", "lora_path": "/etc"}


@pytest.mark.parametrize(
    ("path", "body", "statuses"),
    [
        (CHAT, BODY, {"": 401, "expired": 401, "revoked": 401, "narrow": 404, "acme": 200}),
        ("/v1/cache/state", None, {"": 401, "acme": 403, "operator": 200}),
        ("/v1/cache/events?once=true", None, {"": 401}),
        ("/v1/load_lora_adapter", ADAPTER, {"": 401, "acme": 403, "operator": 403}),
    ],
)
def test_keys_open_only_their_own_routes(served: Served, path: str, body: object, statuses: dict[str, int]) -> None:
    """Each case is named by the holder of its key; "" has none. (docs: isolation)"""
    for name, status in statuses.items():
        headers = served.headers(name) if name else {"authorization": "Bearer wp-guess"}
        answer = HTTP.request("GET" if body is None else "POST", served.url + path, json=body, headers=headers)
        assert answer.status_code == status, (name, answer.text)


def test_a_model_that_a_tenant_may_not_use_does_not_exist(served: Served) -> None:
    """The error is the same as for an unknown model name."""
    answers = [served.post(CHAT, "narrow", **{**BODY, "model": name}) for name in ("demo", "none")]
    assert answers[0].text.replace("demo", "none") == answers[1].text


def test_tenants_share_nothing(served: Served) -> None:
    """The same prompt is cold for every tenant and for every cache_salt of one tenant; answers are equal."""
    _, cold, text = served.chat("acme", *SHARED)
    served.wait_until_held("acme", 100, *SHARED)
    assert served.chat("acme", *SHARED)[1] > 100
    _, other, other_text = served.chat("globex", *SHARED)
    _, salted, salted_text = served.chat("acme", *SHARED, cache_salt="project-1")
    served.wait_until_held("acme", 100, *SHARED, cache_salt="project-1")
    assert served.chat("acme", *SHARED, cache_salt="project-1")[1] > 100
    assert cold == other == salted == served.chat("globex", *SHARED, cache_salt="project-1")[1] == 0
    assert text == other_text == salted_text


def test_a_request_that_stores_nothing_leaves_nothing(served: Served) -> None:
    """A request option or a tenant setting turns storing off; the next request finds only earlier blocks."""
    message = ("system", "What is passing leaves no trace. " * 30)
    colds = [served.chat("globex", message, store_kv=store_kv) for store_kv in (False, False, True)]
    served.wait_until_held("globex", 100, message)
    _, warm, text = served.chat("globex", message, store_kv=False)
    assert [cached for _, cached, _ in colds] == [0, 0, 0] and warm > 0
    assert {each for _, _, each in colds} == {text}
    assert [served.chat("passing", message)[1] for _ in range(2)] == [0, 0]


def test_a_public_prompt_is_shared_and_nothing_after_it(served: Served) -> None:
    """It is sent as text or by reference; the same question after it is cold for every other tenant."""
    question = ("user", "And when does the tide turn? " * 12)
    tokens, _, text = served.chat("acme", ("system", RULES), question)
    whole = (tokens - 1) // 16 * 16
    served.wait_until_held("acme", whole, ("system", RULES), question)
    _, warm, _ = served.chat("acme", ("system", RULES), question)
    _, other, other_text = served.chat("globex", ("system", RULES), question)
    _, referred, referred_text = served.chat("initech", question, prompt_ref="rules@2")
    assert warm >= whole
    assert 64 <= other == referred < warm - 64
    assert text == other_text == referred_text


def test_a_trust_group_shares_all_and_a_salt_divides_it(served: Served) -> None:
    private = ("system", "The merger is called off. " * 30)
    tokens, cold, _ = served.chat("initech", private)
    whole = (tokens - 1) // 16 * 16
    served.wait_until_held("initech", whole, private)
    assert cold == 0
    assert served.chat("initrode", private)[1] >= whole
    assert served.chat("initrode", private, cache_salt="mine")[1] == 0
    assert served.chat("acme", private)[1] == 0


def test_usage_adds_up_over_both_ingresses_and_is_a_tenants_own(served: Served) -> None:
    """The ledger equals the sum of the answers' usage, at either ingress. (docs: isolation)"""

    def row(key: str) -> dict[str, Any]:
        rows = served.get("/v1/usage", key).raise_for_status().json()["data"]
        assert key == "operator" or {row["tenant"] for row in rows} <= {key}
        mine = [row for row in rows if (row["tenant"], row["prompt"]) == ("initrode", "rules@2")]
        return mine[0] if mine else {"requests": 0}

    told = [served.chat("initrode", ("user", "Which berth is free? " * 8), prompt_ref="rules@2") for _ in range(6)]
    for key in ("initrode", "operator") * 2:
        found = row(key)
        assert (found["requests"], found["output_tokens"]) == (6, 24)
        assert found["prompt_tokens"] == sum(tokens for tokens, _, _ in told)
        assert found["cached_tokens"] == sum(cached for _, cached, _ in told)
    assert row("acme")["requests"] == 0


async def test_prefills_that_clients_leave_are_charged(served: Served) -> None:
    """Prompts are left in prefill or in the queue; usage is all that the replicas computed. (docs: isolation)"""

    def computed() -> float:
        return metric(served.url, "warmpath_prompt_tokens_computed_total", headers=served.headers("operator"))

    def charged() -> tuple[int, int]:
        rows = [row for row in served.get("/v1/usage", "operator").json()["data"] if row["tenant"] == "passing"]
        uncached = sum(row["prompt_tokens"] - row["cached_tokens"] for row in rows)
        return uncached, sum(row["requests"] for row in rows)

    await_reports(served.url, served.headers("operator"))
    before, (charged_before, answered_before) = computed(), charged()
    async with clients(served.url) as client:

        async def leave(number: int) -> None:
            body = {"model": "demo", "prompt": f"{number} " + "left alone " * 900, "max_tokens": 1}
            with suppress(httpx.ReadTimeout):
                leaves = httpx.Timeout(60, read=0.1 * number)
                await client.post("/v1/completions", json=body, headers=served.headers("passing"), timeout=leaves)

        await asyncio.gather(*map(leave, range(1, 13)))

    def settled() -> bool:
        return computed() - before == charged()[0] - charged_before > 0

    eventually(settled)
    await_reports(served.url, served.headers("operator"))
    assert settled()
    assert charged()[1] - answered_before < 12


async def test_a_retry_storm_shuts_nobody_out(served: Served) -> None:
    """A storm of prompts exceeds all replicas and queues and retries refusals; another tenant is always answered.

    The storm gets all of its answers too: none of its requests is begun and thrown away.
    """
    prompts = {"model": "demo", "prompt": [f"storm {index}" for index in range(128)], "max_tokens": 1}
    async with clients(served.url) as client:

        async def storm() -> int:
            while True:
                answer = await client.post("/v1/completions", json=prompts, headers=served.headers("acme"))
                if answer.status_code == 200:
                    return len(answer.json()["choices"])
                assert int(answer.headers["retry-after"]) >= 1

        storms = [asyncio.create_task(storm()) for _ in range(8)]
        statuses: list[int] = []
        while not all(task.done() for task in storms):
            statuses.append((await client.post(CHAT, json=BODY, headers=served.headers("globex"))).status_code)
        assert set(statuses) == {200}, statuses
        assert [task.result() for task in storms] == [128] * 8


def test_one_event_stream_has_the_decisions_of_both_ingresses(served: Served) -> None:
    """Operators see all, and tenants see their own requests; another tenant sees neither requests nor prefixes.

    docs: api
    """

    @contextmanager
    def listening(name: str) -> Iterator[Iterator[dict[str, Any]]]:
        with HTTP.stream("GET", f"{served.url}/v1/cache/events", headers=served.headers(name)) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            yield map(json.loads, lines)

    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            served.chat("acme", *SHARED)

    with listening("operator") as operator, listening("acme") as own, listening("globex") as other:
        first = [next(events) for events in (operator, own, other)]
        assert [event["tenant"] for event in first] == [None, "acme", "globex"]
        assert ["blocks_total" in event["replicas"][0] for event in first] == [True, False, False]
        # Several at once: HAProxy gives each stream to the ingress with the fewest connections.
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking) for _ in range(4)]
            try:
                for events in (operator, own):
                    seen: set[str] = set()
                    while len(seen) < 2:
                        event = next(events)
                        if event["type"] == "decision":
                            assert event["tenant"] == "acme"
                            assert ("cold_ttft_s" in event) == (events is operator)
                            seen.add(event["ingress"])
            finally:
                over.set()
            for task in asking:
                task.result()
        served.chat("globex", *SHARED)
        while (event := next(other))["type"] != "decision":
            assert {row["tenant"] for row in event.get("nodes", ())} <= {"globex", None}
        assert event["tenant"] == "globex"
    # Disconnected streams leave nothing behind, at either ingress.
    operators = served.headers("operator")
    eventually(lambda: not any(metric(served.url, "warmpath_event_streams", headers=operators) for _ in range(4)))


def test_a_key_made_and_revoked_without_a_deploy_counts_on_every_ingress(served: Served) -> None:
    """Every request opens a connection, so both ingresses are asked; the last accepted one's time is printed."""

    def admin(path: str, **body: object) -> Any:
        url, headers = f"{served.url}/v1/admin/{path}", served.headers("operator")
        return HTTP.post(url, headers=headers, json=body).raise_for_status().json()

    def status(key: str) -> int:
        return HTTP.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    admin("tenants", name="umbrella", cache_share=2, models=["pirate"])
    made = admin("keys", tenant="umbrella", label="of a test")
    eventually(lambda: [status(made["key"]) for _ in range(20)] == [200] * 20)
    begun_s = time.monotonic()
    admin(f"keys/{made['id']}", disabled=True)
    last_s, refused = 0.0, 0
    while refused < 40:
        if status(made["key"]) == 401:
            refused += 1
        else:
            last_s, refused = time.monotonic() - begun_s, 0
        assert time.monotonic() - begun_s < PATIENCE_S
    print(f"the last accepted request ended {last_s:.3f} s after the revocation began")
    assert served.post("/v1/admin/keys", "acme", tenant="acme").status_code == 403

    def sources() -> dict[str, str]:
        return {one["name"]: one["source"] for one in served.get("/v1/admin/tenants", "operator").json()["data"]}

    # An ingress that was busy, and so got none of the requests above, learns of the tenant now.
    eventually(lambda: [sources().get("umbrella") for _ in range(20)] == ["database"] * 20)
    assert sources()["acme"] == "settings"
    assert served.get("/v1/models", "acme").status_code == 200
    another = {"authorization": f"Bearer {admin('keys', tenant='umbrella')['key']}"}
    warnings: list[str] = []

    def part_of_the_pins() -> bool:
        """Whether a save that no longer fits is told that two parts in ten are the tenant's."""
        text = f"{len(warnings)} umbrellas. " * 200
        body = {"model": "pirate", "messages": said(("system", text), ("user", "Rain?")), "max_tokens": 1}
        save = {**body, "save_system_prompt_kv_cache": True}
        answer = HTTP.post(served.url + CHAT, headers=another, json=save)
        warnings.append(answer.headers.get("x-warmpath-warning", "") if answer.status_code == 200 else "")
        return warnings[-1].endswith(f"is {300 * 16 * 2 // 10}")

    eventually(part_of_the_pins)
    actions = [one["action"] for one in served.get("/v1/admin/changes", "operator").json()["data"]]
    assert actions == ["key.created", "key.changed", "key.created", "tenant.created"]
    HTTP.request("DELETE", f"{served.url}/v1/admin/tenants/umbrella", headers=served.headers("operator"))
