"""Behind `engine: remote`, a plain vLLM keeps tenants apart by the salts that it is sent; its events tell of no others.

Scheduler, block pool and events are vLLM's own, without a model; nothing of this project's vLLM engine is in them.
"""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from router.protocol.block_hash import HASH_BYTES, PrefixScope, hash_blocks, split_chain
from router.vllm_events.batches import decode_batch
from router.vllm_events.far_engine import FarEngine
from serve_app.engine.protocol import EngineRequest
from serve_app.engine.remote.dialect import WorkerFacts
from serve_app.engine.remote.dialects.vllm import Vllm
from serve_app.engine.sampling_params import SamplingParams as OurParams
from serve_app.engine.vllm.scheduling.probe import BLOCKS, SIZE, SchedulerProbe
from tests.router.vllm_events.pool_model import Routers
from tests.vllm.engines import check_reads

SEQUENCES = int(os.environ.get("REMOTE_SEQUENCES", "100"))
"""10,000 take two minutes."""

SECRET = bytes(range(HASH_BYTES))
CLIENTS = {"no salt": None, "a salt of its own": "theirs"}
"""Clients that go past us to the server."""

FACTS = WorkerFacts(Vllm(), "", "demo", "", frozenset(), 0, SIZE, BLOCKS, frozenset())


def root_of(scope: str) -> bytes:
    """Return the root of a tenant's chains, or what tells a foreign client's blocks from all others."""
    tenant, _, adapter = scope.partition("+")
    return PrefixScope("demo", adapter, tenant.encode()).root(SECRET)


def salt_sent(scope: str, ids: list[int]) -> str | None:
    """Return the salt of a request on its way to the server."""
    if scope in CLIENTS:
        return CLIENTS[scope]
    root, tokens = root_of(scope), np.array(ids, np.int32)
    sampling = OurParams(1, temperature=0.0)
    asked = EngineRequest(request_id="r", token_ids=tokens, scope=PrefixScope("demo"), root=root, sampling=sampling)
    return str(FACTS.dialect.body(asked, FACTS, root[:HASH_BYTES].hex(), [])["cache_salt"])


class PlainServer(SchedulerProbe):
    """vLLM's own scheduler; knows what each block contains. ``far`` is what a replica knows of it."""

    def __init__(self) -> None:
        super().__init__()
        ours = self.scheduler
        sizes = {"block_size": SIZE, "hash_block_size": SIZE}
        self.scheduler = Scheduler(ours.vllm_config, ours.kv_cache_config, ours.structured_output_manager, **sizes)
        self.scheduler.kv_event_publisher = ours.kv_event_publisher
        self.content = [b""] * BLOCKS
        self.scopes: dict[str, str] = {}
        self.follow()

    def follow(self) -> None:
        """Begin to listen, as a replica that has just started."""
        self.routers = Routers()
        self.far = FarEngine(SIZE, BLOCKS, self.routers)

    def _hear(self, batch: Any) -> None:
        self.far.hear(self.far.pool.translate(decode_batch(msgspec.msgpack.encode(batch))))

    def ask(self, tenant: str, ids: list[int], *_: Any, **__: Any) -> Any:
        name = f"r{next(self._names)}"
        salt, params = salt_sent(tenant, ids), SamplingParams(max_tokens=3200, ignore_eos=True)
        asked = Request(name, ids, params, None, cache_salt=salt, block_hasher=self._hasher)
        self.scopes[name] = tenant
        self.scheduler.add_request(asked)
        return asked

    def step(self) -> dict[str, int]:
        """Compute one step. Each block that a request reads was computed for its own tokens in its own scope."""
        planned = super().step()
        for name, tokens in planned.items():
            asked = self.scheduler.requests[name]
            ids = np.array(asked.all_token_ids, np.int32)
            chain = list(split_chain(hash_blocks(root_of(self.scopes[name]), ids, SIZE)))
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            computed = asked.num_computed_tokens
            check_reads(self.content, blocks, chain, computed // SIZE, (computed - tokens) // SIZE)
        return planned

    def known(self, tenant: str, ids: list[int], public: int = 0) -> int:
        chain = hash_blocks(root_of(tenant), np.array(ids, np.int32), SIZE)
        return self.far.pool.count_held(chain, (len(ids) - 1) // SIZE)

    def check_told(self) -> None:
        """Routers know of blocks in the pool alone, and of none of a client that goes past us."""
        held = self.routers.held()
        assert held == set(self.far.pool)
        assert held <= set(self.content)


SCOPES = st.sampled_from(["a", "b", "a+poet", *CLIENTS])
PROMPT = st.tuples(SCOPES, st.integers(0, 3), st.integers(1, 20))
ACTION = st.one_of(
    st.tuples(st.just("run"), PROMPT),
    st.tuples(st.just("ask"), PROMPT),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("follow anew"), st.none()),
)


@pytest.fixture(scope="module")
def server() -> Iterator[PlainServer]:
    yield PlainServer()


@settings(max_examples=SEQUENCES, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTION, min_size=4, max_size=25))
def test_no_request_reads_anothers_blocks_and_none_is_promised_them(server: PlainServer, actions: list[Any]) -> None:
    """Tenants, an adapter and clients that go past us send the same prompts, in a pool that evicts."""
    asked: list[Any] = []
    followed = True

    def quiet() -> None:
        server.end(*asked)
        asked.clear()

    def reset() -> None:
        quiet()
        assert server.scheduler.reset_prefix_cache()
        server.step()  # vLLM tells of it with the next step

    reset()
    for action, told in actions:
        if action == "step":
            for _ in range(told):
                server.step()
        elif action == "end" and asked:
            server.end(asked.pop(told % len(asked)))
        elif action == "reset":
            reset()
            followed = True
        elif action == "follow anew":
            server.follow()
            followed = False  # what was cached before is not told again
        elif action == "ask":
            scope, number, blocks = told
            asked.append(server.ask(scope, [number] * (blocks * SIZE + blocks % 2)))
        elif action == "run":
            quiet()
            scope, number, blocks = told
            ids = [number] * (blocks * SIZE + blocks % 2)
            known = server.known(scope, ids)
            cached = server.run(scope, ids)
            if scope in CLIENTS:
                assert known == 0
            else:
                assert known == cached if followed else known <= cached
        server.check_told()
    quiet()
