"""A version is computed on the replicas of another version, one by one, in pieces, and only if still missing."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import cast

import pytest

from router.core import RoutingCore
from router.protocol.block_hash import split_chain
from router.protocol.request import RoutedRequest
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.prompts import PublicPromptConfig
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken
from serve_app.errors import InvalidRequest, Overloaded
from serve_app.fairness.front_door import ASKED_S, FrontDoor
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress import prompts as warming
from serve_app.ingress.prompts import PIECE_TOKENS, Warm, Warmer
from serve_app.prompts.registry import Prompts, Use
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.generation.outputs import output

REPLICAS = ("a", "b", "c")
USE = Use("default", "demo", None, None, chat=True)
BLOCK = 16


class Replicas:
    """Stands in for replicas and the router's core: (replica, tokens) computed, and each replica's blocks."""

    replica_ids: tuple[str, ...] = REPLICAS
    settings = SimpleNamespace(block_size=BLOCK)

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {name: set() for name in REPLICAS}
        self.computed: list[tuple[str, int]] = []
        self.forgetful: set[str] = set()

    def holders(self, route: RoutedRequest) -> dict[str, int]:
        parts = list(split_chain(route.block_hashes))
        found = {}
        for name, held in self.held.items():
            missing = next((at for at, part in enumerate(parts) if part not in held), len(parts))
            if missing:
                found[name] = missing * BLOCK
        return found

    def hold(self, name: str, chain: bytes) -> None:
        self.held[name] |= {*split_chain(chain)}

    async def generate(self, generation: EngineRequest, avoid: tuple[str, ...]) -> AsyncGenerator[EngineOutput, None]:
        (name, *_) = [each for each in REPLICAS if each not in avoid]
        self.computed.append((name, len(generation.token_ids)))
        if name not in self.forgetful:
            self.hold(name, generation.block_hashes)
        yield output((), FirstToken(0), "length")


class Desk:
    """The parts of an ingress that a warmer needs, besides its replicas."""

    def __init__(self) -> None:
        model, secret = resolve_model("demo"), b"s" * 32
        texts = {"1": "You are the clerk. ", "2": "You are the new clerk. "}
        self.prompts = Prompts(
            PublicPromptConfig.model_validate({"name": "clerk", "version": version, "text": text * 300})
            for version, text in texts.items()
        )
        tokenizer, self.tenants = PromptTokenizer(model), Tenants((), secret)
        self.prompts.install(tokenizer)
        self.preparer = Preparer(
            load_checkpoint_info(model), tokenizer, self.tenants, secret, AdapterRegistry("demo"), Limits(8192, 64),
            self.prompts,
        )  # fmt: skip

    def warm(self, replicas: Replicas, *uses: Use) -> list[Warm]:
        core = cast(RoutingCore, replicas)
        warmer = Warmer(self.prompts, self.preparer, self.tenants, core, replicas.generate, "demo")

        async def run() -> list[Warm]:
            warm = await warmer.warm(self.prompts.all()["clerk@2"], uses, ["clerk@1"])
            assert await warmer.heard(warm)
            return warm

        return asyncio.run(run())

    def replicas(self, *holders: str) -> Replicas:
        """Return replicas of which some hold the old version."""
        request = ChatRequest(model="demo", messages=({"role": "user", "content": "Hi"},), prompt_ref="clerk@1")
        (old,) = asyncio.run(self.preparer.prepare(request, self.tenants.authenticate(None), "old"))
        replicas = Replicas()
        for name in holders:
            replicas.hold(name, old.block_hashes)
        return replicas


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


def test_it_is_computed_where_the_old_one_is_and_nowhere_else(desk: Desk) -> None:
    """It is computed on one replica after another, in growing pieces; a second call has nothing to do."""
    replicas = desk.replicas("a", "c")
    (found,) = desk.warm(replicas, USE)
    assert found.replica_ids == ("a", "c") and found.tokens > 1000
    where = [name for name, _ in replicas.computed]
    assert where == sorted(where) and set(where) == {"a", "c"}
    sizes = [tokens for name, tokens in replicas.computed if name == "a"]
    assert len(sizes) > 2 and [0, *sizes] == sorted({0, *sizes})
    assert all(after - before <= PIECE_TOKENS for before, after in zip([0, *sizes], sizes, strict=False))
    done = len(replicas.computed)
    assert desk.warm(replicas, USE) == [found]
    assert len(replicas.computed) == done


def test_where_nobody_has_the_old_one_the_router_places_it(desk: Desk) -> None:
    """It is computed once, even without earlier use; chats and bare text are two uses with different KV."""
    replicas = Replicas()
    (found,) = desk.warm(replicas)
    assert found.replica_ids == ("a",)
    done = len(replicas.computed)
    both = desk.warm(replicas, USE, USE._replace(chat=False))
    assert len(both) == 2 and both[0] == found and len(replicas.computed) > done


def test_a_model_at_zero_is_asked_for_a_replica_until_the_version_is_warm(desk: Desk) -> None:
    """The warming takes no place at the front door, and the start may take longer than any request asks."""
    now_s, asked = 0.0, list[int]()
    door = FrontDoor(Shares({}), places=lambda: 0, max_waiting=8, max_bytes=1 << 20, clock=lambda: now_s)
    replicas = Replicas()
    replicas.replica_ids = ()

    async def generate(generation: EngineRequest, avoid: tuple[str, ...]) -> AsyncGenerator[EngineOutput, None]:
        nonlocal now_s
        now_s += 100 * ASKED_S
        asked.append(door.asking())
        replicas.replica_ids = REPLICAS
        async for one in replicas.generate(generation, avoid):
            yield one

    core = cast(RoutingCore, replicas)
    warmer = Warmer(desk.prompts, desk.preparer, desk.tenants, core, generate, "demo", door.needing_a_replica)
    assert door.asking() == 0
    asyncio.run(warmer.warm(desk.prompts.all()["clerk@2"], [USE], ["clerk@1"]))
    assert asked and set(asked) == {1}
    now_s += ASKED_S
    assert door.asking() == 0


def test_a_version_that_cannot_be_held_is_reported(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica without space makes it fail; a use by a removed tenant is skipped, unless it is the only one."""
    monkeypatch.setattr(warming, "HEARD_TIMEOUT_S", 0.05)
    replicas = desk.replicas("a", "b")
    replicas.forgetful = {"b"}
    with pytest.raises(Overloaded, match="1 of 2 replicas"):
        desk.warm(replicas, USE)
    replicas.forgetful = set()
    gone = USE._replace(tenant="gone")
    assert len(desk.warm(replicas, gone, USE)) == 1
    with pytest.raises(InvalidRequest, match="no tenant 'gone'"):
        desk.warm(replicas, gone)
