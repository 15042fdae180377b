"""What the pool holds is what vLLM's events say, over whole histories with losses, repairs and resets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from router.directory.directory import Directory
from router.protocol.block_hash import PrefixScope, hash_blocks
from router.protocol.events import CacheDigest, Event
from serve_app.engine.vllm.events.endpoints import EventEndpoints
from serve_app.engine.vllm.events.pool import VllmPool
from serve_app.engine.vllm.events.subscriber import EventSubscriber
from tests.conformance.kv_events.laws import Checker
from tests.serve_app.engine.vllm.pool_model import PoolModel, Request, Routers, encode

BLOCKS, SIZE = 10, 2
KEPT = 3
"""Batches that the engine can send again."""

SCOPES = (
    (PrefixScope("m", salt=b"a"), None),
    (PrefixScope("m", "x@1", b"a"), "x@1"),
    (PrefixScope("m", salt=b"b"), None),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Line(EventSubscriber):
    """Its engine's last batches come from ``published`` in place of a socket. ``forgot``: whether some were lost."""

    published: list[bytes]
    forgot = False

    def _catch_up(self, context: Any) -> None:
        first = max(0, len(self.published) - KEPT)
        self.forgot |= first > self._expected
        for number in range(first, len(self.published)):
            self._take(number, self.published[number])


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, end, are preempted; prefixes are pinned; the cache is reset; batches are lost on the way."""

    running = Bundle("running")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolModel(BLOCKS, SIZE)
        self.held = VllmPool(SIZE, BLOCKS)
        self.line = Line(EventEndpoints(Path("/none")), self.held, self.tell)
        self.line.published = []
        self.checker = Checker(BLOCKS)
        self.on_the_way: list[tuple[int, bytes]] = []
        self.routers = Routers()
        self.directory = Directory(SIZE)
        self.directory.add_replica("r")
        self.prompts: list[tuple[bytes, list[int]]] = []

    @rule(target=running, scope=st.sampled_from(SCOPES), tokens=TOKENS, chunk=st.integers(1, 12))
    def begin(self, scope: tuple[PrefixScope, str | None], tokens: list[int], chunk: int) -> object:
        root = scope[0].root(b"k")
        self.prompts.append((root, tokens))
        begun = self.pool.begin(root, scope[1], tokens, chunk)
        return multiple() if begun is None else begun

    @rule(target=running, request=consumes(running), more=TOKENS)
    def grow(self, request: Request, more: list[int]) -> object:
        """It goes on; where there is no room it is preempted."""
        request.tokens += more
        if self.pool.proceed(request, len(request.tokens)):
            return request
        self.pool.end(request)
        return multiple()

    @rule(request=consumes(running))
    def end(self, request: Request) -> None:
        self.pool.end(request)

    @rule(target=pins, request=running)
    def pin(self, request: Request) -> list[int]:
        blocks = request.blocks[: request.hashed]
        self.pool.touch(blocks)
        return blocks

    @rule(blocks=consumes(pins))
    def unpin(self, blocks: list[int]) -> None:
        self.pool.release(list(reversed(blocks)))

    @rule(lost=st.booleans())
    def step(self, lost: bool) -> None:
        """The engine publishes what happened, and the batch may be lost."""
        events, published = self.pool.take_events(), self.line.published
        if events:
            published.append(encode(events))
            self.checker.batch(len(published) - 1, published[-1])
            if not lost:
                self.on_the_way.append((len(published) - 1, published[-1]))

    @rule(batches=st.integers(1, 4))
    def hear(self, batches: int) -> None:
        for _ in range(min(batches, len(self.on_the_way))):
            self.line._hear(*self.on_the_way.pop(0), None)  # type: ignore[arg-type]

    @rule()
    def reset(self) -> None:
        """Once its word of that is heard nothing of before is told any more."""
        self.line.cleared.clear()
        if self.pool.reset():
            self.step(lost=False)
            self.hear(len(self.on_the_way))
            assert self.line.cleared.is_set()
            assert self.routers.held() == set()

    @rule()
    def catch_up(self) -> None:
        """After a silence the engine is asked, and nothing is missing then."""
        self.step(lost=True)
        self.hear(len(self.on_the_way))
        self.line._catch_up(None)
        assert self.line._expected == len(self.line.published)
        if self.line.forgot:
            assert self.routers.held() <= self.pool.held()
        else:
            assert self.routers.held() == self.pool.held()
            self.check_matches()

    def check_matches(self) -> None:
        """The router predicts the very hit that the pool would give."""
        for root, tokens in self.prompts[-10:]:
            chain = hash_blocks(root, np.array(tokens, dtype=np.int32), SIZE)
            lora = next(lora for scope, lora in SCOPES if scope.root(b"k") == root)
            hit = len(self.pool.match(Request(root, lora, tokens), len(tokens)))
            assert self.directory.match(chain).get("r", 0) == hit * SIZE
            assert self.held.known(chain, len(tokens)) == hit

    @invariant()
    def says_what_it_holds(self) -> None:
        """What was told and what is held are the same, and bounded; and it is told anew."""
        assert len(self.routers.held()) == len(self.held) <= BLOCKS
        assert self.directory.blocks_held("r").get("pool", 0) == len(self.held)
        said: list[Event] = []
        self.line._sink, anew = said.extend, Routers()
        self.line.tell(anew=True)
        self.line._sink = self.tell
        *blocks, digest = said
        assert isinstance(digest, CacheDigest)
        assert self.routers.mirror.holds(digest)
        anew(blocks)
        assert anew.mirror.holds(digest)

    def tell(self, events: Sequence[Event]) -> None:
        self.routers(events)
        self.directory.apply("r", events)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
