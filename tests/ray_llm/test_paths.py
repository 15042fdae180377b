"""Both of Ray's paths to a replica: its ingress calls it, or HAProxy sends the bytes to the router's choice."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.conftest import eventually
from tests.ray_llm.conftest import ADAPTER, LlmApp, cached, chat_body

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
