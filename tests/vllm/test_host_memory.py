"""vLLM's host memory: no block reaches another tenant, routers predict what comes back, and tenants keep their shares.

The copies are replaced on a CPU (``benchmarks.common.cpu_memory``); scheduler, connector, cache and events are vLLM's.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.common.cpu_memory import offloading_on_cpu
from router.protocol.block_hash import extend_chain, split_chain
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.vllm.scheduling.host_memory import TenantPolicy
from serve_app.engine.vllm.scheduling.probe import BLOCKS, SIZE, SchedulerProbe, root_of
from serve_app.engine.vllm.scheduling.tenant import offload_params, scope_args, tenant_args
from serve_app.engine.vllm.settings import IN_CORE
from tests.serve_app.engine.tiny import request, run_all
from tests.vllm.engines import BLOCK, Both, both_engines, check_reads, compute, mispredicted, reset

SEQUENCES = int(os.environ.get("HOST_MEMORY_SEQUENCES", "200"))
"""10,000 take half an hour."""

HOST = 48
PUBLIC_BLOCKS = 2


class Watched(SchedulerProbe):
    """Knows what each block of the pool and of host memory contains, and that every request reads its own KV."""

    def __init__(self) -> None:
        super().__init__(*IN_CORE, host=HOST)
        self.near = [b""] * BLOCKS
        self.below = [b""] * HOST
        self.scopes: dict[str, tuple[str, int]] = {}

    def copy(self, source: Any, target: Any) -> None:
        stores = type(source).__name__ == "GPULoadStoreSpec"
        read, written = (self.near, self.below) if stores else (self.below, self.near)
        for of, into in zip(source.block_ids, target.block_ids, strict=True):
            written[into] = read[of]

    def ask(self, tenant: str, ids: list[int], public: int = 0, *, store_kv: bool = True) -> Any:
        asked = super().ask(tenant, ids, public, store_kv=store_kv)
        self.scopes[asked.request_id] = tenant, public
        return asked

    def step(self) -> dict[str, int]:
        planned = super().step()
        for name, tokens in planned.items():
            asked = self.scheduler.requests[name]
            tenant, public = self.scopes[name]
            ids = np.array(asked.all_token_ids, np.int32)
            names = list(split_chain(extend_chain(root_of(tenant, public), public, ids, SIZE)))
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            computed = asked.num_computed_tokens
            check_reads(self.near, blocks, names, computed // SIZE, (computed - tokens) // SIZE)
        return planned


TENANTS = st.sampled_from("abc")
PROMPT = st.tuples(TENANTS, st.integers(0, 3), st.integers(1, 20), st.sampled_from([0, PUBLIC_BLOCKS]), st.booleans())
ACTION = st.one_of(
    st.tuples(st.just("run"), PROMPT),
    st.tuples(st.just("ask"), PROMPT),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("reset"), st.none()),
)


def prompt(number: int, blocks: int) -> list[int]:
    """Return a prompt that begins as those of other numbers, in all tenants."""
    return [7] * (PUBLIC_BLOCKS * SIZE) + [number] * (blocks * SIZE + blocks % 2)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    yield Watched()


@settings(max_examples=SEQUENCES, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTION, min_size=4, max_size=25))
def test_no_request_reads_anothers_blocks_and_returns_are_predicted(watched: Watched, actions: list[Any]) -> None:
    """Sequences over vLLM's own scheduler and connector: pools evict, prompts are public, requests leave nothing."""
    asked: list[Any] = []

    def quiet() -> None:
        for one in asked:
            watched.end(one)
        asked.clear()
        watched.settle()

    for action, told in [("reset", None), *actions]:
        if action == "step":
            for _ in range(told):
                watched.step()
        elif action == "end" and asked:
            watched.end(asked.pop(told % len(asked)))
        elif action == "reset":
            quiet()
            assert watched.scheduler.reset_prefix_cache(reset_connector=True)
            watched.step()  # vLLM tells of it with the next step
        elif action == "ask":
            tenant, number, blocks, public, store_kv = told
            asked.append(watched.ask(tenant, prompt(number, blocks), public, store_kv=store_kv))
        elif action == "run":
            quiet()
            tenant, number, blocks, public, store_kv = told
            ids = prompt(number, blocks)
            known = watched.known(tenant, ids, public)
            assert watched.run(tenant, ids, public, store_kv=store_kv) == known
    quiet()


@dataclass
class Context:
    """What vLLM tells a cache policy of a request."""

    tenant: str
    public_tokens: int = 0

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        asked = SimpleNamespace(kv_transfer_params=None, sampling_params=SimpleNamespace(extra_args=None))
        asked.sampling_params.extra_args = tenant_args(self.tenant) | scope_args(bytes(32), self.public_tokens)
        return offload_params(asked)

    def get_offload_key_position(self, key: bytes) -> int:
        return SIZE * (key[1] + 1)


def fill(policy: TenantPolicy, context: Context, name: bytes, blocks: int) -> list[bytes]:
    """Store a prompt's blocks."""
    keys = [name + bytes([at]) for at in range(blocks)]
    policy.on_store_miss(keys, context)
    for key in keys:
        policy.insert(key, SimpleNamespace(ref_cnt=0))
        policy.mark_evictable(key)
    policy.on_request_finished([keys], set(keys), set(), context)
    return keys


def evicted(policy: TenantPolicy, count: int, protected: set[bytes] = frozenset()) -> list[bytes] | None:  # type: ignore[assignment]
    found = policy.evict(count, protected)
    return None if found is None else [key for key, _ in found]


def test_the_tenant_furthest_over_its_share_loses_the_ends_of_its_oldest_prompts() -> None:
    policy = TenantPolicy(12)
    policy.shares.set_weights({"a": 1, "b": 3})
    fill(policy, Context("b"), b"0", 3)
    for name in (b"1", b"2"):
        fill(policy, Context("a"), name, 3)
    assert evicted(policy, 4) == [b"1\2", b"1\1", b"1\0", b"2\2"]
    assert evicted(policy, 2) == [b"2\1", b"0\2"], "one block of a is as much as three of b"
    policy.mark_non_evictable(b"0\1")
    assert evicted(policy, 3) is None and policy.get(b"0\0") is not None
    policy.mark_evictable(b"0\1")
    assert evicted(policy, 2, {b"0\1"}) == [b"2\0", b"0\0"]
    policy.clear()
    assert policy.get(b"0\1") is None and evicted(policy, 1) is None
    assert not policy.shares.holdings()


def test_a_flood_leaves_public_blocks_and_others_their_share() -> None:
    policy = TenantPolicy(12)
    kept = fill(policy, Context("b", 2 * SIZE), b"0", 4)
    for name in range(1, 6):
        fill(policy, Context("flood"), bytes([name]), 3)
    assert policy.shares.holdings() == {PUBLIC: 2, "b": 2, "flood": 15}
    assert not set(evicted(policy, 13) or ()) & set(kept)


def test_blocks_that_found_no_space_take_no_names_from_those_that_do() -> None:
    """vLLM says once whose a request's blocks are, and may store them much later."""
    policy = TenantPolicy(12)
    for tenant, blocks in (("flood", 10), ("b", 3), ("c", 1)):
        policy.on_store_miss([tenant.encode() + bytes([at]) for at in range(blocks)], Context(tenant))
    for key in (b"b\0", b"b\2", b"c\0"):
        policy.insert(key, SimpleNamespace(ref_cnt=0))
    assert policy.shares.holdings() == {"b": 2, "c": 1}


@pytest.fixture(scope="module")
def both(demo_model_path: Path) -> Iterator[Both]:
    """vLLM's pool holds 96 blocks, and its host memory three times as many."""
    with offloading_on_cpu(), both_engines(demo_model_path, kv_offloading_size=36 / 1024) as both:
        yield both


def test_predictions_are_exact_with_host_memory_below_the_pool(both: Both) -> None:
    """Beside saves and copies, which have a connector of their own."""
    assert both.vllm.off == {}
    wrong, hits = mispredicted(both, 120)
    assert wrong == []
    assert hits > 100
    counted = {name: value for name, _, value in both.vllm.stats().samples}
    assert counted["warmpath_kv_tier_hits_total"] > 0 and counted["warmpath_unplaced_kv_blocks_total"] == 0
    assert both.vllm.load().tier_tokens_per_s > 0


def test_an_evicted_prefix_comes_back_for_copies_too(both: Both) -> None:
    """The same tokens are drawn from it; a reset drops both."""
    ids = both.prompt(5 * BLOCK + 1, seed=77)
    prefix, tokens = compute(both, ids)
    for seed in range(300, 305):
        compute(both, both.prompt(24 * BLOCK, seed=seed), max_tokens=1)
    assert not both.heard.held() & set(split_chain(prefix.chain))
    part = both.vllm.transfer.export_prefix(prefix)
    assert part is not None and part.header.blocks == 5
    for seed in range(305, 310):
        compute(both, both.prompt(24 * BLOCK, seed=seed), max_tokens=1)
    again = run_all(both.vllm, [request("again", ids, 8)])
    assert (again.tokens["again"], again.cached["again"]) == (tokens, 5 * BLOCK)
    reset(both)
    assert both.vllm.cached_blocks(prefix.chain, 5) == 0
    assert run_all(both.vllm, [request("cold", ids, 8)]).cached["cold"] == 0
    reset(both)
    assert both.vllm.transfer.import_part(part, prefix, 0) == 5
