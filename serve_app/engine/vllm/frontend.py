"""vLLM's ``AsyncLLM`` in a thread with its own loop; its core is a child process.

Owns all objects of vLLM. Returns plain ``Generated`` parts and figures of each step. Knows no ``EngineRequest``.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import uvloop

from serve_app.config.engine import VLLM_MISSING, Capability
from serve_app.engine.protocol import TokenLogprob
from serve_app.engine.step import ceil_div
from serve_app.engine.vllm.engine_args import check_drafts, parsed_engine_args
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from serve_app.engine.vllm.refusals import refused_card
from serve_app.engine.vllm.scheduling.pace import StepClock
from serve_app.engine.vllm.settings import VllmSettings, engine_arguments, set_environment

T = TypeVar("T")

TakeTokens = Callable[[Sequence[int]], bool]
"""Offered the tokens of a request's step while all before them are read; returns whether it took them."""

OnStep = Callable[[int, float, int, float, tuple[float, float]], None]
"""(running sequences after a step, part of the pool in use, prompt tokens computed, duration in seconds, loads from
host memory that ended: their bytes and seconds in all ranks)"""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that vLLM derives from settings. ``num_blocks``: without its null block.

    ``block_tokens``: of a longest request for each block that it holds; not the block size if layers form groups.
    ``groups``: each one's block size, and the most blocks that a request holds there at once.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_tokens: float
    groups: tuple[tuple[int, int], ...]

    def blocks_for(self, tokens: int) -> int:
        """Return the most blocks, in all groups, that a request of so many tokens holds at once."""
        return sum(min(ceil_div(tokens, size), most) for size, most in self.groups)


@dataclass(frozen=True, slots=True)
class Generated:
    """A request's output of some steps. ``finish_reason``: vLLM's, "" while it continues; ``queue_s``: time queued.

    ``prompt_logprobs``: of the whole prompt without its first token, in the first output if requested.
    ``failure``: the kind of an error, ": " and the reason.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    cached_tokens: int
    queue_s: float
    preemptions: int
    failure: str = ""


class VllmFrontend:
    """One ``AsyncLLM``, ``llm``. Its coroutines, and those here, belong to its loop: pass them to ``call``.

    ``off``: the capabilities that this vLLM does not allow, with the reasons; ``settings``: without them.
    """

    def __init__(
        self, settings: VllmSettings, endpoints: EventEndpoints, on_step: OnStep, drafts: Counter[str]
    ) -> None:
        """Start vLLM, in half a minute or more. Raises RuntimeError if it is missing, and vLLM's own errors."""
        self.loop = uvloop.new_event_loop()
        self._clock = StepClock()
        self._logger = _logger_of(on_step, drafts, self._clock)
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm-frontend", daemon=True)
        self._thread.start()
        self.llm: Any = None
        self._takers: dict[str, TakeTokens] = {}
        self.settings, self.off = settings, dict[Capability, str]()
        try:
            self.facts: ModelFacts = self.call(self._open(settings, endpoints)).result()
        except BaseException:
            self.stop()
            raise

    @property
    def errored(self) -> bool:
        """Whether vLLM's core or the thread has ended."""
        return bool(self.llm.errored) or not self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop (from any other thread)."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        """End vLLM's processes and the loop."""
        if self.llm is not None:
            self.loop.call_soon_threadsafe(partial(self.llm.shutdown, timeout=5.0))  # then it kills its core
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def generate(
        self,
        request_id: str,
        token_ids: list[int],
        salt: str,
        sampling: Mapping[str, Any],
        lora: Any,
        priority: int = 0,
        at_once: TakeTokens | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """Yield a request's output; cancelling it aborts the request. Raises vLLM's own errors.

        ``sampling``: fields of vLLM's ``SamplingParams``; ``lora``: the result of ``add_lora``, or None.
        ``priority``: the lowest goes first. ``at_once``: tokens that it takes are not yielded; it must not raise.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA, skip_clone=True)  # nobody else's
        prompt = tokens_input(token_ids, cache_salt=salt)
        self._clock.arrived(time.monotonic())
        with self._taking(request_id, at_once):
            async for output in self.llm.generate(prompt, params, request_id, lora_request=lora, priority=priority):
                yield _generated(output, params, token_ids)

    @contextmanager
    def _taking(self, request_id: str, at_once: TakeTokens | None) -> Iterator[None]:
        """Offer a request's tokens to ``at_once`` within the block."""
        if at_once is None:
            yield
            return
        self._takers[request_id] = at_once
        try:
            yield
        finally:
            del self._takers[request_id]

    async def add_lora(self, name: str, number: int, path: str) -> Any:
        """Load an adapter; return it for ``generate``. Raises vLLM's own errors, or ValueError."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
        if not await self.llm.add_lora(request):
            raise ValueError("it was not loaded")
        return request

    async def _open(self, settings: VllmSettings, endpoints: EventEndpoints) -> ModelFacts:
        set_environment(os.environ, max(1, settings.num_threads // settings.ranks))
        try:
            import torch
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise RuntimeError(f"{VLLM_MISSING} ({error})") from error
        from serve_app.engine.vllm.scheduling import hooks

        self.off = hooks.start(
            [*settings.required_capabilities, *(("exact_resume",) if settings.exact_resume == "on" else ())]
        )
        self.settings = settings = settings.without(self.off)
        if settings.exact:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the sampler of V2 is another
        if not current_platform.is_cpu() and (gpus := torch.cuda.device_count()) < settings.ranks:
            raise ValueError(
                f"this vLLM computes on GPUs, and the replica sees {gpus}: set replica_num_gpus: {settings.ranks}"
            )
        if not current_platform.is_cpu() and (
            refused := refused_card(settings, current_platform.get_device_total_memory())
        ):
            raise ValueError("; ".join(refused))
        check_drafts(settings.speculative_config)
        given = parsed_engine_args(settings.engine_args)
        arguments = engine_arguments(settings, endpoints, on_cpu=current_platform.is_cpu(), off=self.off)
        if settings.data_parallel is not None and not AsyncEngineArgs(**given | arguments).create_model_config().is_moe:
            self.settings = settings = replace(settings, data_parallel=None)
            arguments = engine_arguments(settings, endpoints, on_cpu=current_platform.is_cpu(), off=self.off)
        vllm_config = AsyncEngineArgs(**given | arguments).create_engine_config()
        if settings.num_blocks is not None:  # vLLM then lowers the length to what fits, in all groups of layers
            vllm_config.model_config.original_max_model_len = -1
        self.llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[self._logger], disable_log_stats=True)
        _take_short_way(self.llm.output_processor, self._takers)
        kinds = (await self.llm.collective_rpc("begin_sampling", args=(settings.exact,)))[0]
        config = self.llm.vllm_config
        size = config.cache_config.block_size
        if size != settings.block_size:
            raise ValueError(f"vLLM computes this model in blocks of {size} tokens here; set block_size: {size}")
        model, blocks = config.model_config, config.cache_config.num_gpu_blocks
        tokens = config.cache_config.kv_cache_size_tokens or blocks * size
        ahead = 2 * config.scheduler_config.max_num_batched_tokens  # the steps in flight
        groups = tuple(
            (each, blocks if window is None else ceil_div(window + ahead, each) + 1) for each, window in kinds
        )
        return ModelFacts(model.get_vocab_size(), model.max_model_len, blocks - 1, tokens / blocks, groups)


def _take_short_way(processor: Any, takers: Mapping[str, TakeTokens]) -> None:
    """Let vLLM's output processor offer tokens to ``takers``, by the names of requests, before it works on them.

    What it does for each, text, statistics, an output and its reader's task, costs several times all of ours, and we
    need only the ids of tokens in the middle of an answer. One that names things otherwise goes its own way.
    """
    kind = type(processor)

    class ShortWay(kind):  # type: ignore[misc, valid-type]
        def process_outputs(self, outputs: Sequence[Any], *others: Any, **more: Any) -> Any:
            return super().process_outputs([one for one in outputs if not self._took(one)], *others, **more)

        def _took(self, one: Any) -> bool:
            try:
                state = self.request_states.get(one.request_id)
                if state is None or state.is_prefilling or state.queue.output is not None:
                    return False
                if one.finish_reason is not None or one.new_logprobs is not None or one.events or one.prefill_stats:
                    return False
                take = takers.get(state.external_req_id)
            except AttributeError:
                return False
            return take is not None and take(one.new_token_ids)

    processor.__class__ = ShortWay


def _generated(output: Any, params: Any, prompt: list[int]) -> Generated:
    logprobs = partial(_logprob, None if params.logprob_token_ids else params.logprobs)
    part, metrics = output.outputs[0], output.metrics
    ids = tuple(part.token_ids)
    return Generated(
        ids,
        tuple(map(logprobs, ids, part.logprobs)) if part.logprobs else (),
        _prompt_logprobs(params.prompt_logprobs, prompt, output.prompt_logprobs or ()),
        part.finish_reason or "",
        output.num_cached_tokens or 0,
        max(0.0, metrics.scheduled_ts - metrics.queued_ts) if metrics is not None else 0.0,
        metrics.num_preemptions if metrics is not None else 0,
        str(part.stop_reason or "") if part.finish_reason == "error" else "",
    )


def _prompt_logprobs(
    most: int | None, prompt: list[int], logprobs: Sequence[Mapping[int, Any] | None]
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of a prompt's tokens; vLLM has none for the first."""
    if most is None:
        return ()
    pairs = ((token, by_id) for token, by_id in zip(prompt, logprobs, strict=False) if by_id is not None)
    return tuple(_logprob(most, token, by_id)._replace(rank=by_id[token].rank) for token, by_id in pairs)


def _logprob(most: int | None, token: int, by_id: Mapping[int, Any]) -> TokenLogprob:
    """Return a token's log-probability, and the likeliest tokens by rank, from 1 on; ``most`` None: all, in order."""
    if most is None:
        return TokenLogprob(by_id[token].logprob, tuple((other, each.logprob) for other, each in by_id.items()))
    best = sorted((each.rank, other, each.logprob) for other, each in by_id.items() if each.rank <= most)
    return TokenLogprob(by_id[token].logprob, tuple((other, value) for _, other, value in best[:most]))


def _loads(stats: Mapping[str, Any] | None) -> tuple[float, float]:
    """Return the bytes and seconds of loads in the statistics of vLLM's connectors."""
    own = (stats or {}).get("OffloadingConnector", stats or {})
    totals = [own.get("data", {}).get(f"vllm:kv_offload_load_{name}", {}) for name in ("bytes", "time")]
    return float(sum(totals[0].values())), float(sum(totals[1].values()))


def _logger_of(on_step: OnStep, drafts: Counter[str], clock: StepClock) -> Callable[[Any, int], Any]:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StepLogger(PrometheusStatLogger):  # type: ignore[misc]
        """Passes on the figures of a step.

        It stands for vLLM's own metrics, which nobody reads here: without one of their kind, vLLM counts them beside.
        """

        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            self._ahead = bool(vllm_config.scheduler_config.async_scheduling)

        def record(self, scheduler_stats: Any, *others: Any, **more: Any) -> None:
            """Called by vLLM once per step, in the loop."""
            if scheduler_stats is None:
                return
            step = scheduler_stats.iteration_details
            running = scheduler_stats.num_running_reqs
            took_s = clock.step_s(time.monotonic(), running + scheduler_stats.num_waiting_reqs)
            nothing = step is None or step.is_dummy
            tokens, took_s = (
                (0, 0.0) if nothing else (step.num_ctx_tokens, took_s if self._ahead else step.elapsed_ms / 1000)
            )
            loads = _loads(scheduler_stats.kv_connector_stats)
            on_step(running, scheduler_stats.kv_cache_usage, tokens, took_s, loads)
            if (verified := scheduler_stats.spec_decoding_stats) is not None:
                drafts["warmpath_spec_decode_num_drafts_total"] += verified.num_drafts
                drafts["warmpath_spec_decode_num_draft_tokens_total"] += verified.num_draft_tokens
                drafts["warmpath_spec_decode_num_accepted_tokens_total"] += verified.num_accepted_tokens

        def _nothing(self, *_: Any) -> None:
            """Log nothing."""

        log_engine_initialized = record_sleep_state = record_admission_rejection = log = _nothing

    return StepLogger
