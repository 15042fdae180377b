"""What of vLLM's scheduler and pool is rested on, none of it public: looked at before anything is built on it."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler

VERSION = "0.32"
"""Of vLLM, that all here is written for."""

_RESTED_ON: tuple[tuple[Callable[..., Any], str], ...] = (
    (BlockPool.free_blocks, "self ordered_blocks"),
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
    (PriorityRequestQueue.remove_request, "self request"),
)
_QUEUE_MEMBERS = {"popleft", "popleft_n", "remove", "append", "append_n", "prepend_n", "num_free_blocks"}

_VICTIM = "key=lambda r: (r.priority, r.arrival_time)"


def check_hooks() -> None:
    """Raise RuntimeError, with both versions, where vLLM is not as all here takes it to be."""
    wrong = [] if vllm.__version__.startswith(f"{VERSION}.") else ["its version is another"]
    for function, parameters in _RESTED_ON:
        if list(inspect.signature(function).parameters) != parameters.split():
            wrong.append(f"{function.__qualname__} takes other arguments")
    if unknown := set(re.findall(r"free_block_queue\.(\w+)", inspect.getsource(BlockPool))) - _QUEUE_MEMBERS:
        wrong.append(f"its pool asks for {', '.join(sorted(unknown))}")
    if not hasattr(PriorityRequestQueue(), "_heap"):
        wrong.append("its waiting line is no heap")
    if _VICTIM not in inspect.getsource(Scheduler.schedule):
        wrong.append("it preempts by another rule")
    if wrong:
        raise RuntimeError(
            f"warmpath divides the cache and the turns of vLLM {VERSION} by tenant, and this is vLLM "
            f"{vllm.__version__}: {'; '.join(wrong)}. Install vLLM {VERSION}."
        )
