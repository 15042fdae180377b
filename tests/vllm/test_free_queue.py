"""vLLM's own cache manager over the queue of tenants, beside a naive account of every block."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from serve_app.cache.prefix.quota import CACHE_ACTIVE_S
from serve_app.engine.vllm.scheduling.free_queue import TenantFreeQueue
from tests.vllm.live import SIZE, hasher

BLOCKS = 17
"""One of them is vLLM's null block."""
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}

_names = itertools.count()

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("start", "start", "start", "grow", "end", "end", "reset", "later")),
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.integers(1, 30),
    ),
    max_size=60,
)

RELEASED_IN_ANOTHER_ORDER = [
    *(("start", "a", 0, 24), ("start", "b", 0, 20), ("end", "a", 1, 1), ("start", "a", 0, 4), ("end", "a", 0, 1)),
    *(("end", "a", 0, 1), ("reset", "a", 0, 1), ("start", "a", 0, 1), ("start", "a", 0, 1), ("start", "a", 0, 9)),
]
"""Tenants that release their blocks in another order than they got them."""


def ids_of(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


class Watched(TenantFreeQueue):
    """Keeps its own lists, and checks every taken block against them."""

    def __init__(self, blocks: list[Any]) -> None:
        self.now_s = 0.0
        super().__init__(blocks, BLOCKS, lambda: self.now_s)
        self.shares.set_weights(WEIGHTS)
        self.nothing = ids_of(blocks)
        self.lines: dict[str, list[int]] = {}
        self.owner: dict[int, str] = {}
        self.seen_s: dict[str, float] = {}

    def excess(self, tenant: str) -> float:
        if self.now_s - self.seen_s.get(tenant, 0.0) > CACHE_ACTIVE_S:
            return float("inf")
        return Counter(self.owner.values())[tenant] / WEIGHTS[tenant]

    def popleft_n(self, n: int) -> list[Any]:
        taken = super().popleft_n(n)
        assert len(taken) == n
        if n:
            self.seen_s[self.taker] = self.now_s
        for block in ids_of(taken):
            if self.nothing:
                assert block == self.nothing.pop(0)
            else:
                giver = self.owner[block]
                assert self.excess(giver) == max(self.excess(tenant) for tenant, line in self.lines.items() if line)
                assert block == self.lines[giver].pop(0)
            self.owner[block] = self.taker
        return taken

    def remove(self, block: Any) -> None:
        super().remove(block)
        self.lines[self.owner[block.block_id]].remove(block.block_id)

    def append_n(self, blocks: list[Any]) -> None:
        super().append_n(blocks)
        for block in ids_of(blocks):
            self.lines.setdefault(self.owner[block], []).append(block)

    def prepend_n(self, blocks: list[Any]) -> None:
        super().prepend_n(blocks)
        self.nothing = [*ids_of(blocks), *self.nothing]
        for block in ids_of(blocks):
            del self.owner[block]

    def forget(self) -> None:
        super().forget()
        for account in self.shares.all():  # an account is older than its first released block
            line = self.lines.get(account.tenant, [])
            self.nothing += line
            for block in line:
                del self.owner[block]
            line.clear()

    def check(self, manager: Any) -> None:
        """Check that blocks are conserved, free or used, and that the accounts match the lists."""
        free = ids_of(self.get_all_free_blocks())
        listed = [*self.nothing, *itertools.chain.from_iterable(self.lines.values())]
        assert len(free) == len(listed) == self.num_free_blocks
        assert set(free) == set(listed)
        used = ids_of(block for block in manager.block_pool.blocks if block.ref_cnt and not block.is_null)
        assert len(free) + len(used) + 1 == BLOCKS
        assert not set(free) & set(used)
        held = Counter(self.owner.values())
        for account in self.shares.all():
            idle = len(self.lines.get(account.tenant, ()))
            assert (account.held, account.idle, len(account.queue)) == (held[account.tenant], idle, idle)


class Cache:
    """vLLM's manager and the requests that hold its blocks. ``heard``: copies of each hash, by its events."""

    def __init__(self, *, watched: bool, window: bool = False) -> None:
        sizes = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["l"], FullAttentionSpec(**sizes))]
        if window:
            groups.append(KVCacheGroupSpec(["w"], SlidingWindowSpec(**sizes, sliding_window=2 * SIZE + 1)))
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            config,
            max_model_len=200,
            scheduler_block_size=SIZE,
            hash_block_size=SIZE,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.pool = self.manager.block_pool
        self.queue: Any = self.pool.free_block_queue
        if watched:
            self.queue = self.pool.free_block_queue = Watched(self.queue.get_all_free_blocks())
        self.live: list[tuple[str, Any]] = []
        self.heard: Counter[Any] = Counter()

    def do(self, action: str, tenant: str, prompt: int, tokens: int) -> list[int]:
        """Start a request, grow or end one, or forget all; return the blocks of a started or grown request."""
        self.queue.taker = tenant
        blocks: list[int] = []
        if action == "start":
            asked = request_of(tenant, prompt, tokens)
            hit, cached, _ = self.manager.get_computed_blocks(asked)
            new = self.manager.allocate_slots(asked, tokens - cached, cached, hit)
            if new is not None:
                asked.num_computed_tokens = tokens
                asked.status = RequestStatus.RUNNING
                self.live.append((tenant, asked))
                blocks = self.manager.get_block_ids(asked.request_id)[0]
        elif action == "grow" and self.live:
            self.queue.taker, asked = self.live[prompt % len(self.live)]
            asked.append_output_token_ids(tokens)
            if self.manager.allocate_slots(asked, 1) is not None:
                asked.num_computed_tokens += 1
            blocks = self.manager.get_block_ids(asked.request_id)[0]
        elif action == "end" and self.live:
            self.manager.free(self.live.pop(prompt % len(self.live))[1])
        elif action == "reset" and self.manager.reset_prefix_cache() and isinstance(self.queue, TenantFreeQueue):
            self.queue.forget()
        return blocks

    def hear(self) -> Counter[Any]:
        """Return the copies that remain after all events so far."""
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.heard.clear()
            else:
                change = Counter(event.block_hashes)
                self.heard = self.heard + change if isinstance(event, BlockStored) else self.heard - change
        return self.heard

    def held(self) -> Counter[Any]:
        return Counter(
            maybe_convert_block_hash(get_block_hash(block.block_hash))
            for block in self.pool.blocks
            if block.block_hash is not None
        )


def request_of(tenant: str, prompt: int, tokens: int) -> Any:
    ids = list(range(1000 * prompt, 1000 * prompt + tokens))
    params = SamplingParams(max_tokens=8)
    return Request(f"r{next(_names)}", ids, params, None, cache_salt=tenant, block_hasher=hasher)


@given(steps=STEPS, window=st.booleans())
@example(steps=RELEASED_IN_ANOTHER_ORDER, window=False)
@settings(max_examples=200, deadline=None)
def test_blocks_are_taken_from_tenants_over_their_share(steps: list[tuple[str, str, int, int]], window: bool) -> None:
    """Every block is free or used, every pop is the naive choice, and events match the pool.

    This also holds if layers with a window have blocks of their own in the same pool.
    """
    cache = Cache(watched=True, window=window)
    for step in steps:
        if step[0] == "later":
            cache.queue.now_s += 40.0 * step[3]
        cache.do(*step)
        cache.queue.check(cache.manager)
        assert cache.hear() == cache.held()


@given(steps=STEPS)
@settings(max_examples=200, deadline=None)
def test_one_tenants_blocks_go_as_vllms_own(steps: list[tuple[str, str, int, int]]) -> None:
    ours, theirs = Cache(watched=True), Cache(watched=False)
    for action, _, prompt, tokens in steps:
        assert ours.do(action, "a", prompt, tokens) == theirs.do(action, "a", prompt, tokens)
    assert ids_of(ours.queue.get_all_free_blocks()) == ids_of(theirs.queue.get_all_free_blocks())
    assert ours.manager.take_events() == theirs.manager.take_events()


def test_a_flood_takes_no_block_within_anothers_share() -> None:
    """It takes none from the cache or from use; an unused share is borrowed until its tenant returns."""
    cache = Cache(watched=True)
    cache.do("start", "a", 0, 6 * SIZE)
    cache.do("end", "a", 0, 0)
    for number in range(1, 40):
        cache.do("start", "b", number, 8 * SIZE)
        cache.do("end", "b", 0, 0)
    assert cache.queue.shares.holdings() == {"a": 6, "b": 10}
    assert cache.manager.get_computed_blocks(request_of("a", 0, 6 * SIZE + 1))[1] == 6 * SIZE
    cache.do("start", "a", 50, 7 * SIZE)
    assert cache.queue.shares.holdings() == {"a": 8, "b": 8}, "it grows to its share, then reuses its own blocks"
