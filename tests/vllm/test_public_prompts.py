"""Public prompts, own salts, requests that store nothing, and the laws of scoped blocks, in a running vLLM."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec import structs
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.request import RequestStatus

from router.protocol.block_hash import HASH_BYTES, PrefixScope, common_tokens, extend_chain, split_chain
from router.vllm_events.batches import decode_batch
from router.vllm_events.pool import FollowedPool
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.protocol import EngineRequest, Save
from serve_app.engine.vllm.scheduling.free_queue import TenantFreeQueue
from serve_app.engine.vllm.scheduling.scoped_blocks import ScopedBlocks
from tests.harness.eventually import eventually
from tests.serve_app.engine.tiny import request, root_of, run_all
from tests.vllm.engines import BLOCK, Both, both_engines, outputs_of, reset
from tests.vllm.live import SIZE, Live
from tests.vllm.test_free_queue import BLOCKS, Cache

OTHER = PrefixScope("tiny", salt=b"other")
"""A scope without a public prompt. Without a salt it would be the public scope itself."""


@pytest.fixture(scope="module")
def both(demo_model_path: Path) -> Iterator[Both]:
    with both_engines(demo_model_path) as running:
        yield running


def asked(both: Both, tenant: str, name: str, seed: int = 1, salt: str = "", **fields: Any) -> EngineRequest:
    """Return a prompt of ten blocks and some tokens, of which the first six blocks are public."""
    scope = PrefixScope("tiny", salt=f"{tenant}/{salt}".encode(), public_blocks=6)
    ids = np.concatenate([both.prompt(6 * BLOCK + 10, seed=70), both.prompt(4 * BLOCK, seed=seed)])
    return structs.replace(request(name, ids, 6, scope=scope, tenant=tenant), **fields)


def chain_of(item: EngineRequest) -> bytes:
    return extend_chain(item.root, item.scope.public_blocks, item.token_ids, BLOCK)


def heard(both: Both, chain: bytes = b"") -> None:
    """Check that routers know a chain as held; vLLM's next step reports all earlier events."""
    run_all(both.vllm, [request("step", [1], 1, scope=OTHER)])
    eventually(lambda: set(split_chain(chain)) <= both.heard.held())


def cached(both: Both, item: EngineRequest) -> int:
    """Return a request's cached blocks, which must be the predicted ones; its stored blocks are then known."""
    predicted = both.vllm.cached_blocks(chain_of(item), 10)
    assert run_all(both.vllm, [item]).cached[item.request_id] == BLOCK * predicted
    heard(both, chain_of(item)[: 10 * HASH_BYTES] if item.store_kv else b"")
    return predicted


def test_tenants_share_a_public_prompt_and_nothing_behind_it(both: Both) -> None:
    """Salts of one tenant share nothing behind it either. Answers are those of the built-in engine."""
    reset(both)
    first, second = asked(both, "a", "a"), asked(both, "b", "b")
    assert [cached(both, item) for item in (first, second, first, second)] == [0, 6, 10, 10]
    assert [cached(both, asked(both, "a", "salted", salt="own")) for _ in range(2)] == [6, 10]
    plain = structs.replace(first, request_id="plain", scope=first.scope.private, root=root_of(first.scope.private))
    assert cached(both, plain) == 0
    wanted = run_all(both.torch, [first]).tokens["a"]
    assert run_all(both.vllm, [first, second]).tokens == {"a": wanted, "b": wanted}


def test_a_request_that_stores_nothing_reads_and_leaves_nothing(both: Both) -> None:
    """It leaves nothing of a public prompt or of its answer either."""
    reset(both)
    unstored = asked(both, "a", "u", store_kv=False)
    assert [cached(both, unstored) for _ in range(2)] == [0, 0]
    assert not both.heard.held()
    assert cached(both, asked(both, "b", "stored")) == 0
    before = both.heard.held()
    assert [cached(both, unstored) for _ in range(2)] == [6, 6]
    cached(both, structs.replace(unstored, sampling=replace(unstored.sampling, max_tokens=3 * BLOCK)))
    assert both.heard.held() == before >= set(split_chain(chain_of(unstored)[: 6 * HASH_BYTES]))


def test_public_blocks_stay_public_when_moved(both: Both) -> None:
    """They are offered first, on the public account, and are public at the receiver; the tail is its tenant's."""
    reset(both)
    item = asked(both, "a", "moves", seed=2)
    assert cached(both, item) == 0
    hot = both.vllm.transfer.hot_prefixes()
    assert [(run.kind, run.tenant, run.blocks) for run in hot.runs] == [("public", PUBLIC, 6), ("prefix", "a", 4)]
    for prefix, first, blocks in ((hot.prefix(0), 0, 6), (hot.prefix(1), 6, 10)):
        part = both.vllm.transfer.export_prefix(prefix, first)
        assert part is not None
        reset(both)
        assert not first or cached(both, asked(both, "b", "before", seed=3)) == 0
        assert both.vllm.transfer.import_part(part, prefix, first) == blocks
        heard(both, prefix.chain)
        assert cached(both, asked(both, "b", "there", seed=2)) == 6
        assert cached(both, structs.replace(item, request_id="back")) == blocks


def test_a_save_behind_a_public_prompt_stays(both: Both) -> None:
    """So does a save of public blocks alone, which another replica's save brought."""
    reset(both)
    item = asked(both, "a", "saved", seed=4)
    first = outputs_of(both.vllm, structs.replace(item, saves=(Save(b"s" * 16, 10 * BLOCK),)))[0].first
    assert first is not None and first.save is not None and first.save.outcome == "saved"
    run_all(both.vllm, [request(f"f{i}", both.prompt(900, seed=80 + i), 1, scope=OTHER) for i in range(5)])
    assert cached(both, item) == 10
    (saved,) = both.vllm.transfer.hot_prefixes().saves
    assert (saved.key, saved.tenant) == (b"s" * 16, "a")
    head = HashedTokens(item.scope, item.token_ids[: 6 * BLOCK], chain_of(item)[: 6 * HASH_BYTES], PUBLIC)
    assert both.vllm.transfer.take_over_pin(replace(saved, key=b"t" * 16), head) == "pinned"
    assert both.vllm._saves.pins.holdings() == {"a": 10}
    reset(both)
    assert cached(both, item) == 0


PROMPTS = ([7] * 14, [7] * 8 + [8] * 4)
"""The registered prompts: three blocks and a half, and three, of which two are the first one's."""

# Tenant, salt, a registered prompt and the number of its tokens, those behind it, store_kv.
Asked = st.tuples(
    st.sampled_from("ab"),
    st.sampled_from(("", "salt")),
    st.sampled_from((*PROMPTS, [])),
    st.integers(0, 14),
    st.lists(st.integers(7, 8), min_size=1, max_size=10),
    st.booleans(),
)
Others = st.tuples(st.sampled_from(("grow", "end", "end", "preempt", "reset", "later")), st.integers(0, 9))
Steps = st.lists(st.one_of(*[st.tuples(st.just("start"), Asked)] * 2, Others), min_size=15, max_size=60)


class Served:
    """Requests over one pool. ``written``: of each block the scope, all tokens up to its end, and whether it stays."""

    def __init__(self) -> None:
        self.now_s = 0.0
        cache = Cache(watched=False)
        self.manager, self.vllm = cache.manager, cache.pool
        self.queue = TenantFreeQueue(cache.queue.get_all_free_blocks(), BLOCKS, lambda: self.now_s)
        self.vllm.free_block_queue = self.queue
        self.blocks = ScopedBlocks(self.vllm, self.queue)
        self.pool = FollowedPool(SIZE, BLOCKS)
        self.written: dict[int, tuple[PrefixScope, bytes, bool]] = {}
        self.stored: set[bytes] = set()
        self.live: list[Live] = []
        self.writers: dict[int, str] = {}
        self.reads = self.wrong = self.of_others = 0

    def do(self, action: str, asked: Any) -> None:
        one = self.live[asked % len(self.live)] if self.live and action in ("grow", "end", "preempt") else None
        if action == "start":
            self.start(self.asked(*asked))
        elif action == "later":
            self.now_s += 100.0 * asked
        elif action == "reset" and self.manager.reset_prefix_cache():
            self.queue.forget()
        elif one is not None and action == "grow":
            one.request.append_output_token_ids(7)
            self.compute(one, 1)
        elif one is not None:
            self.live.remove(one)
            self.manager.free(one.request)
            one.request.num_computed_tokens = 0
            if action == "preempt":
                self.start(one)
        self.hear()

    def asked(self, tenant: str, salt: str, prompt: list[int], shared: int, tail: list[int], store_kv: bool) -> Live:
        ids = np.array([*prompt[:shared], *tail], np.int32)
        public = max(common_tokens(ids, np.array(known, np.int32)) for known in PROMPTS) // SIZE
        scope = PrefixScope("m", salt=f"{tenant}{salt}".encode(), public_blocks=public)
        one = Live.asked(tenant, scope, ids, store_kv=store_kv)
        self.blocks.begin(one.request)
        return one

    def start(self, one: Live) -> None:
        """Read the cached blocks, which must be the predicted ones and its own, and compute the rest."""
        hit, cached, _ = self.manager.get_computed_blocks(one.request)
        assert cached == SIZE * self.pool.count_held(one.chain(), (len(one.ids) - 1) // SIZE)
        for index, block in enumerate(hit.get_block_ids()[0] if cached else ()):
            self.reads += 1
            self.of_others += self.writers[block] != one.tenant
            self.wrong += self.written[block] != (*one.content(index)[:2], True)
        if self.compute(one, len(one.ids) - cached, cached, hit):
            one.request.status = RequestStatus.RUNNING
            self.live.append(one)

    def compute(self, one: Live, tokens: int, cached: int = 0, *hit: Any) -> bool:
        request, self.queue.taker = one.request, one.tenant
        if self.manager.allocate_slots(request, tokens, cached, *hit) is None:
            return False
        done, request.num_computed_tokens = request.num_computed_tokens, request.num_computed_tokens + cached + tokens
        blocks = self.manager.get_block_ids(request.request_id)[0]
        for index in range((done + cached) // SIZE, request.num_computed_tokens // SIZE):
            self.written[blocks[index]], self.writers[blocks[index]] = one.content(index), one.tenant
        self.stored |= set(split_chain(one.chain())) if one.store_kv else set()
        return True

    def hear(self) -> None:
        """Follow vLLM's events, and compare the held blocks and their accounts."""
        batch = KVEventBatch(ts=1.0, events=self.manager.take_events(), data_parallel_rank=0)
        self.pool.translate(decode_batch(msgspec.msgpack.encode(batch)))
        assert set(self.pool) <= self.stored
        held = [self.written[block.block_id] for block in self.vllm.blocks if block.block_hash is not None]
        assert all(store_kv for _, _, store_kv in held)
        assert self.queue.shares.holdings().get(PUBLIC, 0) == sum(not scope.salt for scope, _, _ in held)


@given(steps=Steps)
@settings(max_examples=int(os.environ.get("WARMPATH_SEQUENCES", "200")), deadline=None)
def test_no_block_is_read_by_another_tenant_unless_it_is_public(steps: list[tuple[str, Any]]) -> None:
    """No block is read that has another scope or other tokens, or comes from a request that stores nothing."""
    served = Served()
    for action, asked in steps:
        served.do(action, asked)
    assert served.wrong == 0
    event(f"{'some' if served.of_others else 'no'} public blocks of others were read")


def test_such_sequences_have_reads() -> None:
    """A public prompt's three blocks are read by another tenant, and nothing behind them."""
    served = Served()
    for tenant, reads in (("a", 0), ("b", 3), ("b", 8)):
        served.do("start", (tenant, "", PROMPTS[0], 14, [8] * 9, True))
        assert served.reads == reads
    served.do("start", ("b", "salt", PROMPTS[0], 14, [8] * 9, False))
    assert (served.reads, served.of_others) == (11, 9)
    assert served.queue.shares.holdings() == {"a": 3, "b": 7, PUBLIC: 3}


def test_children_of_an_evicted_block_are_no_hit_until_it_returns() -> None:
    """An unused public prompt is evicted first; the tenant's own blocks behind it stay."""
    served = Served()
    mine = ("a", "", PROMPTS[0], 14, [8] * 10, True)
    for action, asked in (("start", mine), ("end", 0), ("later", 7), ("start", ("a", "", [], 0, [8], True))):
        served.do(action, asked)
    served.do("start", ("b", "", [], 0, [8] * 45, True))
    assert served.queue.shares.holdings() == {"a": 4, "b": 12}
    assert (len(served.pool), served.pool.held_blocks) == (11, 14)
    served.do("end", 1)
    served.do("start", ("b", "", PROMPTS[0], 13, [8], True))
    assert len(served.pool) == served.pool.held_blocks
    served.do("start", mine)  # this hits all of its earlier blocks
    assert served.reads == 5
