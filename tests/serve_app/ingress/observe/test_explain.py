"""The explain endpoint's bodies: a real request's routing facts, its tenant, and errors that name a field."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.core import RoutingCore
from router.policy.policies import POLICIES
from router.protocol.events import BlocksStored
from router.settings import RouterSettings
from serve_app.api.openai.request import parse_chat
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.tenants import TenantConfig
from serve_app.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, RateLimited
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.observe.explain import explanation
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

SECRET = b"s" * 32
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tell me about the harbour. " * 20}]}
TWO_TENANTS = [TenantConfig(name=name, key_sha256=[digit * 64]) for name, digit in (("acme", "a"), ("globex", "b"))]


class Desk:
    def __init__(self, path: Path, tenants: Tenants) -> None:
        self.core = RoutingCore("me", RouterSettings(), clock=lambda: 0.0)
        self.core.update_replicas(["a", "b"])
        self.tenants = tenants
        self.door = FrontDoor(Shares({}), places=lambda: 1, max_waiting=1, max_bytes=1 << 20)
        self.preparer = Preparer(
            load_checkpoint_info(path), PromptTokenizer(path), tenants, SECRET, AdapterRegistry("demo"), Limits(1024, 8)
        )

    def ask(self, body: Any) -> dict[str, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = asyncio.run(explanation(raw, self.core, self.preparer, self.tenants, self.door))
        answer: dict[str, Any] = json.loads(json.dumps(said))
        return answer

    def hold(self, replica_id: str, tenant: str) -> None:
        """Let a replica hold the chat as one tenant's prompt."""
        wanted = parse_chat(json.dumps(CHAT).encode())
        generation = asyncio.run(self.preparer.prepare(wanted, Tenant(tenant), "x"))[0]
        self.core.apply(replica_id, [BlocksStored(generation.block_hashes)])


@pytest.fixture
def alone(demo_model_path: Path) -> Desk:
    return Desk(demo_model_path, Tenants([], SECRET))


def test_the_limit_that_would_refuse_a_request_or_let_it_wait_is_named(alone: Desk) -> None:
    """With the tenant's own numbers, as in an error; nothing is counted."""

    async def run() -> None:
        free = {"refusal": None, "wait": None}
        assert alone.door.outlook("default") == free
        with alone.door.arrive("default") as arrival:
            full = {"place": "ingress", "limit": "max_queued_requests", "used": 1, "most": 1, "retry_after_s": 1.0}
            assert alone.door.outlook("default") == {"refusal": full, "wait": None}
            with pytest.raises(RateLimited) as refused:
                alone.door.arrive("default")
            assert refused.value.shown_reason == {"reason": full}
            await arrival.turn(1)
            place = arrival.hand_over()
        taken = {"place": "ingress", "limit": "max_num_seqs", "used": 1, "most": 1}
        assert alone.door.outlook("default") == {"refusal": None, "wait": taken}
        place.give_back()
        assert alone.door.outlook("default") == free

    asyncio.run(run())
    assert alone.ask(CHAT)["refusal"] is None


def test_a_request_is_explained_as_it_would_be_routed(alone: Desk) -> None:
    """Its holder wins under all cache-aware policies; choices share a prompt, and a response has a chat's."""
    alone.hold("b", "default")
    said = alone.ask(CHAT)
    assert (said["tenant"], said["policy"], said["model"]) == ("default", "estimated_ttft", "demo")
    prompt = said["prompts"][0]
    assert set(prompt["winners"]) == set(POLICIES)
    assert {prompt["winners"][policy]["replica_id"] for policy in ("estimated_ttft", "lmetric")} == {"b"}
    first = prompt["replicas"][0]
    assert first["cached_tokens"] == first["cached_tokens_by_tier"]["pool"] > 64
    assert alone.core.counters.by_policy["estimated_ttft"].by_reason == {}
    assert set(alone.ask({**CHAT, "policy": "lmetric"})["prompts"][0]["winners"]) == {"lmetric"}
    completion = alone.ask({"model": "demo", "prompt": ["one", "another one"], "n": 2, "max_tokens": 4})
    assert [each["prompt_tokens"] > 0 for each in completion["prompts"]] == [True, True]
    response = alone.ask({"model": "demo", "input": CHAT["messages"]})
    assert response["prompts"][0]["prefix"] == prompt["prefix"]


def test_the_tenant_named_is_the_one_explained(demo_model_path: Path) -> None:
    """One tenant's cached prompt does not affect another's; with several tenants the request must name one."""
    shared = Desk(demo_model_path, Tenants(TWO_TENANTS, SECRET))
    shared.hold("b", "acme")
    cached = {t: shared.ask({**CHAT, "tenant": t})["prompts"][0]["best_cached_tokens"] for t in ("acme", "globex")}
    assert cached["acme"] > 64
    assert cached["globex"] == 0
    with pytest.raises(InvalidRequest, match="one of acme, globex") as missing:
        shared.ask(CHAT)
    assert missing.value.param == "tenant"


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        (b"[", InvalidRequest, None),
        ({**CHAT, "prompt": "and text"}, InvalidRequest, None),
        ({**CHAT, "policy": "best"}, InvalidRequest, "policy"),
        ({**CHAT, "tenant": "nobody"}, InvalidRequest, "tenant"),
        ({**CHAT, "temperature": 9}, InvalidRequest, "temperature"),
        ({**CHAT, "model": "other"}, ModelNotFound, "model"),
        ({"model": "demo", "prompt": "word " * 2000}, ContextLengthExceeded, "prompt"),
    ],
)
def test_bad_bodies_are_refused_as_the_request_would_be(
    alone: Desk, body: Any, error: type[Exception], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        alone.ask(body)
    assert getattr(caught.value, "param", None) == param
