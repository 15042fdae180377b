"""Check the internals of vLLM's scheduler, pool and sampler that this package depends on; none of them is public."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.worker_base import WorkerBase

VERSION = "0.32"
"""The supported version of vLLM."""

_RESTED_ON: tuple[tuple[Callable[..., Any], str], ...] = (
    (BlockPool.free_blocks, "self ordered_blocks"),
    (
        BlockPool.cache_full_blocks,
        "self request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id block_mask",
    ),
    (generate_block_hash_extra_keys, "request start_token_idx end_token_idx start_mm_idx"),
    (hash_block_tokens, "hash_function parent_block_hash curr_block_token_ids extra_keys"),
    (Request.update_block_hashes, "self"),
    (FreeKVCacheBlockQueue.__init__, "self blocks"),
    (FreeKVCacheBlockQueue.popleft_n, "self n"),
    (FreeKVCacheBlockQueue.remove, "self block"),
    (FreeKVCacheBlockQueue.append_n, "self blocks"),
    (FreeKVCacheBlockQueue.prepend_n, "self blocks"),
    (Scheduler.schedule, "self throttle_prefills"),
    (Scheduler.add_request, "self request"),
    (Scheduler.reset_prefix_cache, "self reset_running_requests reset_connector"),
    (Scheduler._preempt_request, "self request timestamp drop_stale_output"),
    (Scheduler._reserve_prefill_lookahead, "self request num_computed_tokens num_new_tokens"),
    (
        Scheduler._mamba_block_aligned_split,
        "self request num_new_tokens num_new_local_computed_tokens num_external_computed_tokens",
    ),
    (Scheduler._get_local_prefix_cache_hit, "self request"),
    (Scheduler.update_draft_token_ids, "self draft_token_ids"),
    (PriorityRequestQueue.remove_request, "self request"),
    (Sampler.sample, "self logits sampling_metadata logprobs_mode_override"),
    (Sampler.gather_logprobs, "logprobs num_logprobs token_ids"),
    (Sampler.gather_specific_token_logprobs, "self logprobs logprob_token_ids sampled"),
    (RejectionSampler.forward, "self metadata draft_probs logits sampling_metadata"),
    (RejectionSampler.__init__, "self sampler spec_config device"),
)
_QUEUE_MEMBERS = {"popleft", "popleft_n", "remove", "append", "append_n", "prepend_n", "num_free_blocks"}

_RANK = "self.parallel_config.rank = rank"
"""Distinguishes each rank's part of a copy from the others'."""

_STORED = "self.kv_event_queue.append("
_HASHES = "self.block_hashes.extend(self._block_hasher(self))"
_VICTIM = "key=lambda r: (r.priority, r.arrival_time)"


def check_hooks() -> None:
    """Raise RuntimeError, with both versions, if vLLM's internals differ from those expected here."""
    wrong = [] if vllm.__version__.startswith(f"{VERSION}.") else ["its version differs"]
    for function, parameters in _RESTED_ON:
        if list(inspect.signature(function).parameters) != parameters.split():
            wrong.append(f"{function.__qualname__} has other parameters")
    if unknown := set(re.findall(r"free_block_queue\.(\w+)", inspect.getsource(BlockPool))) - _QUEUE_MEMBERS:
        wrong.append(f"its pool asks for {', '.join(sorted(unknown))}")
    if not hasattr(PriorityRequestQueue(), "_heap"):
        wrong.append("its waiting queue is not a heap")
    if _STORED not in inspect.getsource(BlockPool.cache_full_blocks):
        wrong.append("it reports stored blocks differently")
    if _HASHES not in inspect.getsource(Request.update_block_hashes):
        wrong.append("it hashes requests differently")
    if _VICTIM not in inspect.getsource(Scheduler.schedule):
        wrong.append("it preempts by another rule")
    if _RANK not in inspect.getsource(WorkerBase.__init__):
        wrong.append("its workers do not store their rank")
    if "in self.logitsprocs.all" not in inspect.getsource(InputBatch.refresh_metadata):
        wrong.append("its batch tells other processors of its requests")
    if wrong:
        raise RuntimeError(
            f"warmpath chooses the tokens of vLLM {VERSION}, divides its cache and turns by tenant; this is vLLM "
            f"{vllm.__version__}: {'; '.join(wrong)}. Install vLLM {VERSION}."
        )
