"""After any history of vLLM's pool, heard over a line that loses batches, routers know what the pool holds."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from router.directory.directory import Directory
from router.feed.sequencer import BlockMirror
from router.protocol.block_hash import PrefixScope, hash_blocks, split_chain
from router.protocol.events import CacheDigest, Event
from serve_app.engine.vllm.events.batch_order import SILENCE_S, BatchOrder, Lost, Ordered
from serve_app.engine.vllm.events.batches import decode_batch
from serve_app.engine.vllm.events.translator import Translator
from tests.conformance.kv_events.laws import Checker
from tests.serve_app.engine.vllm.pool_model import PoolModel, Request, encode

BLOCKS, SIZE = 10, 2
KEPT = 3
"""Batches that the engine can send again."""

SCOPES = (
    (PrefixScope("m", salt=b"a"), None),
    (PrefixScope("m", "x@1", b"a"), "x@1"),
    (PrefixScope("m", salt=b"b"), None),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, end, are preempted; prefixes are pinned; the cache is reset; batches are lost on the way."""

    running = Bundle("running")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolModel(BLOCKS, SIZE)
        self.translator = Translator(SIZE, BLOCKS)
        self.now_s = 0.0
        self.order = BatchOrder(self.now_s)
        self.published: list[bytes] = []
        self.checker = Checker(BLOCKS)
        self.on_the_way: list[tuple[int, bytes]] = []
        self.mirror = BlockMirror()
        self.directory = Directory(SIZE)
        self.directory.add_replica("r")
        self.forgot = False
        self.prompts: list[tuple[bytes, list[int]]] = []

    @initialize(maps=st.booleans())
    def form(self, maps: bool) -> None:
        self.maps = maps

    @rule(target=running, scope=st.sampled_from(SCOPES), tokens=TOKENS, chunk=st.integers(1, 12))
    def begin(self, scope: tuple[PrefixScope, str | None], tokens: list[int], chunk: int) -> object:
        root = scope[0].root(b"k")
        self.prompts.append((root, tokens))
        begun = self.pool.begin(root, scope[1], tokens, chunk)
        return multiple() if begun is None else begun[0]

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
        events = self.pool.take_events()
        if events:
            self.published.append(encode(events, maps=self.maps))
            self.checker.batch(len(self.published) - 1, self.published[-1])
            if not lost:
                self.on_the_way.append((len(self.published) - 1, self.published[-1]))

    @rule(batches=st.integers(1, 4))
    def hear(self, batches: int) -> None:
        for _ in range(min(batches, len(self.on_the_way))):
            number, payload = self.on_the_way.pop(0)
            self.take(self.order.live(number, payload, self.now_s))

    @rule(late=st.booleans())
    def reset(self, late: bool) -> None:
        """The engine's word of a reset may come before the call returns, or with the next step only."""
        mark = self.translator.before_reset()
        if not self.pool.reset():
            return
        if late:
            self.tell(self.translator.after_reset(mark))
            self.hear(len(self.on_the_way))
            assert self.mirrored() == set(), "what was on the way is of before the reset"
        else:
            self.step(lost=False)
            self.hear(len(self.on_the_way))
            self.tell(self.translator.after_reset(mark))

    @rule()
    def reset_amid_a_loss(self) -> None:
        """Batches are known to be lost while the engine resets its cache, its word of that among them."""
        mark = self.translator.before_reset()
        done = self.pool.reset()
        self.step(lost=True)
        self.hear(len(self.on_the_way))
        self.order = BatchOrder(self.now_s)
        self.order.expected = len(self.published)
        self.take([Lost(1)])
        if done:
            self.tell(self.translator.after_reset(mark))
            assert not self.translator.waits_for_reset, "its word will not come"

    @rule()
    def catch_up(self) -> None:
        """After a silence the engine is asked, and nothing is missing then."""
        self.step(lost=True)
        self.hear(len(self.on_the_way))
        self.now_s += SILENCE_S
        for _ in range(3):
            first = self.order.ask(self.now_s)
            if first is not None:
                for number in range(max(first, len(self.published) - KEPT), len(self.published)):
                    self.take(self.order.replayed(number, self.published[number]))
                self.take(self.order.replay_ended(self.now_s))
        assert self.order.expected == len(self.published)
        assert self.checker.violations == [], "the model keeps the laws that recorded engines keep"
        if self.forgot:
            assert self.mirrored() <= self.pool.held()
        else:
            assert self.mirrored() == self.pool.held()
            self.check_matches()

    def check_matches(self) -> None:
        """The router predicts the very hit that the pool would give."""
        for root, tokens in self.prompts[-10:]:
            chain = hash_blocks(root, np.array(tokens, dtype=np.int32), SIZE)
            lora = next(lora for scope, lora in SCOPES if scope.root(b"k") == root)
            hit = len(self.pool.match(Request(root, lora, tokens), len(tokens)))
            assert self.directory.match(chain).get("r", 0) == hit * SIZE
            assert self.translator.known_blocks(chain, len(tokens)) == hit

    @invariant()
    def says_what_it_holds(self) -> None:
        """What was told and what the translator holds are the same, and bounded."""
        assert len(self.mirrored()) == self.translator.num_blocks <= BLOCKS
        assert self.directory.blocks_held("r").get("pool", 0) == self.translator.num_blocks
        assert not self.translator.counts.collisions
        digest, anew = CacheDigest((self.translator.digest,)), BlockMirror()
        assert self.mirror.holds(digest)
        for event in self.translator.announce():
            anew.apply(event)
        assert anew.holds(digest)

    def mirrored(self) -> set[bytes]:
        return set(split_chain(self.mirror.tiers().get("pool", b"")))

    def take(self, batches: list[Ordered]) -> None:
        for batch in batches:
            if isinstance(batch, Lost):
                self.forgot = True
                self.tell(self.translator.forget())
            else:
                self.tell(self.translator.translate(decode_batch(batch)))

    def tell(self, events: list[Event]) -> None:
        for event in events:
            self.mirror.apply(event)
        self.directory.apply("r", "e", events)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
