"""A version is computed where another one is, on one replica after another, in pieces, and only where it is not yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES
from router.protocol.request import RoutedRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.prompts import PublicPromptConfig
from serve_app.errors import InvalidRequest, Overloaded
from serve_app.generation.dispatch import route_of
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.prompts import warming
from serve_app.ingress.prompts.warming import PIECE_TOKENS, Warm, Warmer
from serve_app.prompts.registry import Prompts
from serve_app.prompts.traffic import Use
from serve_app.tenants.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

REPLICAS = ("a", "b", "c")
USE = Use("default", "demo", None, None, chat=True)
BLOCK = 16


class Replicas:
    """Stands in for replicas and the router's core: who computed what, and the longest chain each one holds."""

    replica_ids = REPLICAS
    settings = SimpleNamespace(block_size=BLOCK)

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {name: set() for name in REPLICAS}
        self.computed: list[tuple[str, int]] = []
        self.forgetful: set[str] = set()

    def holders(self, route: RoutedRequest) -> dict[str, int]:
        chain = route.block_hashes
        parts = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
        found = {}
        for name, held in self.held.items():
            missing = next((at for at, part in enumerate(parts) if part not in held), len(parts))
            if missing:
                found[name] = missing * BLOCK
        return found

    def hold(self, name: str, chain: bytes) -> None:
        self.held[name] |= {chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)}

    async def generate(self, generation: Generation, avoid: tuple[str, ...]) -> AsyncGenerator[Tokens, None]:
        (name, *_) = [each for each in REPLICAS if each not in avoid]
        self.computed.append((name, len(generation.token_ids)))
        if name not in self.forgetful:
            self.hold(name, generation.block_hashes)
        yield Tokens((), 0, "length")


@pytest.fixture(scope="module")
def preparer() -> tuple[Preparer, Prompts, Tenants]:
    model = resolve_model("demo")
    texts = {"1": "You are the clerk. ", "2": "You are the new clerk. "}
    prompts = Prompts(
        PublicPromptConfig.model_validate({"name": "clerk", "version": version, "text": text * 300})
        for version, text in texts.items()
    )
    tokenizer = PromptTokenizer(model)
    prompts.install(tokenizer)
    tenants, secret = Tenants((), b"s" * 32), b"s" * 32
    info, limits = load_checkpoint_info(model), Limits(8192, 64)
    return Preparer(info, tokenizer, tenants, secret, AdapterRegistry("demo"), limits, prompts), prompts, tenants


def warm(preparer: tuple[Preparer, Prompts, Tenants], replicas: Replicas, *uses: Use) -> list[Warm]:
    prepare, prompts, tenants = preparer
    warmer = Warmer(prompts, prepare, tenants, cast(RoutingCore, replicas), replicas.generate, "demo")

    async def run() -> list[Warm]:
        found = await warmer.warm(prompts.all()["clerk@2"], uses, ["clerk@1"])
        assert await warmer.heard(found)
        return found

    return asyncio.run(run())


def hold_the_old_one(preparer: tuple[Preparer, Prompts, Tenants], replicas: Replicas, *names: str) -> None:
    request: Any = warming.ChatRequest(
        model="demo", messages=({"role": "user", "content": "What now?"},), prompt_ref="clerk@1"
    )
    tenant = preparer[2].authenticate(None)
    (old,) = asyncio.run(preparer[0].prepare(request, tenant, "old"))
    for name in names:
        replicas.hold(name, route_of(old).block_hashes)


def test_it_is_computed_where_the_old_one_is_and_nowhere_else(preparer: tuple[Preparer, Prompts, Tenants]) -> None:
    """One replica after another, in growing pieces; a second time there is nothing to do."""
    replicas = Replicas()
    hold_the_old_one(preparer, replicas, "a", "c")
    (found,) = warm(preparer, replicas, USE)
    assert found.replica_ids == ("a", "c") and found.tokens > 1000
    where = [name for name, _ in replicas.computed]
    assert where == sorted(where) and set(where) == {"a", "c"}
    sizes = [tokens for name, tokens in replicas.computed if name == "a"]
    assert len(sizes) > 2 and [0, *sizes] == sorted({0, *sizes})
    assert all(after - before <= PIECE_TOKENS for before, after in zip([0, *sizes], sizes, strict=False))
    done = len(replicas.computed)
    assert warm(preparer, replicas, USE) == [found]
    assert len(replicas.computed) == done


def test_where_nobody_has_the_old_one_the_router_places_it(preparer: tuple[Preparer, Prompts, Tenants]) -> None:
    """Once, also where nobody has asked yet; chats and bare text are two ways, whose KV differs."""
    replicas = Replicas()
    (found,) = warm(preparer, replicas)
    assert found.replica_ids == ("a",)
    done = len(replicas.computed)
    both = warm(preparer, replicas, USE, USE._replace(chat=False))
    assert len(both) == 2 and both[0] == found and len(replicas.computed) > done


def test_what_cannot_be_held_is_told(
    preparer: tuple[Preparer, Prompts, Tenants], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica without room makes it fail; a way whose tenant is gone is left out, unless it is the only one."""
    monkeypatch.setattr(warming, "HEARD_TIMEOUT_S", 0.05)
    replicas = Replicas()
    hold_the_old_one(preparer, replicas, "a", "b")
    replicas.forgetful = {"b"}
    with pytest.raises(Overloaded, match="1 of 2 replicas"):
        warm(preparer, replicas, USE)
    replicas.forgetful = set()
    gone = USE._replace(tenant="gone")
    assert len(warm(preparer, replicas, gone, USE)) == 1
    with pytest.raises(InvalidRequest, match="no tenant 'gone'"):
        warm(preparer, replicas, gone)
