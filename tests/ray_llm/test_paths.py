"""Ray Serve LLM with our router: both of Ray's paths to a replica, its replicas' answers, and its cache's app."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from threading import Event
from typing import Any

import httpx
import pytest

from tests.integration.conftest import eventually
from tests.ray_llm.conftest import ADAPTER, LlmApp, cached, chat_body, key_of

TEXT = "once upon a time there was a router that knew its caches "
REQUESTS = int(os.environ.get("WARMPATH_REQUESTS", "120"))


def predicted(app: LlmApp, text: str, tenant: str, **more: Any) -> list[int]:
    """Return the cached tokens by replica, first those of the replica that would get the request."""
    return [int(replica["cached_tokens"]) for replica in app.explain(text, tenant, **more)["replicas"]]


def test_cached_tokens_are_as_predicted_and_tenants_share_nothing(app: LlmApp) -> None:
    """Prompts of three tenants, some for an adapter, return again and again in a pool that evicts.

    Ray's own router may avoid a replica that has just got a request; the explaining router does not know that.
    """
    draw = random.Random(1)
    texts = [f"{number}. " + TEXT * draw.randint(5, 40) for number in range(12)]
    hits, elsewhere, wrong = 0, 0, []
    for number in range(REQUESTS):
        text, tenant, model = draw.choice(texts), draw.choice("abc"), draw.choice(["demo", "demo", ADAPTER])
        if number < 12:
            assert not any(predicted(app, text, f"stranger {number}", model=model))
        told = predicted(app, text, tenant, model=model)
        answer = app.chat(text, tenant, model=model)
        elsewhere += told[0] != cached(answer)
        if cached(answer) not in told:
            wrong.append((number, text[:4], tenant, model, told, cached(answer)))
        hits += cached(answer) > 0
        reached = (answer["usage"]["prompt_tokens"] - 1) // 32 * 32
        eventually(
            lambda text=text, tenant=tenant, model=model, reached=reached: (
                reached in predicted(app, text, tenant, model=model)
            )
        )
    print(f"{REQUESTS} requests: {hits} hits, {elsewhere} at another replica, {len(wrong)} wrong")
    assert len(wrong) <= REQUESTS // 100, wrong
    assert elsewhere <= REQUESTS // 10
    assert hits > REQUESTS // 8


@pytest.mark.parametrize("app", ["direct"], indirect=True)
def test_what_left_the_pool_for_host_memory_is_predicted_and_found(app: LlmApp) -> None:
    """Prompts of half again both pools go round: without host memory, each would evict the next one to come."""
    texts = [f"host memory {number}. " + TEXT * 60 for number in range(24)]
    found = []
    for again in (False, True):
        for text in texts:
            told, answer = predicted(app, text, "a"), app.chat(text, "a")
            if again:
                found.append((cached(answer) in told, cached(answer) > 700))
            reached = (answer["usage"]["prompt_tokens"] - 1) // 32 * 32
            eventually(lambda text=text, reached=reached: reached in predicted(app, text, "a"))
    assert sum(right for right, _ in found) >= 23
    assert sum(hit for _, hit in found) >= 22


def test_a_request_that_names_two_tenants_is_refused(app: LlmApp) -> None:
    """Ray's ingress would take the first one, and vLLM's own application the last. docs: ray-serve-llm"""
    url = f"{app.ray.url}/v1/chat/completions"
    app.chat(TEXT)  # Ray's ingress makes its router for its first request
    for names, status in (("ab", 400), ("aa", 200), ("a", 200)):
        headers = [("authorization", f"Bearer {name}") for name in names]
        answer = httpx.post(url, json=chat_body(TEXT), headers=headers, timeout=120)
        assert answer.status_code == status, answer.text
        assert status == 200 or "authorization is sent twice" in answer.json()["error"]["message"]


def test_new_prompts_that_come_together_are_spread(app: LlmApp) -> None:
    texts = [f"new {number}. " + TEXT * 20 for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(app.chat, texts))
    assert len(app.state()["replicas"]) == 2
    eventually(lambda: all(sum(replica["blocks"].values()) for replica in app.state()["replicas"]))


def test_equal_new_prompts_that_come_together_are_computed_once(app: LlmApp) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(app.chat, ["the same at once. " + TEXT * 20] * 4))
    eventually(lambda: max(predicted(app, "the same at once. " + TEXT * 20, "a")) > 0)
    assert sorted(predicted(app, "the same at once. " + TEXT * 20, "a"))[0] == 0


def test_a_chat_that_cannot_be_followed_is_explained_as_such(app: LlmApp) -> None:
    parts = [{"type": "text", "text": TEXT}, {"type": "text", "text": "x"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert "winners" in app.explain("", **body), "text parts are text"
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    assert app.explain("", messages=[{"role": "user", "content": image}]) == {"routed_by_load": True}


TOOL = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
        {
            "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ],
    ids=lambda more: "+".join(more),
)
def test_a_prompt_is_rendered_as_vllm_renders_it(app: LlmApp, more: dict[str, Any]) -> None:
    assert app.explain("", **more)["prompt_tokens"] == app.chat("", **more)["usage"]["prompt_tokens"]


def test_a_tenant_sees_its_own_part_and_the_operator_all(app: LlmApp) -> None:
    app.chat("seen. " + TEXT * 10, "seen")
    name = app.scopes.tenant_in(key_of("seen"))
    eventually(lambda: name in {total["tenant"] for total in app.cache("v1/cache/events?once=true").json()["totals"]})
    own = app.cache("v1/cache/events?once=true", "seen").json()
    assert (own["viewer"], own["tenant"], [total["requests"] for total in own["totals"]]) == ("tenant", name, [1])
    assert own["prefixes"] and all("queued_tokens" not in replica for replica in own["replicas"])
    other = app.cache("v1/cache/events?once=true", "other").json()
    assert (other["totals"], other["prefixes"], other["decisions"]) == ([], [], [])


def test_loads_are_for_the_operator_alone(app: LlmApp) -> None:
    for path in ("v1/cache/state", "metrics"):
        assert app.cache(path).status_code == 200
        assert app.cache(path, "a").status_code == 403
        assert "WARMPATH_OPERATOR_KEY" in app.cache(path, "").text
    assert app.cache("v1/cache/explain", "a", chat_body(TEXT)).status_code == 403
    assert "warmpath_unplaced_kv_blocks_total" in app.cache("metrics").text
    assert app.cache("v1/cache/explain", body={"model": "demo"}).json()["prompts"] == [{"routed_by_load": True}]
    assert app.cache("nothing").status_code == 404


def test_a_key_has_so_many_streams_and_no_more(app: LlmApp) -> None:
    url = f"{app.ray.url}/cache/v1/cache/events"
    with ExitStack() as stack:
        streams = [stack.enter_context(httpx.stream("GET", url, headers=key_of("a"), timeout=60)) for _ in range(5)]
        assert [stream.status_code for stream in streams] == [200] * 4 + [429]
        assert any("event: snapshot" in line for line in islice(streams[0].iter_lines(), 8))
    eventually(lambda: httpx.get(f"{url}?once=true", headers=key_of("a")).status_code == 200)


def test_the_page_chats_through_rays_own_door(app: LlmApp) -> None:
    assert "<title>warmpath</title>" in app.cache("").text
    assert app.cache("page/main.js").status_code == 200
    url = f"{app.ray.url}/cache"
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        assert browser.get(url).url.path == "/cache/"
        assert browser.get(f"{url}/v1/models").json()["data"][0]["id"] == "demo"
        answer = browser.post(f"{url}/v1/chat/completions", json=chat_body(TEXT), headers=key_of("a"))
    assert answer.json()["usage"]["completion_tokens"] == 4


CLIENTS = 4
START_S = 300


def test_a_death_costs_the_requests_in_flight_and_a_new_replica_is_known_before_its_first_request(app: LlmApp) -> None:
    texts = [f"{number} of those that are asked again and again. " + TEXT * 10 for number in range(8)]
    for text in texts:
        app.chat(text)
    stop, errors, answered = Event(), [], []

    def ask(client: int) -> None:
        with httpx.Client(timeout=120) as door:
            while not stop.is_set():
                for text in texts[client::CLIENTS]:
                    url = f"{app.ray.url}/v1/chat/completions"
                    try:
                        answer = door.post(url, json=chat_body(text), headers=key_of("a")).raise_for_status()
                        answered.append(cached(answer.json()))
                    except httpx.HTTPError as error:
                        errors.append(repr(error))

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, client) for client in range(CLIENTS)]
        try:
            eventually(lambda: len(answered) >= 20)
            before = {replica["replica_id"] for replica in app.state()["replicas"]}
            app.ray.replicas("llm")[0].kill()
            eventually(lambda: before - {row["replica_id"] for row in app.state().get("replicas", [])}, START_S)
            enough = len(answered) + 50
            eventually(lambda: len(answered) >= enough, START_S)
            after = answered[enough - 10 : enough]
            eventually(lambda: len(app.state().get("replicas", [])) == 2, START_S)
            enough = len(answered) + 20
            eventually(lambda: len(answered) >= enough, START_S)
        finally:
            stop.set()
        for each in asking:
            each.result()
    assert len(errors) <= CLIENTS, errors
    assert all(after), "blocks lost with a replica were computed again within 50 requests"
    assert max(predicted(app, texts[0], "a")) > 0
