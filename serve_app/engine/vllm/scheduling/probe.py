"""What this package does in vLLM's scheduler, tried over a small pool without a model. Each check raises any error."""

from itertools import count
from time import monotonic
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from router.protocol.block_hash import HASH_BYTES, extend_chain
from router.vllm_events.batches import decode_batch
from router.vllm_events.pool import FollowedPool
from serve_app.config.engine import Capability
from serve_app.engine.sampling_params import TokenRules
from serve_app.engine.vllm.sampling.params import ExtraArgs
from serve_app.engine.vllm.scheduling.scheduler import TenantScheduler
from serve_app.engine.vllm.scheduling.tenant import salt_of, scope_args, tenant_args
from serve_app.engine.vllm.settings import CONFIG_ENDS, CONFIG_OFF, IN_CORE, WHOLE_HITS, offloading_connector
from serve_app.fairness.queue import YIELDING_ORDER

SIZE = 32
BLOCKS = 33
"""One of them is vLLM's null block."""
STEP = 4 * SIZE
_LONGEST = 100 * SIZE
_COMPILED_S = 20.0


class Differs(Exception):
    """vLLM does something else than a capability needs; the message says what."""


def expect(fact: object, otherwise: str) -> None:
    """Raise Differs unless a fact is true."""
    if not fact:
        raise Differs(otherwise)


class _Model(SimpleNamespace):
    """A model of text: whatever else vLLM asks it for, it is not."""

    def __getattr__(self, name: str) -> None:
        return None


class SchedulerProbe:
    """vLLM's scheduler with the capabilities ``on``; ``pool``: its blocks by its events, as of the last step.

    ``window``: also of layers with a window of so many tokens, beside those with full attention. ``drafting``: vLLM's
    ``speculative_config``, as its object. No token is drafted. ``host``: the blocks of host memory below the pool; a
    copy to it ends a step later. ``places``: of running requests, with steps and a pool that hold them.
    """

    def __init__(self, *on: Capability, window: int = 0, drafting: Any = None, host: int = 0, places: int = 8) -> None:
        blocks = max(BLOCKS, 3 * places)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        config = VllmConfig(
            cache_config=CacheConfig(block_size=SIZE),
            scheduler_config=SchedulerConfig(
                max_model_len=_LONGEST,
                is_encoder_decoder=False,
                max_num_seqs=places,
                max_num_batched_tokens=max(STEP, places),
                policy="priority",
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            additional_config={CONFIG_OFF: sorted(IN_CORE - {*on}), CONFIG_ENDS: [0]},
        )
        config.speculative_config = drafting
        if host:
            from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

            size = {"cpu_bytes_to_use": host * CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT}
            config.kv_transfer_config = KVTransferConfig(engine_id="probe", **offloading_connector(1, size))
        self._storing: dict[int, Any] = {}
        config.cache_config.num_gpu_blocks = blocks
        config.model_config = _Model(
            max_model_len=_LONGEST,
            runner_type="generate",
            skip_tokenizer_init=True,
            model="",
            get_vocab_size=lambda: 64,
            get_total_num_kv_heads=lambda: 1,
        )
        sizes: dict[str, Any] = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["l"], FullAttentionSpec(**sizes))]
        if window:
            groups.insert(0, KVCacheGroupSpec(["w"], SlidingWindowSpec(**sizes, sliding_window=window)))
        pool = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        grammars = StructuredOutputManager(config)
        self.scheduler = TenantScheduler(config, pool, grammars, block_size=SIZE, hash_block_size=SIZE)
        self.scheduler.kv_event_publisher = SimpleNamespace(publish=self._hear)
        self.pool = FollowedPool(SIZE, blocks)
        self._names = count()

    def ask(
        self, tenant: str, ids: list[int], public: int = 0, *, store_kv: bool = True, most: int = _LONGEST,
        extra: ExtraArgs = ExtraArgs(), order: int = 0,  # noqa: B008  # frozen
    ) -> Any:  # fmt: skip
        """Queue a request, of which the first ``public`` blocks are public; return vLLM's object."""
        root = root_of(tenant, public)
        extra_args = tenant_args(tenant, order) | scope_args(root, public * SIZE, store_kv=store_kv)
        params = SamplingParams(max_tokens=most, ignore_eos=True, extra_args=extra_args | extra.packed())
        name = f"r{next(self._names)}"
        request = Request(name, ids, params, None, cache_salt=salt_of(root), block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """Compute one step; return the numbers of its tokens by request. ``mask``: vLLM's for its answers."""
        plan = self.scheduler.schedule()
        self.mask = self.scheduler.get_grammar_bitmask(plan)
        planned: dict[str, int] = plan.num_scheduled_tokens
        requests = [self.scheduler.requests[name] for name in planned]
        tokens = [[1] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        places = {name: at for at, name in enumerate(planned)}
        copied = None if self.scheduler.connector is None else self._copied(plan.kv_connector_metadata)
        computed = ModelRunnerOutput([*planned], places, tokens, kv_connector_output=copied)
        self.scheduler.update_from_output(plan, computed)
        return planned

    def _copied(self, jobs: Any) -> KVConnectorOutput:
        """Copy as vLLM's worker does: loads now, and the last step's stores with those that may not wait."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        due, self._storing = {**self._storing}, dict(jobs.store_jobs)
        for number in jobs.jobs_to_flush or ():
            if (job := self._storing.pop(number, None)) is not None:
                due[number] = job
        for job in (*due.values(), *jobs.load_jobs.values()):
            self.copy(job.src_spec, job.dst_spec)
        done = OffloadingWorkerMetadata(dict.fromkeys((*due, *jobs.load_jobs), 1))
        loaded = {job.req_id for job in jobs.load_jobs.values()}
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=done)

    def copy(self, source: Any, target: Any) -> None:
        """Copy blocks between the pool and host memory; nothing here, where they have no content."""

    def settle(self) -> None:
        """Compute steps until nothing is copied any more."""
        while self.scheduler.connector.has_pending_push_work():
            self.step()

    def _hear(self, batch: Any) -> None:
        self.pool.translate(decode_batch(msgspec.msgpack.encode(batch)))

    def run(self, tenant: str, ids: list[int], public: int = 0, *, store_kv: bool = True) -> int:
        """Compute a request's first token alone; return how many blocks of its prompt were cached."""
        request = self.ask(tenant, ids, public, store_kv=store_kv)
        computed = 0
        for _ in range(_LONGEST):
            computed += self.step().get(request.request_id, 0)
            if request.num_tokens > len(ids):
                break
        self.end(request)
        return (len(ids) - computed) // SIZE

    def end(self, *requests: Any) -> None:
        """End requests."""
        for request in requests:
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def known(self, tenant: str, ids: list[int], public: int = 0) -> int:
        """Return how many blocks of a prompt a router would say are cached."""
        chain = extend_chain(root_of(tenant, public), public, np.array(ids, np.int32), SIZE)
        return self.pool.count_held(chain, (len(ids) - 1) // SIZE)


def root_of(tenant: str, public: int = 0) -> bytes:
    """Return a root as in ``EngineRequest``."""
    own = tenant.encode().ljust(HASH_BYTES)
    return b"public".ljust(HASH_BYTES) + own if public else own


def prompt(number: int, blocks: int) -> list[int]:
    """Return that many blocks and a token, which only the prompt with this number has."""
    return [number] * (blocks * SIZE + 1)


def turns() -> None:
    """Check that a prompt is computed beside a flood that came first, which is preempted for it."""
    probe = SchedulerProbe("turns")
    flood = [probe.ask("flood", prompt(number, 4)) for number in range(6)]
    probe.step()
    calm = probe.ask("calm", prompt(6, 1))
    served = [probe.step().get(calm.request_id, 0) for _ in range(2)]
    expect(sum(served), "a tenant waits for another's flood")
    probe.end(*flood, calm)
    large, small = probe.ask("flood", prompt(7, 20)), probe.ask("calm", prompt(8, 5))
    for _ in range(_LONGEST):
        if large.num_preemptions or small.num_preemptions:
            break
        probe.step()
    expect(large.num_preemptions and not small.num_preemptions, "it preempts a tenant within its share")
    probe.end(large, small)
    waits = [probe.ask("a", prompt(9 + number, 2), order=YIELDING_ORDER) for number in range(8)]
    for _ in range(8):
        probe.step()
    request = probe.ask("a", prompt(17, 1))
    expect(request.request_id in probe.step(), "work that waits keeps its place")
    expect(sum(one.num_preemptions for one in waits) == 1, "more work than needed gives way")


def shares() -> None:
    """Check that a flood leaves another tenant's share of the cache."""
    probe = SchedulerProbe("shares")
    probe.run("calm", prompt(0, 12))
    for number in range(1, 7):
        probe.run("flood", prompt(number, 12))
    expect(probe.run("calm", prompt(0, 12)) == 12, "a flood evicts another tenant's blocks")


def public_prompts() -> None:
    """Check that tenants share public blocks and no others, as routers are told if they are told of any."""
    probe = SchedulerProbe("public_prompts")
    ids = prompt(0, 4)
    expect([probe.run(tenant, ids, 2) for tenant in "aba"] == [0, 2, 4], "tenants share other blocks than public ones")
    cached = [probe.known(tenant, ids, 2) for tenant in "ab"]
    probe.run("a", ids)
    expect(cached == [4, 4] or not probe.known("a", ids), "it reports public blocks otherwise")


def store_kv() -> None:
    """Check that a request leaves no blocks, but reads some."""
    probe = SchedulerProbe("store_kv")
    probe.run("a", prompt(0, 2))
    longer = [*prompt(0, 2), *prompt(1, 3)]
    expect(probe.run("a", longer, store_kv=False) == probe.run("a", longer) == 2, "it stores what it must not")


def predictions() -> None:
    """Check that routers know the blocks of prompts, also of evicted and of waiting ones, and of windows."""
    for window in (2 * SIZE, 0):
        probe = SchedulerProbe("predictions", window=window)
        for number in (0, 1, 2, 0, 3, 3, 1):
            ids = prompt(number, 12)
            expect(probe.known("a", ids) == probe.run("a", ids), "its events tell of other blocks than it has")
    running = probe.ask("b", prompt(8, 1))
    probe.step()
    cached, waiting = probe.known("a", prompt(3, 12)), probe.ask("a", prompt(3, 12))
    probe.end(running, waiting)
    probe.run("a", prompt(4, 12))
    expect(probe.known("a", prompt(3, 12)) == cached == 12, "blocks that a waiting request reads are evicted first")


def host_memory() -> None:
    """Check that evicted blocks come back from host memory, to their tenant, and that a flood leaves others' there."""
    probe = SchedulerProbe(host=64)

    def run(tenant: str, *numbers: int, store_kv: bool = True) -> int:
        cached = 0
        for number in numbers:
            cached = probe.run(tenant, prompt(number, 12), store_kv=store_kv)
            probe.settle()
        return cached

    expect(run("a", *range(5), *range(5)) == 12, "evicted blocks do not come back")
    expect(probe.pool.host_blocks or not len(probe.pool), "its events do not tell of them")
    expect(run("b", 0) == 0, "a tenant reads another's blocks")
    run("b", 5, store_kv=False)
    run("a", *range(6, 26))
    expect(run("b", 0) == 12, "a flood evicts another tenant's blocks")
    expect(run("b", 5) == 0, "it stores what it must not")


def pins() -> None:
    """Check that blocks with one more user stay, until it leaves."""
    probe = SchedulerProbe()
    request = probe.ask("a", prompt(0, 4))
    probe.step()
    pool, manager = probe.scheduler.kv_cache_manager.block_pool, probe.scheduler.kv_cache_manager
    kept = [pool.blocks[block] for block in manager.get_block_ids(request.request_id)[0][:4]]
    pool.touch(kept)
    probe.end(request)
    for number in range(1, 5):
        probe.run("b", prompt(number, 16))
    expect(probe.run("a", prompt(0, 4)) == 4, "blocks in use are evicted")
    pool.free_blocks(reversed(kept))
    for number in range(5, 9):
        probe.run("b", prompt(number, 16))
    expect(probe.run("a", prompt(0, 4)) == 0, "blocks stay in use")


def moved() -> None:
    """Check that a step tells which blocks a new request has, and from where on it computes."""
    probe = SchedulerProbe()
    probe.run("a", prompt(0, 4))
    request = probe.ask("a", prompt(0, 4))
    (new,) = probe.scheduler.schedule().scheduled_new_reqs
    first = (new.req_id, len(new.block_ids[0]), new.num_computed_tokens)
    expect(first == (request.request_id, 5, 4 * SIZE), "its steps tell other facts of a request")


def resume() -> None:
    """Check that an answer's tokens at a prompt's end count as output, once the request has started."""
    probe = SchedulerProbe()
    request = probe.ask("a", prompt(0, 2), most=7, extra=ExtraArgs(answer_tokens=5, resumed_tokens=5))
    probe.step()
    counts = (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens)
    expect(counts == (2 * SIZE - 4, 6, 2 * SIZE + 2), "it counts an interrupted answer's tokens otherwise")
    probe.step()
    expect(request.status == RequestStatus.FINISHED_LENGTH_CAPPED, "an interrupted answer has another length")


def grammars() -> None:
    """Check that an answer waits for its grammar, which masks and hears each of its tokens; others have none."""
    probe = SchedulerProbe()
    request = probe.ask("a", prompt(0, 1), extra=ExtraArgs(rules=TokenRules(allowed=(1,))))
    other = probe.ask("a", prompt(2, 1))
    end_s = monotonic() + _COMPILED_S
    while not request.num_output_tokens and monotonic() < end_s:
        probe.step()
    for _ in range(2):
        mask = probe.mask
        expect(mask is not None, "it asks no grammar for masks")
        masks = mask.grammar_bitmask.view(np.uint32)
        expect(mask.structured_output_request_ids == [request.request_id], "it asks grammars for other answers")
        expect(masks[0].tolist() == [2, 0], "its masks have another form")
        probe.step()
    grammar = request.structured_output_request.grammar
    expect(grammar.length == request.num_output_tokens, "it does not tell grammars of tokens")
    probe.scheduler.structured_output_manager.backend.failed[request.request_id] = "tried"
    probe.step()
    expect(
        request.status == RequestStatus.FINISHED_ERROR and other.num_output_tokens, "a failed grammar ends otherwise"
    )


def draft_hits() -> None:
    """Check that a hit keeps its last block beside an EAGLE head."""
    drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=1, **{WHOLE_HITS: True})
    drafting.method = "eagle"  # whose own needs a model
    probe = SchedulerProbe(drafting=drafting)
    probe.run("a", prompt(0, 4))
    again = probe.ask("a", prompt(0, 4))
    expect(probe.step()[again.request_id] < SIZE, "a hit loses its last block")
