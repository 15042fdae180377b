"""Models with several groups of KV: predictions against vLLM's own cache manager, over its own events.

Requests of two tenants, behind public prompts or not, grow, end, are preempted and evict each other's blocks; blocks
of a window are freed while their request runs. No engine is started.
"""

import math
import os
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from router.directory import Directory
from router.protocol.block_hash import PrefixScope
from router.protocol.events import CacheDigest, TierDigest
from router.vllm_events.batches import decode_batch
from router.vllm_events.pool import FollowedPool
from serve_app.engine.vllm.scheduling.free_queue import TenantFreeQueue
from serve_app.engine.vllm.scheduling.scheduler import TenantScheduler
from serve_app.engine.vllm.scheduling.scoped_blocks import ScopedBlocks
from tests.vllm.live import SIZE, Live

BLOCKS = 41
"""One of them is vLLM's null block."""
WEIGHTS = {"a": 1.0, "b": 2.0}


def full(size: int = SIZE) -> KVCacheSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(tokens: int, size: int = SIZE) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens)


def state() -> KVCacheSpec:
    return MambaSpec(block_size=SIZE, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


MODELS: dict[str, list[KVCacheSpec]] = {
    "full attention": [full()],
    "gpt-oss: a window beside full attention": [window(9), full()],
    "Gemma 3: the same window in several groups": [window(14), window(14), full()],
    "Mistral: a window in every layer": [window(11)],
    "two windows": [window(6), window(17)],
    "two windows beside full attention": [window(6), full(), window(17)],
    "short convolutions beside full attention": [state(), full()],
    "states and a window beside full attention": [state(), window(9), full()],
    "Gemma 4: larger blocks in a window": [window(17, 2 * SIZE), full()],
    "Gemma 4: larger blocks in full attention": [window(9), full(2 * SIZE)],
}

# Tenant, public tokens shared with others, a prompt and the number of its tokens, chunk.
ASKED = st.integers(0, 1), st.integers(1, 60), st.integers(1, 16)
Asked = st.tuples(st.sampled_from("ab"), st.integers(0, 13), *ASKED)
Others = st.tuples(st.sampled_from(("grow", "grow", "end", "end", "preempt", "reset")), st.integers(0, 20))
Steps = st.lists(st.one_of(*[st.tuples(st.just("start"), Asked)] * 2, Others), min_size=10, max_size=50)


class Served:
    """Requests over one manager. ``ours``: with the queue of tenants and scoped blocks, else vLLM's own alone."""

    def __init__(self, specs: list[KVCacheSpec], *, ours: bool = True, blocks: int = BLOCKS) -> None:
        groups = [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]
        self.parts = isinstance(specs[-1], FullAttentionSpec) and specs[-1].block_size > SIZE
        """Whether vLLM also names parts of blocks, which are no hits here."""
        self.aligned = any(isinstance(spec, MambaSpec) for spec in specs)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=200,
            scheduler_block_size=math.lcm(*(spec.block_size for spec in specs)),
            hash_block_size=SIZE,
            max_in_flight_tokens=16,
            enable_kv_cache_events=True,
        )
        pool = self.manager.block_pool
        self.queue: Any = pool.free_block_queue
        self.blocks: ScopedBlocks | None = None
        if ours:
            self.queue = pool.free_block_queue = TenantFreeQueue(self.queue.get_all_free_blocks(), blocks)
            self.queue.shares.set_weights(WEIGHTS)
            self.blocks = ScopedBlocks(pool, self.queue)
        self.pool, self.directory = FollowedPool(SIZE, blocks), Directory(SIZE)
        self.directory.add_replica("r")
        self.live: list[Live] = []
        self.hits = self.most_used = 0
        self._blocks = blocks - 1

    @property
    def used(self) -> int:
        """Blocks in use, without vLLM's null block."""
        return self._blocks - int(self.queue.num_free_blocks)

    def do(self, action: str, asked: Any) -> None:
        one = self.live[asked % len(self.live)] if self.live and action in ("grow", "end", "preempt") else None
        if action == "start":
            self.start(self.asked(*asked))
        elif action == "reset" and self.manager.reset_prefix_cache() and self.blocks:
            self.queue.forget()
        elif one is not None and action == "grow":
            for _ in range(1 + asked % 7):
                one.request.append_output_token_ids(7)
                if not self.compute(one, 1):
                    break
        elif one is not None:
            self.leave(one)
            if action == "preempt":
                self.start(one)
        self.hear()

    def asked(self, tenant: str, shared: int, prompt: int, tokens: int, chunk: int) -> Live:
        ids = np.array([*[5] * shared, *range(1000 * prompt, 1000 * prompt + tokens)], np.int32)
        scope = PrefixScope("m", salt=tenant.encode(), public_blocks=shared // SIZE)
        one = Live.asked(tenant, scope, ids, chunk=chunk if not self.aligned else -(-chunk // SIZE) * SIZE)
        if self.blocks:
            self.blocks.begin(one.request)
        return one

    def start(self, one: Live) -> None:
        """Read the cached blocks, which must be as many as predicted, and compute the rest in chunks."""
        self.manager.new_step_starts()
        hit, cached, _ = self.manager.get_computed_blocks(one.request)
        most = (len(one.ids) - 1) // SIZE
        assert cached == SIZE * self.pool.count_held(one.chain(), most)
        assert cached == self.directory.match(one.chain()[: 16 * most]).get("r", 0)
        self.hits += cached > 0
        left = len(one.ids) - cached
        if not self.compute(one, min(left, one.chunk), cached, hit):
            return
        one.request.status = RequestStatus.RUNNING
        self.live.append(one)
        while (left := len(one.ids) - one.request.num_computed_tokens) > 0:
            self.manager.new_step_starts()
            if not self.compute(one, min(left, one.chunk)):
                self.leave(one)
                return
            self.hear()

    def compute(self, one: Live, tokens: int, cached: int = 0, *hit: Any) -> bool:
        request, self.queue.taker = one.request, one.tenant
        if self.manager.allocate_slots(request, tokens, cached, *hit) is None:
            return False
        request.num_computed_tokens += cached + tokens
        self.most_used = max(self.most_used, self.used)
        return True

    def leave(self, one: Live) -> None:
        self.live.remove(one)
        self.manager.free(one.request)
        one.request.num_computed_tokens = 0

    def hear(self) -> None:
        """Follow vLLM's events; the pool then has vLLM's blocks, and routers have the pool's."""
        batch = KVEventBatch(ts=1.0, events=self.manager.take_events(), data_parallel_rank=0)
        self.directory.apply("r", self.pool.translate(decode_batch(msgspec.msgpack.encode(batch))))
        digest = CacheDigest((TierDigest(self.pool.tier, len(self.pool), self.pool.xor),))
        assert self.directory.drift("r", digest) is None
        names = self.manager.block_pool.cached_block_hash_to_block
        assert self.pool.held_blocks == len(names) or self.parts
        assert self.pool.unplaced == 0


@pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS.keys())
@given(steps=Steps)
@settings(max_examples=int(os.environ.get("WARMPATH_SEQUENCES", "40")), deadline=None)
def test_predictions_are_the_hits_of_vllms_own_manager(specs: list[KVCacheSpec], steps: list[tuple[str, Any]]) -> None:
    served = Served(specs)
    for action, asked in steps:
        served.do(action, asked)
    event(f"{'some' if served.hits else 'no'} hits")


Alone = st.lists(
    st.one_of(*[st.tuples(st.just("start"), st.tuples(st.just("a"), st.just(0), *ASKED))] * 2, Others),
    min_size=10,
    max_size=50,
)


@pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS.keys())
@given(steps=Alone)
@settings(max_examples=15, deadline=None)
def test_one_tenant_holds_as_many_blocks_as_under_vllm_alone(
    specs: list[KVCacheSpec], steps: list[tuple[str, Any]]
) -> None:
    """Each step uses as many blocks, and as many keep a prefix."""
    ours, theirs = Served(specs), Served(specs, ours=False)
    for action, asked in steps:
        for one in (ours, theirs):
            one.do(action, asked)
        assert (ours.used, len(ours.pool)) == (theirs.used, len(theirs.pool))


def test_blocks_outside_a_window_are_free_while_a_request_runs() -> None:
    """A prompt of 38 blocks in the shape of Gemma 3 holds all of them once, and of two windows the last ones."""
    served = Served(MODELS["Gemma 3: the same window in several groups"], blocks=200)
    served.do("start", ("a", 0, 0, 38 * SIZE - 1, 4 * SIZE))
    assert served.used == 38 + 2 * 6
    served.do("grow", 6)
    assert served.used == 40 + 2 * 4


@pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS.keys())
def test_turns_count_the_blocks_of_all_groups(specs: list[KVCacheSpec]) -> None:
    """A request never holds more blocks than its tenant's turn counts, and without windows it holds all of them."""
    for tokens in range(1, 100, 7):
        served = Served(specs, blocks=200)
        counted = TenantScheduler._blocks_for(SimpleNamespace(kv_cache_manager=served.manager), tokens)  # type: ignore[arg-type]
        one = served.asked("a", 0, 0, tokens, 16)
        served.start(one)
        assert served.most_used <= counted
        if len(specs) == 1 and isinstance(specs[0], FullAttentionSpec):
            assert served.used == counted
        assert counted <= sum(-(-tokens // spec.block_size) for spec in specs)
