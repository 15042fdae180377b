"""The router inside Ray Serve LLM, called as Serve calls it on either path."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from router.protocol.block_hash import hash_blocks
from router.protocol.events import BlocksStored, request_key
from router.serve.core_registry import router_for
from router.serve.request_router import deployment_key
from serve_app.ray_llm import router as module
from serve_app.ray_llm.router import WarmRouter
from serve_app.ray_llm.scopes import METADATA, EngineFacts, Scopes
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.eventually import until
from tests.router.cores import load
from tests.router.serve.test_wait_queue import FakeRunningReplica

pytestmark = pytest.mark.anyio

BLOCK = 32
TEXT = "Once upon a time there was a router that knew its replicas' blocks. " * 8
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_SECRET", "a secret of this test")


class Case:
    """Two replicas of one deployment, of which ``b`` holds a prompt of tenant ``a``'s."""

    def __init__(self, name: str, source: Path, **facts: Any) -> None:
        self.scopes = Scopes("m", "authorization")
        told = {"tenant_header": "authorization", "secret_check": self.scopes.check, **facts}
        known = EngineFacts(model="m", source=str(source), block_size=BLOCK, **told)
        deployment = DeploymentID(name, "app")
        self.router = WarmRouter(deployment, DeploymentHandleSource.REPLICA)
        self.router.initialize_state()
        replicas = [FakeRunningReplica(ReplicaID(letter, deployment)) for letter in "ab"]
        for replica in replicas:
            replica.replica_metadata = {METADATA: asdict(known)}
        self.router.update_replicas(replicas)  # type: ignore[arg-type]
        self.core = self.router.core
        for letter in "ab":
            self.core.apply(letter, [load()])
        root = self.scopes.root(self.scopes.tenant_of("key of a"), "", None)
        ids = PromptTokenizer(source).encode(TEXT, root).token_ids
        self.tokens = len(ids)
        self.core.apply("b", [BlocksStored(hash_blocks(root, np.asarray(ids), BLOCK))])

    def asked(self, tenant: str = "", *, path: str = "standard", **fields: Any) -> Any:
        """A request in the form of Serve's router. ``tenant``: the header's value."""
        body = SimpleNamespace(model="m", **(fields or {"prompt": TEXT}))
        more = [SimpleNamespace(headers={"Authorization": tenant} if tenant else {})] if path == "standard" else []
        metadata = SimpleNamespace(request_id=f"r{id(body)}", session_id=tenant)
        context = SimpleNamespace(should_backoff=False)
        return SimpleNamespace(args=[body, *more], kwargs={}, metadata=metadata, routing_context=context)

    async def chosen(self, asked: Any) -> str:
        replica = await self.router._choose_replica_for_request(asked)
        return str(replica.replica_id.unique_id)

    async def direct(self, asked: Any) -> list[str]:
        ranks = await self.router.choose_replicas(list(self.router._replicas.values()), asked)
        return [str(replica.replica_id.unique_id) for rank in ranks for replica in rank]


async def test_a_tenants_prompt_goes_where_its_kv_is_and_a_strangers_does_not_know_of_it(demo_model_path: Path) -> None:
    case = Case("standard", demo_model_path)
    assert await case.chosen(case.asked("key of a")) == "b"
    route = await case.router.route_of(case.asked("key of b"))
    assert route is not None and route.prompt_tokens == case.tokens
    assert case.core.holders(route) == {}
    assert router_for(deployment_key("app", "standard")) is case.router


async def test_a_request_for_the_logprobs_of_its_prompt_is_predicted_without_a_hit(demo_model_path: Path) -> None:
    """vLLM computes such a prompt anew."""
    case = Case("told", demo_model_path)
    for fields, reads in (
        ({}, True), ({"logprobs": 1}, True), ({"echo": True, "logprobs": None}, True), ({"prompt_logprobs": 0}, False),
        ({"echo": True, "logprobs": 1}, False), ({"prompt_logprobs": None, "echo": False}, True),
    ):  # fmt: skip
        route = await case.router.route_of(case.asked("key of a", prompt=TEXT, **fields))
        assert route is not None and route.reads_kv == reads
        assert case.core.holders(route).keys() == ({"b"} if reads else set())
    chat = {"messages": [{"role": "user", "content": "Hi"}], "echo": True, "top_logprobs": 0}
    route = await case.router.route_of(case.asked("key of a", **chat))
    assert route is not None and not route.reads_kv


def queued(case: Case, replica: str) -> int:
    """Return the tokens that the router believes queued at a replica."""
    return next(
        int(row["queued_prefill_tokens"]) for row in case.core.state()["replicas"] if row["replica_id"] == replica
    )


async def test_a_request_is_counted_once_and_is_in_flight_until_its_first_token(demo_model_path: Path) -> None:
    """The replica reports it by its key; meanwhile a second prompt with the same prefix follows the first."""
    case = Case("reserved", demo_model_path)
    asked = case.asked("key of b")
    chosen = await case.chosen(asked)
    route = await case.router.route_of(asked)
    assert route is not None and queued(case, chosen) == case.tokens
    key = request_key(route.block_hashes, route.prompt_tokens)
    arrived = structs.replace(load(queued=case.tokens), arrived=key)
    case.router._heard(chosen, [arrived])
    assert queued(case, chosen) == case.tokens
    assert await case.chosen(case.asked("key of b")) == chosen
    case.router._heard(chosen, [structs.replace(load(), arrived=key, begun=key)])
    assert queued(case, chosen) == 0
    assert case.core.state()["open_reservations"] == 0


async def test_a_request_that_no_replica_reports_counts_as_load_for_a_while_only(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESERVED_S", 0.05)
    case = Case("refused", demo_model_path)
    chosen = await case.chosen(case.asked("key of b"))
    await until(lambda: queued(case, chosen) == 0)
    assert case.core.state()["open_reservations"] == 1, "it may still be in flight"


async def test_equal_requests_that_never_begin_are_bounded(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may refuse them all; the oldest ones stop counting as open."""
    monkeypatch.setattr(module, "MAX_OPEN", 20)
    case = Case("never", demo_model_path)
    for _ in range(100):
        route = await case.router.route_of(case.asked("key of b"))
        assert route is not None
        decision = case.core.decide(route, ("a",))
        if decision is None:  # it looks full by then
            case.core.apply("b", [load()])
            continue
        case.router._decided(route, decision)
        case.core.reported(decision)
    assert case.core.state()["open_reservations"] == len(case.router._open) == 20


async def test_a_reservation_at_a_replica_that_rejects_is_released(demo_model_path: Path) -> None:
    case = Case("rejected", demo_model_path)
    asked = case.asked("key of b")
    await case.chosen(asked)
    await case.router._choose_replica_for_request(asked, is_retry=True)
    assert case.core.state()["open_reservations"] == 1


async def test_direct_streaming_decides_and_reserves_once(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There Ray calls only ``choose_replicas``, and names the tenant by Serve's session id."""
    monkeypatch.setattr(module, "session_header", lambda: "authorization")
    case = Case("direct", demo_model_path)
    assert await case.direct(case.asked("key of a", path="direct")) == ["b"]
    assert case.core.state()["open_reservations"] == 1


async def test_requests_wait_for_a_replica_as_they_do_in_ray(demo_model_path: Path) -> None:
    case = Case("early", demo_model_path)
    assert case.core.settings.no_replica_wait_s == float("inf")


async def test_while_all_are_full_serve_is_told_to_pause(demo_model_path: Path) -> None:
    case = Case("full", demo_model_path)
    for letter in "ab":
        case.core.apply(letter, [load(running=8, waiting=16)])
    asked = case.asked("key of a")
    assert await case.direct(asked) == []
    assert asked.routing_context.should_backoff


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": ["one", "two"]}, "media, several prompts, or refused by the template"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "media, several prompts, or refused by the template"),
        ({"input": "of /v1/responses"}, "media, several prompts, or refused by the template"),
    ],
)
async def test_a_request_that_cannot_be_followed_goes_by_load_and_is_counted(
    demo_model_path: Path, fields: dict[str, Any], reason: str
) -> None:
    case = Case(f"by load {fields}", demo_model_path)
    assert await case.chosen(case.asked("key of a", **fields)) in ("a", "b")
    assert case.router.by_load == {reason: 1}
    assert case.core.counters.faults == 0


async def test_direct_streaming_without_the_tenants_header_goes_by_load(demo_model_path: Path) -> None:
    case = Case("unknown", demo_model_path)
    assert len(await case.direct(case.asked("key of a", path="direct"))) == 1
    assert case.router.by_load == {"tenant unknown": 1}


async def test_with_another_secret_than_the_replicas_nothing_is_predicted(demo_model_path: Path) -> None:
    case = Case("secret", demo_model_path, secret_check="of another")
    assert await case.chosen(case.asked("key of a")) in ("a", "b")
    assert case.router.by_load == {"no tokenizer": 1}


async def test_parts_of_text_and_tools_are_rendered_as_vllm_renders_them(demo_model_path: Path) -> None:
    case = Case("parts", demo_model_path)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    whole = await case.router.route_of(case.asked("k", messages=[{"role": "user", "content": "one\ntwo"}]))
    cut = await case.router.route_of(case.asked("k", messages=[{"role": "user", "content": parts}]))
    assert whole is not None and cut is not None
    assert (whole.block_hashes, whole.prompt_tokens) == (cut.block_hashes, cut.prompt_tokens)
