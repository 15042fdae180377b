"""vLLM's scheduler with fair service, preemption and eviction between tenants. Runs in vLLM's core.

Everything else is vLLM's own behaviour, and so is everything while there is one tenant without work that yields. Each
capability can be off.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from serve_app.cache.prefix.quota import PoolShares
from serve_app.engine.runner.prompt_logprobs import LEAST_ROWS
from serve_app.engine.step import ceil_div
from serve_app.engine.vllm.sampling.answers import AnswerGrammars, awaits_grammar, resume
from serve_app.engine.vllm.sampling.params import ExtraArgs
from serve_app.engine.vllm.scheduling.free_queue import TenantFreeQueue
from serve_app.engine.vllm.scheduling.pace import Pace, StepClock
from serve_app.engine.vllm.scheduling.scoped_blocks import ScopedBlocks
from serve_app.engine.vllm.scheduling.tenant import (
    HOST_SHARES,
    offload_params,
    shares_of,
    tells_prompt,
    tenant_of,
    yields,
)
from serve_app.engine.vllm.scheduling.turns import Need, Plan, TenantTurns
from serve_app.engine.vllm.scheduling.waiting_line import FairRequestQueue
from serve_app.engine.vllm.settings import CONFIG_EXACT, CONFIG_OFF

_YIELDS = 1e12
"""Over all tenants' use over their shares."""
NOT_NUMBERS = "the model's logits are not numbers"


class TenantScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's, with queues, turns and pool shares by tenant. ``additional_config`` names the capabilities that are off.

    Without shares the pool is vLLM's own, and a tenant's account is what its running requests hold.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.policy != SchedulingPolicy.PRIORITY:
            raise ValueError("the policy has to be priority: copies of KV go first by theirs")
        self._off = frozenset(self.vllm_config.additional_config.get(CONFIG_OFF, ()))
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        self._pool_queue: TenantFreeQueue | None = None
        self._shares: PoolShares[Any] = PoolShares(pool.num_gpu_blocks, {}, time.monotonic, list)
        if "shares" not in self._off:
            self._pool_queue = TenantFreeQueue(pool.free_block_queue.get_all_free_blocks(), pool.num_gpu_blocks)
            pool.free_block_queue = self._pool_queue
            self._shares = self._pool_queue.shares
        self._allocates = {False: manager.allocate_slots, True: partial(self._allocate, manager.allocate_slots)}
        self._tenants: set[str] = set()
        """Those of the requests here, and of some that have ended."""
        self._blocks = None
        if not self._off >= {"public_prompts", "store_kv"}:
            self._blocks = ScopedBlocks(pool, self._pool_queue)
        self._turns: TenantTurns | None = None
        if "turns" not in self._off:
            self.waiting = FairRequestQueue()
            self._turns = TenantTurns(
                self.max_num_scheduled_tokens, self.max_num_active_reqs, pool.num_gpu_blocks - 1, self._blocks_for
            )
        self._pace, self._step_clock, self._clock = Pace(), StepClock(), time.monotonic
        self._under_way = 0
        """Steps that are scheduled and have not ended."""
        self._plan = Plan()
        self._ranked = False
        self._yielding: set[str] = set()
        """Requests that yield, and may have ended since the last step."""
        self._telling: set[str] = set()
        """The same of requests that ask for the log-probabilities of their prompts."""
        self._all_drafts = self.use_v2_model_runner or self.vllm_config.additional_config.get(CONFIG_EXACT)
        self._undrafted: WeakSet[Any] = WeakSet()

    def add_request(self, request: Any) -> None:
        """Add a request: its tenant is active from now on, and weights that it carries apply."""
        weights, tenant, turns = shares_of(request), tenant_of(request), self._turns
        if weights is not None:
            self._shares.set_weights(weights)
            for shares in HOST_SHARES:
                shares.set_weights(weights)
        self._tenants.add(tenant)
        if tells_prompt(request):
            self._telling.add(request.request_id)
        if tenant:
            self._shares.touch(tenant)
        if turns is not None and weights is not None:
            turns.shares.set_weights(weights)
        if turns is not None and request.priority >= 0:  # a copy needs no turn
            # Those with long answers compete, too.
            turns.came(request, {tenant, *map(tenant_of, self.running), *self.waiting.tenants()} - {""})
            self.waiting.make_way(request)
            if yields(request):
                self._yielding.add(request.request_id)
        if self._blocks is not None:
            self._blocks.begin(request)
        self._begin_answer(request)
        if self.connector is not None:
            request.kv_transfer_params = offload_params(request)
        super().add_request(request)
        if "predictions" not in self._off and (self.running or len(self.waiting) > 1):
            # Touch its cached blocks now: else other requests could evict them before it starts.
            pool = self.kv_cache_manager.block_pool
            for blocks in self._hit(request)[0]:
                pool.touch(blocks)
                pool.free_blocks(reversed(blocks))

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """Return vLLM's next step; competing tenants get the tokens and starts of their turns, what yields the rest."""
        if self._turns is None:
            self._choose_ways()
            return self._resumed(super().schedule(*arguments, **named))
        self._step_clock.arrived(self._clock())
        self._under_way += 1
        self._yielding &= self.requests.keys()
        contested = self._turns.shares.contested or bool(self._yielding)
        if contested or self._ranked:
            self._count()
        if contested:
            in_use = {account.tenant: account.held - account.idle for account in self._shares.all()}
            ready = [request for request in self.waiting.in_order() if not awaits_grammar(request)]
            self._plan = self._turns.plan(self.running, ready, in_use, self, self._pace.gentle_tokens)
            self.waiting.chosen = self._plan.starts
            for request in filter(self._request_blocks_can_be_freed, self._plan.preempted):
                self.running.remove(request)  # it starts again in a later step at the earliest
                self._preempt_request(request, time.monotonic(), drop_stale_output=self.requires_kv_delivery)
        if contested or self._ranked:
            self._ranked = contested
            self._rank()
        self._choose_ways()
        try:
            return self._resumed(super().schedule(*arguments, **named))
        finally:
            self._plan = Plan()
            self.waiting.chosen = None

    def _choose_ways(self) -> None:
        """Let a step go vLLM's own way wherever ours would do nothing more for any of its requests."""
        if len(self._tenants) > 1 and not self._ranked:
            self._tenants = set(map(tenant_of, self.requests.values()))
        if self._pool_queue is not None:
            several = len(self._tenants) > 1
            self.kv_cache_manager.allocate_slots = self._allocates[several]
            self._pool_queue.taker = "" if several else next(iter(self._tenants), "")
        self._telling &= self.requests.keys()
        bounded = self._plan.limits or self._telling
        self._reserve_prefill_lookahead = self._bounded if bounded else super()._reserve_prefill_lookahead

    def _resumed(self, step: Any) -> Any:
        """Return a step in which interrupted answers that start go on."""
        for new in step.scheduled_new_reqs:
            if resume(self.requests[new.req_id]) and self.use_v2_model_runner:  # V1 has the same from the parameters
                new.prompt_token_ids = self.requests[new.req_id].prompt_token_ids
        return step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return a step's tokens for its requests; those that failed end with the reason."""
        if self._turns is not None:
            self._note_time(scheduler_output.num_scheduled_tokens)
        nans = model_runner_output.num_nans_in_logits or {}
        failed = {name: f"failed: {NOT_NUMBERS}" for name, number in nans.items() if number}
        if (grammars := self.structured_output_manager.backend) is not None:
            failed |= {name: f"grammar: {why}" for name, why in grammars.failed.items()}
            grammars.failed.clear()
        ended = self.finish_requests(failed, RequestStatus.FINISHED_ERROR) if failed else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in ended:
            last = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.get_finished_reason(),
                stop_reason=failed[request.request_id],
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(last)
        return outputs

    def _note_time(self, scheduled: Mapping[str, int]) -> None:
        """Note how long the step that ends now took. ``scheduled``: the numbers of its tokens by request."""
        self._under_way -= 1
        took_s = self._step_clock.step_s(self._clock(), self._under_way)
        prompt_tokens = answers = 0
        if max(scheduled.values(), default=0) <= 1 + self.num_spec_tokens:  # answers, and last tokens of cached prompts
            answers, scheduled = len(scheduled), {}
        for name, tokens in scheduled.items():
            request = self.requests.get(name)
            # Answers that begin again, after a preemption or elsewhere, are computed like prompts.
            if tokens > 1 + self.num_spec_tokens or (request is not None and not request.num_output_tokens):
                prompt_tokens += tokens
            else:
                answers += 1
        if prompt_tokens or answers:
            self._pace.stepped(prompt_tokens, took_s, answers=answers > 0)

    def reset_prefix_cache(self, *arguments: Any, **named: Any) -> bool:
        """Drop all blocks, or none while one is in use."""
        done = bool(super().reset_prefix_cache(*arguments, **named))
        if done and self._pool_queue is not None:
            self._pool_queue.forget()
        return done

    def _bounded(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens of a request the step computes, as vLLM's ``_reserve_prefill_lookahead``.

        vLLM calls that right before it allocates blocks.
        """
        most = self._plan.limits.get(request.request_id, num_new_tokens)
        if tells_prompt(request):  # vLLM makes logits of all these tokens at once
            most = min(most, max(LEAST_ROWS, self.max_num_running_reqs))
        if num_computed_tokens + num_new_tokens > request.num_tokens:
            most = num_new_tokens  # a prompt's last token, padded for drafts: vLLM needs all of it or nothing
        elif 0 < most < num_new_tokens and self.need_mamba_block_aligned_split:
            # If a layer keeps a state, the state that vLLM stores for a block is that of the step's end.
            whole = ceil_div(most, self.block_size) * self.block_size
            most = self._mamba_block_aligned_split(request, whole, num_computed_tokens - request.num_computed_tokens)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, min(num_new_tokens, most)))

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Accept the drafts for the next step, except for requests that want none."""
        super().update_draft_token_ids(draft_token_ids)
        self._drop_drafts(draft_token_ids.req_ids)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        self._drop_drafts(scheduler_output.num_scheduled_tokens)

    def _drop_drafts(self, names: Iterable[str]) -> None:
        if self._undrafted:
            for request in map(self.requests.get, names):
                if request is not None and request in self._undrafted:
                    request.spec_token_ids = []

    def _begin_answer(self, request: Any) -> None:
        """Give a new request what vLLM's parameters cannot say."""
        params, extra = request.sampling_params, ExtraArgs.of(request.sampling_params)
        if extra.grammar or extra.rules is not None:
            manager = self.structured_output_manager
            manager.backend = manager.backend or AnswerGrammars(self.vllm_config)
            manager.backend.begin(request, extra)
        params.min_p = extra.min_p
        params.logit_bias = extra.logit_bias or None
        if self.num_spec_tokens and (extra.no_drafts or ((params.min_p or params.logit_bias) and not self._all_drafts)):
            self._undrafted.add(request)

    def _preempt_request(self, request: Any, *arguments: Any, **named: Any) -> None:
        if self._turns is not None:
            request.priority = min(request.priority, 0)
        super()._preempt_request(request, *arguments, **named)
        if self._ranked:
            self._count()
            self._rank()

    def _allocate(self, allocate: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        """Do as vLLM's manager, which takes blocks for this request from the pool's queue."""
        assert self._pool_queue is not None
        self._pool_queue.taker = tenant_of(request)
        return allocate(request, *arguments, **named)

    def _count(self) -> None:
        """Correct the accounts, which vLLM's own queue does not keep."""
        if self._pool_queue is None:
            in_use: Counter[str] = Counter()
            for request in self.running:
                in_use[tenant_of(request)] += self._blocks_for(request.num_computed_tokens)
            for tenant in in_use:
                self._shares.account(tenant)
            for account in self._shares.all():
                self._shares.change(account, held=in_use[account.tenant] - account.held)

    def _rank(self) -> None:
        """Set priorities: vLLM preempts what yields, then the latest arrival of the tenant most over its share."""
        over_share = self._shares.over_share
        over = {tenant: over_share(tenant) if self._ranked else 0.0 for tenant in set(map(tenant_of, self.running))}
        for request in self.running:
            if request.priority >= 0:
                request.priority = over[tenant_of(request)] + (_YIELDS if self._ranked and yields(request) else 0.0)

    def protected(self, tenant: str) -> int:
        """Return the idle blocks within the shares of other tenants seen lately."""
        return self._shares.protected(tenant)

    def need_of(self, request: Any) -> Need:
        """Return the tokens and blocks that a waiting request would need if it started now."""
        groups, cached_tokens = self._hit(request)
        assert self._turns is not None
        taken = self._turns.blocks_of(request) - sum(block.ref_cnt > 0 for group in groups for block in group)
        return Need(request.num_tokens - cached_tokens, taken)

    def _blocks_for(self, tokens: int) -> int:
        """Return the most blocks, in all groups, that a request of so many tokens holds at once."""
        blocks = 0
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            most = manager.max_admission_blocks_per_request  # of a window; a group of states has the last and the next
            most = 2 if isinstance(manager.kv_cache_spec, MambaSpec) else most
            whole = ceil_div(tokens, manager.block_size)
            blocks += whole if most is None else min(whole, most)
        return blocks

    def _hit(self, request: Any) -> tuple[list[list[Any]], int]:
        """Return the cached blocks of each group, and the number of tokens, that a request would read now."""
        hit, cached_tokens, *_ = self.kv_cache_manager.get_computed_blocks(request)
        return [[block for block in group if not block.is_null] for group in hit.blocks], cached_tokens


class AsyncTenantScheduler(TenantScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for steps that are planned while the previous one is computed."""


def tenant_scheduler(vllm_config: Any, **named: Any) -> TenantScheduler:
    """Return the scheduler for vLLM's configuration. ``scheduler_cls`` names this function."""
    kind = AsyncTenantScheduler if vllm_config.scheduler_config.async_scheduling else TenantScheduler
    return kind(vllm_config=vllm_config, **named)
