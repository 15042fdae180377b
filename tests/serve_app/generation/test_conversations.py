"""Conversations go back to the replica that holds their history; keys are hints for cold prompts and nothing more."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from router.core import RoutingCore
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.generation.prepare import Limits, Preparer
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

REPLICAS = [f"replica {i}" for i in range(8)]
TENANTS = [Tenant("acme"), Tenant("zeta")]
Messages = list[tuple[str, str]]


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    path = resolve_model("demo")
    return Preparer(
        load_checkpoint_info(path), PromptTokenizer(path), Tenants([], b"s" * 32), b"s" * 32,
        AdapterRegistry("demo"), Limits(8192, 8),
    )  # fmt: skip


class Deployment:
    """A real routing core over eight replicas whose caches hold whatever they were given."""

    def __init__(self, preparer: Preparer) -> None:
        self.preparer = preparer
        self.core = RoutingCore("router", RouterSettings.from_json({}), clock=lambda: 0.0, rng=Random(1))
        self.core.update_replicas(REPLICAS)
        self.load(dict.fromkeys(REPLICAS, 0))
        self.asked = 0

    def load(self, queued_tokens: dict[str, int]) -> None:
        """Let replicas report prefill under way, which nobody overtakes."""
        for name, tokens in queued_tokens.items():
            report = LoadReport(tokens, 0, min(tokens, 1), 64, 128, 5000.0, committed_prefill_tokens=tokens)
            self.core.apply(name, [report])

    def ask(self, tenant: Tenant, messages: Messages, key: str | None = None) -> tuple[str, int, str]:
        """Route and "compute" one turn: where it went, the cached tokens it will find, and why."""
        chat = ChatRequest(
            model="demo", prompt_cache_key=key,
            messages=tuple({"role": role, "content": content} for role, content in messages),
        )  # fmt: skip
        (generation,) = asyncio.run(self.preparer.prepare(chat, tenant, f"r{self.asked}"))
        self.asked += 1
        tokens = len(generation.token_ids)
        route = RoutedRequest(f"q{self.asked}", generation.block_hashes, tokens, generation.placement_key)
        decision = self.core.decide(route)
        assert decision is not None
        self.core.release(decision)
        self.core.apply(decision.replica_id, [BlocksStored(generation.block_hashes)])
        return decision.replica_id, decision.selected_cached_tokens, decision.reason


def test_conversations_return_to_their_history(preparer: Preparer) -> None:
    """Twenty conversations of two tenants, interleaved over five turns: each stays where it began and finds it all."""
    deployment, rng = Deployment(preparer), Random(3)
    talks: dict[tuple[Tenant, int], Messages] = {
        (tenant, number): [("system", "You are a clerk. " * 30)] for tenant in TENANTS for number in range(10)
    }
    homes: dict[tuple[Tenant, int], tuple[str, int]] = {}
    for turn in range(5):
        order = list(talks)
        rng.shuffle(order)
        for talk in order:
            messages = talks[talk]
            messages.append(("user", f"Question {turn} of {talk[1]}: {rng.random()}. " * 5))
            replica, cached, reason = deployment.ask(talk[0], messages)
            if turn:
                home, known = homes[talk]
                assert (replica, reason) == (home, "cached")
                assert cached > known
            homes[talk] = replica, cached
            messages.append(("assistant", f"Answer {rng.random()}. " * 4))


def test_a_history_is_left_only_for_a_longer_wait(preparer: Preparer) -> None:
    """Behind more queued work than the history would cost anew, another replica is quicker, and becomes a home too."""
    deployment = Deployment(preparer)
    talk: Messages = [("system", "You are a clerk. " * 200), ("user", "First?")]
    home, _, _ = deployment.ask(TENANTS[0], talk)
    deployment.load({home: 200})
    assert deployment.ask(TENANTS[0], [*talk, ("user", "Second?")])[0] == home
    deployment.load({home: 100_000})
    elsewhere, _, reason = deployment.ask(TENANTS[0], [*talk, ("user", "Third?")])
    assert elsewhere != home
    assert reason == "load_spill"


def test_a_key_places_cold_prompts_of_one_tenant_together(preparer: Preparer) -> None:
    """Unrelated prompts with one key meet on one idle replica; without, they spread; a warm prompt ignores its key."""
    deployment = Deployment(preparer)
    cold = [[("user", f"Story {number}: " + f"{number} times. " * 40)] for number in range(12)]
    keyed = {deployment.ask(TENANTS[0], talk, "one key")[0] for talk in cold}
    assert len(keyed) == 1
    spread = {deployment.ask(TENANTS[1], talk)[0] for talk in cold}
    assert len(spread) > 3
    (home,) = keyed
    others = [f"key {number}" for number in range(12)]
    assert {deployment.ask(TENANTS[0], cold[0], key)[0] for key in others} == {home}


def test_a_key_shares_nothing_between_tenants(preparer: Preparer) -> None:
    """The same key and prompt: the second tenant finds nothing cached."""
    deployment = Deployment(preparer)
    talk: Messages = [("user", "The same long question. " * 40)]
    assert deployment.ask(TENANTS[0], talk, "k")[1] == 0
    assert deployment.ask(TENANTS[1], talk, "k")[1] == 0
    assert deployment.ask(TENANTS[0], talk, "another")[1] > 100
