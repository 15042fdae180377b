"""One served model of an address: from a checked request to its answer. It knows no other model."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import PurePath
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from router.background import run_in_background, run_until_done
from router.protocol.autoscaling import IngressFigures
from router.protocol.samples import Sample
from router.settings import RouterSettings
from serve_app.api.format import AnswerFormat, AnswerHead
from serve_app.api.openai.response import adapter_body, model_body
from serve_app.api.request import (
    ChatRequest,
    GenerateRequest,
    UnknownField,
    reasoning_fields,
    require_none,
    unknown_fields,
)
from serve_app.cache_misses.advice import AdviceBook
from serve_app.cache_misses.detector import MissDetector, PromptMemory
from serve_app.checkpoints.limits import max_model_len
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import EngineRequest
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.generation.answer import PieceSink, answer_pieces, told_ids
from serve_app.generation.dispatch import Dispatcher
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.answers import Answer, request_headers, streamed, whole
from serve_app.ingress.batches import ModelGate
from serve_app.ingress.client_headers import with_session
from serve_app.ingress.conversation import Conversation
from serve_app.ingress.drain import Deadline
from serve_app.ingress.http import until_disconnect
from serve_app.ingress.lifeline import HEAD_AFTER_S, NEAR_REFUSAL_S, Lifeline
from serve_app.ingress.observe import metrics as figures
from serve_app.ingress.observe.answer_meter import (
    AnswerMeter,
    Observers,
    charge_unanswered,
    cost_observers,
    miss_observers,
    prompt_observers,
    trace_answer,
    usage_observers,
)
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.reports import FinalSessions, SessionList
from serve_app.ingress.outside import LoadedModel, Outside
from serve_app.ingress.prompts import PromptAdmin, Warmer
from serve_app.ingress.shared import BODIES, Shared
from serve_app.live.live import Live
from serve_app.live.prefixes import PrefixTable
from serve_app.live.tally import RATES
from serve_app.prompts.registry import PromptTraffic, version_samples
from serve_app.tenants import Tenant
from serve_app.tracing import RequestTrace

logger = logging.getLogger(__name__)

STATUS_S = 5.0
"""The lifetime of a message of Serve."""

STARTING_S = 1.0
"""The time for which an answer of Serve's counts, while requests wait for a replica."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that was read, and where it waits. ``note``: what its client is told, "" for nothing."""

    request: GenerateRequest
    tenant: Tenant
    arrival: Arrival
    at_s: float
    note: str = ""


class Model:
    """The parts of one model at this ingress. ``config``: its settings in force.

    ``taken``: whether a model or adapter of the address has a name. ``final_sessions``: ends sessions at all models.
    """

    def __init__(
        self,
        config: AppConfig,
        loaded: LoadedModel,
        shared: Shared,
        outside: Outside,
        taken: Callable[[str], bool],
        final_sessions: FinalSessions,
    ) -> None:
        self.config = config
        self.name = name = config.model_name
        self.tokenizer, self.prompts = loaded.tokenizer, loaded.prompts
        self.adapters, self.readers = loaded.adapters, loaded.readers
        self.tenants, self.workers, self.drain = shared.tenants, shared.workers, shared.drain
        lengths = limits_of(config, max_model_len(config, loaded.info))
        self.card = model_body(name, int(time.time()), lengths.max_model_len)
        """The model's description for clients."""
        self.broadcast = outside.broadcast(config, name, name if shared.several else "")
        self.core = outside.core(config)
        self.sessions = SessionList(self.broadcast.replicas)
        self.metrics = shared.metrics
        if shared.several:
            self.metrics = IngressMetrics()
            self.metrics.expect(shared.tenants.by_name)
        self.front_door = FrontDoor(
            shared.shares,
            places=lambda: places(self.config, len(self.core.replica_ids)),
            max_waiting=config.max_queued_requests,
            max_bytes=BODIES * config.max_body_bytes,
            limits=shared.limits,
            starting=lambda: self.asleep,
        )
        self.live = Live(
            shared.name,
            self.core,
            PrefixTable(config.block_size, lambda: len(shared.tenants.by_name)),
            lambda: about(self.config),
            self.broadcast.notices,
            self.broadcast.ingresses,
            self.metrics,
            shared.journal,
        )
        traffic = PromptTraffic(partial(self.prompts.least_tokens, block_size=config.block_size))
        self.observers = self._observers(shared, traffic, final_sessions)
        self.preparer = Preparer(
            loaded.info, self.tokenizer, self.tenants, shared.secret, self.adapters, lengths, self.prompts,
            workers=self.workers, simulated=config.engine_traits.simulated,
            shares_prompts="public_prompts" in config.engine_traits.can,
        )  # fmt: skip
        self.source = outside.source(
            config,
            self.core,
            partial(
                Dispatcher, block_size=config.block_size, count_retry=self.metrics.retried,
                tracer=shared.tracer, delivered=self.observers.delivered,
                starting=self.starting if shared.several else None,
            ),
            partial(charge_unanswered, shared.ledger, block_size=self._cached_block_size),
        )  # fmt: skip
        warmer = Warmer(
            self.prompts, self.preparer, self.tenants, self.core, self.source.generate, name,
            self.front_door.needing_a_replica,
        )  # fmt: skip
        self.prompt_admin = PromptAdmin(
            self.prompts, traffic, warmer, self.preparer, self.tokenizer, config.prompts_dir, self.broadcast.ingresses,
            lambda: shared.budgets.prices.get(name),
        )  # fmt: skip
        self.adapter_admin = AdapterAdmin(
            config, self.adapters, self.broadcast.replicas, self.broadcast.ingresses, taken
        )
        self._synced = False
        self._status: tuple[float, str] | None = None
        self._starting: tuple[float, asyncio.Task[bool]] | None = None
        self.connecting = run_until_done(
            partial(self.broadcast.connect, self.adapters, self.prompt_admin.learn, from_zero=not config.first_replicas)
        )
        self._posting = run_in_background(partial(self.broadcast.post_weights, shared.registry))

    @property
    def _cached_block_size(self) -> int:
        return self.config.block_size if self.config.enable_prefix_caching else 0

    def _observers(self, shared: Shared, traffic: PromptTraffic, final_sessions: FinalSessions) -> Observers:
        observers = Observers(
            delivered=[self.live.delivered],
            refused=[self.metrics.refused, shared.journal.refused, self.live.refused],
        )
        observers += usage_observers(shared.ledger, self.metrics, self._cached_block_size)
        observers += prompt_observers(traffic) + cost_observers(self.front_door)
        if self.config.explain_misses and self.config.enable_prefix_caching:
            memory = PromptMemory(lambda: len(shared.tenants.by_name))
            book = AdviceBook(lambda: len(shared.tenants.by_name))
            misses = MissDetector(self.tokenizer.text_of, self.workers, memory, self.metrics.missed)
            observers += miss_observers(misses, book, self.live.missed)
        if shared.tracer is not None:
            observers += Observers(ended=[trace_answer])
        return observers + shared.traffic.observers(self.name) + Observers(ended=[final_sessions.ended])

    # The settings.

    async def replace_prompts(self, config: AppConfig) -> None:
        """Use the public prompts of other settings. Raises the errors of ``Prompts.replace``; nothing changes then."""
        await self.prompts.replace(self.tokenizer, config.public_prompts)

    def configure(self, config: AppConfig) -> None:
        """Use other settings from the next request on; running requests keep their old ones. Never fails."""
        self.core.configure(RouterSettings.from_json(config.routing()))
        self.front_door.configure(config.max_queued_requests, BODIES * config.max_body_bytes)
        self.metrics.expect(self.tenants.by_name)
        self.adapter_admin.configure(config)
        self.preparer.configure(limits_of(config, self.card["max_model_len"]))
        self.config = config

    # Who may ask for it, and whether it can answer.

    def serves(self, name: str, tenant: Tenant | None = None) -> bool:
        """Return whether a tenant, or (None) anybody, may use this model or an adapter of it by this name."""
        if tenant is None:
            return name == self.name or self.adapters.get(name) is not None
        return self.adapters.serves(name, tenant.name, tenant.models)

    def names(self, tenant: Tenant | None) -> list[str]:
        """Return the names of the model and its adapters that a tenant, or (None) anybody, may use."""
        models = None if tenant is None else tenant.models
        base = [self.name] if self.adapters.base_visible(models) else []
        return [*base, *(spec.name for spec in self.adapters.visible(None if tenant is None else tenant.name, models))]

    def cards(self, tenant: Tenant | None, aliases: Mapping[str, str], *, shows_paths: bool) -> list[dict[str, Any]]:
        """Return the descriptions of these, as in ``/v1/models``. ``shows_paths``: adapters' whole paths."""
        models = None if tenant is None else tenant.models
        specs = self.adapters.visible(None if tenant is None else tenant.name, models)
        roots = (spec.path if shows_paths else PurePath(spec.path).name for spec in specs)
        cards = [adapter_body(spec.name, root, self.card) for spec, root in zip(specs, roots, strict=True)]
        if self.adapters.base_visible(models):
            cards = [self.card, *cards]
        else:
            cards = [{**card, "parent": None} for card in cards]
        by_name = {card["id"]: card for card in cards}
        return cards + [{**by_name[name], "id": alias} for alias, name in aliases.items() if name in by_name]

    @property
    def may_answer(self) -> bool:
        """Whether a replica can answer a request, now or once it has started for it."""
        return bool(self.core.replica_ids) or self.config.first_replicas == 0

    @property
    def asleep(self) -> bool:
        """Whether the model has no replica until a request comes."""
        return self.config.first_replicas == 0 and not self.core.replica_ids

    def ready(self) -> bool:
        """Return whether requests can be answered, by a replica that runs or one that starts for them.

        Every cache was known once; later replicas change nothing.
        """
        if not self._synced and self.connecting.done():
            self._synced = self.core.knows_every_cache
        return (self._synced and bool(self.core.replica_ids)) or self.asleep

    async def status(self) -> str:
        """Return what Serve says of the replicas; probes share an answer."""
        now_s = time.monotonic()
        if self._status is None or now_s - self._status[0] > STATUS_S:
            self._status = now_s, await asyncio.to_thread(self.broadcast.message)
        return self._status[1]

    async def starting(self) -> bool:
        """Return whether requests may wait for a replica that starts; all who ask share an answer."""
        now_s = time.monotonic()
        since_s, answer = self._starting or (-math.inf, None)
        if answer is None or now_s - since_s > STARTING_S:
            unheard = not self.core.all_out and not self.core.other_versions  # else those that run cannot take it
            answer = asyncio.create_task(asyncio.to_thread(self.broadcast.is_starting, unheard=unheard))
            self._starting = now_s, answer
        return await asyncio.shield(answer)

    @property
    def gate(self) -> ModelGate:
        """How busy the model is, for what can wait."""
        return ModelGate(self.serves, self.front_door, lambda: len(self.core.replica_ids), self.core.waiting)

    # The way of a request.

    def checked(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the names of its fields that this model ignores. Raises InvalidRequest."""
        if not isinstance(request, ChatRequest):
            if self.config.strict:
                require_none(request.unknown)
            return request
        template, unknown = self.tokenizer.template, request.unknown
        if request.chat_template_kwargs:
            unread = template.unread(request.chat_template_kwargs)
            unknown = (*unknown, *unknown_fields((f"chat_template_kwargs.{name}" for name in unread), ()))
        if request.thinking.get("thinking") and not self.readers.thinks:
            unknown = (*unknown, UnknownField("thinking"))
        if self.config.strict:
            require_none(unknown)
        # What follows is no fault of the client's.
        if any("reasoning" in message for message in request.messages):
            names = reasoning_fields("")
            if len([*template.unread(names)]) == len(names):
                unknown = (*unknown, UnknownField("reasoning"))
        if not template.repairs.shows_names and any(
            "name" in message and message["role"] != "tool" for message in request.messages
        ):
            unknown = (*unknown, UnknownField("messages[].name"))
        return request if unknown is request.unknown else replace(request, unknown=unknown)

    async def answer(self, http: Request, arrived: Arrived, answer_format: AnswerFormat) -> Response:
        """Return a whole or started answer. Raises a ``WarmpathError`` before its first piece, or ClientDisconnect."""
        state, request = http.state, with_session(self.readers.checked(arrived.request), http.headers)
        if getattr(state, "waits_for_all", False):  # most lines of a batch
            request = replace(request, service_tier="flex")
        # The internal id is random: two clients may send the same x-request-id.
        answer_id = request_id = secrets.token_hex(16)
        if isinstance(answer_format, Conversation):
            # A stored response's id opens its text, and events and logs show this request's id.
            request_id = sha256(answer_id.encode()).hexdigest()[:32]
        timeout_s = self.config.request_timeout_s
        deadline = Deadline(self.drain, arrived.at_s + timeout_s, timeout_s)
        body_bytes = arrived.arrival.body_bytes
        trace: RequestTrace | None = getattr(state, "trace", None)
        lifeline: Lifeline | None = None
        if request.stream:
            lifeline = state.lifeline = self._lifeline(http, request, answer_format, arrived.note)
        async with until_disconnect(http):
            async with deadline.limit():
                generations = await self._admitted(request, arrived, request_id, deadline, trace)
            meter = state.meter = AnswerMeter(
                self.observers, self.metrics, request, generations, arrived.at_s, body_bytes,
                arrived.arrival.allowance, trace,
            )  # fmt: skip
            place, sink = arrived.arrival.hand_over(), PieceSink()
            reader = self.readers.of(request)
            pieces = answer_pieces(generations, self.source, reader, place, self.workers.loop, sink)
            head = AnswerHead(
                answer_id,
                int(time.time()),
                request.answering_model,
                request.include_usage,
                request.repeated,
                meter.usage.total if request.continuous_usage else None,
                told_ids(request, generations),
                request.include_reasoning,
                arrived.note,
            )
            answer = Answer(answer_format, head, pieces, sink, place, meter, deadline)
            return await (streamed(answer, lifeline) if lifeline is not None else whole(answer))

    async def _admitted(
        self,
        request: GenerateRequest,
        arrived: Arrived,
        request_id: str,
        deadline: Deadline,
        trace: RequestTrace | None,
    ) -> list[EngineRequest]:
        """Wait for the request's turn, and return what is sent to replicas."""
        arrival, allowance = arrived.arrival, arrived.arrival.allowance
        stage: Callable[[str], None] = trace.stage if trace is not None else lambda _: None
        stage("read")
        await arrival.turn(request.choices, request.order, flex=request.service_tier == "flex")
        stage("wait")
        generations = await self.preparer.prepare(request, arrived.tenant, request_id, deadline_s=deadline.at_s)
        generations = self.readers.after_reasoning(request, generations)
        prompts = generations[:: request.n]
        prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
        output_tokens = sum(generation.sampling.max_tokens for generation in generations)
        allowance.reserve(prompt_tokens, output_tokens, request.answering_model)
        await allowance.prepared(prompts)
        stage("prepare")
        if trace is None:
            return generations
        return [structs.replace(generation, traceparent=trace.traceparent) for generation in generations]

    def _lifeline(self, http: Request, request: GenerateRequest, form: AnswerFormat, note: str) -> Lifeline:
        """Return what shows the client of an accepted stream that it lives."""

        def near_refusal() -> bool:
            # That there is no replica is a status of its own, which clients act on.
            none = not self.core.replica_ids or self.core.all_out
            return none and self.config.no_replica_wait_s < HEAD_AFTER_S + NEAR_REFUSAL_S

        return Lifeline(
            http.scope,
            http._send,
            form.sign,
            lambda: request_headers(request, note),
            getattr(http.state, "dress", lambda response: response),
            lambda error: form.stream(AnswerHead("", 0, "")).error(error),
            near_refusal,
        )

    # What is shown of it.

    def scaling_figures(self) -> dict[str, float]:
        """Return this ingress' figures for the model's autoscaling policy; none where that is off."""
        if self.config.autoscaling is None:
            return {}
        times, working_set_tokens = self.core.demand()
        # Without a replica, those with a place wait too.
        waiting = self.front_door.waiting().total() if self.core.replica_ids else self.front_door.asking()
        reported = IngressFigures(
            waiting_requests=waiting,
            working_set_tokens=working_set_tokens,
            **asdict(times),
            **self.config.autoscaling.model_dump(),
        ).to_floats()
        return {f"{self.broadcast.figures_prefix}{name}": value for name, value in reported.items()}

    def samples(self) -> list[Sample]:
        """Return the samples of this model at this ingress, and of its router."""
        streams = figures.samples_of({"warmpath_event_streams": self.live.watchers})
        versions, _ = self.prompt_admin.traffic.report()
        return [
            *self.metrics.samples(),
            *figures.router_samples(self.core),
            *streams,
            *self.front_door.samples(),
            *version_samples(versions),
        ]

    async def replica_samples(self) -> list[Sample]:
        """Return the latest samples of the replicas, and of the autoscaler."""
        samples = figures.replica_samples(self.core)
        if self.config.autoscaling is not None:
            samples += figures.autoscaling_samples(await asyncio.to_thread(self.broadcast.scaling_notices))
        return samples


def limits_of(config: AppConfig, model_len: int) -> Limits:
    """Return the limits of generations, in tokens, and of saves; ``model_len``: the model's maximum length."""
    return Limits(model_len, config.default_max_tokens, config.save_ttl_s)


def about(config: AppConfig) -> dict[str, Any]:
    """Return the description of the instance in snapshots of the event stream. ``links``: paths for a browser.

    ``from_zero``: without requests, the model has no replica.
    """
    keyless = config.metrics_public or not (config.tenants or config.operator_key_sha256)
    return {
        "model": config.model_name,
        "engine": config.engine,
        "simulated": config.engine_traits.simulated,
        "policy": config.policy,
        "block_size": config.block_size,
        "ingresses": config.ingress_replicas,
        "rates": RATES,
        "links": ["docs"] * config.documented + ["metrics"] * keyless,
        "keys": bool(config.tenants),
        "from_zero": config.first_replicas == 0,
    }


def places(config: AppConfig, replicas: int) -> int:
    """Return the number of generations that one ingress may run: its part of the replicas' capacity.

    Replicas may queue half as many sequences as they run; more would only make turns longer.
    """
    by_replica = config.max_num_seqs + min(config.max_waiting_requests, (config.max_num_seqs + 1) // 2)
    return max(1, max(config.first_replicas, replicas, 1) * by_replica // config.ingress_replicas)
