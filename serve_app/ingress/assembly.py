"""Builds the parts of an ingress, in the order of their dependencies."""

import asyncio
import ctypes
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from router.background import run_in_background, run_until_done
from router.serve.core_registry import core_for, decisions_for
from router.serve.request_router import deployment_key
from router.settings import RouterSettings
from serve_app.api.anthropic.history import MessageHistory
from serve_app.api.openai.response import model_body
from serve_app.budgets import Budgets
from serve_app.cache_misses.advice import AdviceBook
from serve_app.cache_misses.detector import MissDetector, PromptMemory
from serve_app.checkpoints.adapter_registry import AdapterRegistry, configured_adapters
from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.limits import max_model_len
from serve_app.checkpoints.sources import load_served_model
from serve_app.config.app import AppConfig
from serve_app.engine.token_channel import TokenReceiver
from serve_app.errors import WarmpathError
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.levels import Levels
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.generation.dispatch import Aborts, Dispatcher
from serve_app.generation.prepare import Preparer
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.batches import BatchDesk, ModelGate
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.completions import Completions
from serve_app.ingress.connections import CALLBACK, CLIENT_HEADERS
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.models import BODIES, Models
from serve_app.ingress.observe.answer_meter import (
    Observers,
    charge_unanswered,
    observe_costs,
    observe_misses,
    observe_prompts,
    observe_usage,
    trace_answer,
)
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.reports import FinalSessions, SessionList, Shared
from serve_app.ingress.prompts import PromptAdmin, Warmer
from serve_app.ingress.services import Access, Catalog, Fleet, Records, Services, limits_of
from serve_app.ingress.tenant_admin import TenantAdmin
from serve_app.live.journal import Journal
from serve_app.live.live import Live
from serve_app.live.prefixes import PrefixTable
from serve_app.live.tally import RATES
from serve_app.notices import board_name, figures_prefix, read_shown
from serve_app.prompts.registry import Prompts, PromptTraffic
from serve_app.ray_compat import on_head_node
from serve_app.sessions import SessionLimit
from serve_app.stored.database import Database, StorageLimits, StoreError
from serve_app.stored.objects import StoredObjects
from serve_app.stored.responses import StoredResponses
from serve_app.stored.url import URL_VARIABLE, open_database
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenancy.weights import post_weights
from serve_app.tenants import Tenants, load_secret, own_state_dir
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing import Tracer, open_tracer
from serve_app.usage import Ledger, Ledgers

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
"""Source: glibc's malloc.h. Once set, malloc no longer raises it to the size of the largest freed buffer."""


@dataclass(frozen=True, slots=True)
class _Common:
    """What all models of an ingress have in common. ``config``: all settings; ``args``: those of Serve's routers.

    ``entrance``: where requests arrive. ``metrics``: what is counted of no model, or of the only one.
    """

    config: AppConfig
    app_name: str
    name: str
    secret: bytes
    tenants: Tenants
    shares: Shares
    workers: FairWorkers
    metrics: IngressMetrics
    observers: Observers
    drain: Drain
    limits: TenantLimits
    budgets: Budgets
    admin: TenantAdmin
    guard: RouteGuard
    broadcast: Broadcast
    receiver: TokenReceiver
    tracer: Tracer | None
    ledger: Ledger
    usage: Ledgers
    history: MessageHistory
    journal: Journal
    tables: Shared
    stored: StoredResponses | None
    desk: BatchDesk | None


async def make_services(config: AppConfig, args: AppConfig, *replicas: DeploymentHandle) -> Services:
    """Build an ingress; its routers connect in the background. ``args``: the settings of Serve's own routers.

    ``replicas``: those of each served model. One of several models that cannot be served leaves the others.
    """
    common = await _make_common(config, replicas[0])
    services = await _make_models(common, config, args, *replicas)
    common.admin.changed = services.tenants_changed
    common.admin.registry.start(services.tenants_changed)
    return services


async def _make_models(common: _Common, config: AppConfig, args: AppConfig, *replicas: DeploymentHandle) -> Services:
    if not config.models:
        only = await _make_model(common, config, args, replicas[0])
        SessionLimit(common.limits, config.block_size, lambda: only.fleet.core.loads.prefill_tokens_per_s)
        return only
    door = FrontDoor(
        common.shares,
        places=lambda: 1,  # none is taken there
        max_waiting=config.max_queued_requests,
        max_bytes=BODIES * config.max_body_bytes,
        limits=common.limits,
    )
    models = Models(config, door, common.metrics, common.broadcast)
    for (name, own), own_args, replica in zip(config.served().items(), args.served().values(), replicas, strict=True):
        try:
            models.served[name] = await _make_model(common, own, own_args, replica, models)
        except (ValueError, OSError) as error:
            logger.exception("the model %s is not served", name)
            models.down[name] = str(error)
    if not models.served:
        raise CheckpointError("; ".join(f"{name}: {why}" for name, why in models.down.items()))
    SessionLimit(common.limits, config.block_size, lambda: models.prefill_tokens_per_s)
    return models.first


async def _make_common(config: AppConfig, replica: DeploymentHandle) -> _Common:
    return_large_buffers()
    context = serve.get_replica_context()
    app_name, name = context.app_name, context.replica_id.unique_id
    secret = load_secret(secret_file=config.secret_file)
    # Its threads' shares are those of the requests below, once the tenants in its database are known.
    shares, bounds = Shares({}), StorageLimits(config.responses_ttl_s, config.responses_max_bytes)
    store_workers = FairWorkers(shares)
    database = await open_storage(config, bounds)
    objects: StoredObjects | None = None
    if database is not None:
        objects = StoredObjects(database, secret, store_workers, replace(bounds, max_bytes=config.files_max_bytes))
    registry = await _registry(objects, config)
    config = registry.in_force(config)
    tenants = Tenants(
        config.tenants,
        secret,
        operator_key_sha256=config.operator_key_sha256,
        aliases=config.aliases,
        refusal=registry.refusal,
    )
    if tenants.open:
        logger.warning("no tenants are configured: every client of this port is the tenant `default`")
    if tenants.refusal:
        logger.error("every client is refused: %s", tenants.refusal)
    if not os.environ.get(CALLBACK):
        logger.warning("no bounds of slow clients, and headers can steer Ray: set %s=%s", CALLBACK, CLIENT_HEADERS)
    shares.set_weights(config.cache_shares)
    metrics, drain = IngressMetrics(), Drain()
    metrics.expect(tenants.by_name)
    broadcast = Broadcast(replica, app_name, config.ingress_replicas)
    levels = Levels(name, config.ingress_replicas, broadcast.levels)
    limits = TenantLimits(config.tenants, config.ingress_replicas, levels=levels)
    journal = Journal(lambda: len(tenants.by_name))
    observers = Observers(refused=[metrics.refused, journal.refused], missed=[metrics.missed])
    ledger = await asyncio.to_thread(Ledger, config.usage_file, config.block_size)
    desk: BatchDesk | None = None
    if objects and config.files_max_bytes:
        desk = BatchDesk(objects, name, lambda: tenants.by_name, aliases=lambda: tenants.aliases)
    budgets = Budgets(config.tenants, config.prices, objects, config.ingress_replicas)
    budgets.start()
    ledger.heard.append(budgets.count)
    limits.checks.append(budgets.check)
    metrics.more.append(budgets.samples)
    return _Common(
        config,
        app_name,
        name,
        secret,
        tenants,
        shares,
        FairWorkers(shares),
        metrics,
        observers,
        drain,
        limits,
        budgets,
        TenantAdmin(registry, broadcast),
        RouteGuard(tenants, metrics, drain, limits, config.allowed_hosts, observers, config.allowed_origins),
        broadcast,
        TokenReceiver(ray.util.get_node_ip_address()),
        open_tracer(config.otlp_endpoint, "ingress", name),
        ledger,
        Ledgers(ledger, broadcast.ingresses),
        MessageHistory(complete=config.ingress_replicas == 1),
        journal,
        Shared(),
        StoredResponses(database, secret, store_workers, bounds) if database and config.store_responses else None,
        desk,
    )


async def _make_model(
    common: _Common, config: AppConfig, args: AppConfig, replica: DeploymentHandle, several: Models | None = None
) -> Services:
    """Build the part of an ingress for one served model, of ``several``, with the model's own settings.

    Raises ValueError and OSError for a model that cannot be served.
    """
    config = common.admin.registry.in_force(config)
    tenants, shares, workers, limits = common.tenants, common.shares, common.workers, common.limits
    app_name, tracer, model = common.app_name, common.tracer, config.model_name
    info = await asyncio.to_thread(load_served_model, config)
    tokenizer, prompts = await asyncio.to_thread(_load_tokenizer, info.path, config, workers)
    adapters = AdapterRegistry(model, current=not config.allow_runtime_lora)
    adapters.merge(await asyncio.to_thread(configured_adapters, config.lora_adapters, config.max_lora_rank))
    metrics, observers = common.metrics, common.observers
    if several is not None:
        metrics = IngressMetrics()
        metrics.expect(tenants.by_name)
        observers = Observers(refused=[metrics.refused, common.journal.refused], missed=[metrics.missed])
    prefixes = PrefixTable(config.block_size, lambda: len(tenants.by_name))
    lengths = limits_of(config, max_model_len(config, info))
    broadcast = common.broadcast
    if several is not None:
        broadcast = Broadcast(replica, app_name, config.ingress_replicas, model)
    preparer = Preparer(
        info, tokenizer, tenants, common.secret, adapters, lengths, prompts,
        workers=workers, simulated=config.engine_traits.simulated,
        shares_prompts="public_prompts" in config.engine_traits.can,
    )  # fmt: skip
    deployment = deployment_key(app_name, replica.deployment_name)
    board = board_name(app_name, replica.deployment_name)
    core = core_for(deployment, RouterSettings.from_json(args.routing()))
    core.configure(RouterSettings.from_json(config.routing()))
    caller = ray.get_runtime_context().get_actor_name() or ""
    live = Live(
        common.name,
        core,
        prefixes,
        lambda: about(services.config),
        partial(read_shown, board),
        broadcast.ingresses,
        metrics,
        common.journal,
    )
    observers.delivered.append(live.delivered)
    observers.refused.append(live.refused)
    if several is not None:  # what is refused before it chooses a model concerns all
        common.observers.refused.append(live.refused)
    block_size = config.block_size if config.enable_prefix_caching else 0
    charge = partial(charge_unanswered, common.ledger, block_size=block_size)
    dispatcher = Dispatcher(
        replica, core, decisions_for(deployment), config.block_size, metrics.retried, caller, common.receiver.inbox,
        tracer, observers.delivered, Aborts(replica, charge).note,
        None if several is None else partial(several.starting, model),
    )  # fmt: skip
    prompt_traffic = PromptTraffic(partial(prompts.least_tokens, block_size=config.block_size))
    front_door = FrontDoor(
        shares,
        places=lambda: places(services.config, len(core.replica_ids)),
        max_waiting=config.max_queued_requests,
        max_bytes=BODIES * config.max_body_bytes,
        limits=limits,
        starting=lambda: not core.replica_ids and services.config.first_replicas == 0,
    )
    warmer = Warmer(prompts, preparer, tenants, core, dispatcher.generate, model, front_door.needing_a_replica)
    prompt_admin = PromptAdmin(
        prompts,
        prompt_traffic,
        warmer,
        preparer,
        tokenizer,
        config.prompts_dir,
        broadcast.ingresses,
        lambda: common.budgets.prices.get(model),
    )
    observe_usage(observers, common.ledger, metrics, block_size)
    observe_prompts(observers, prompt_traffic)
    observe_costs(observers, front_door)
    if config.explain_misses and config.enable_prefix_caching:
        memory = PromptMemory(lambda: len(tenants.by_name))
        book = AdviceBook(lambda: len(tenants.by_name))
        observe_misses(observers, MissDetector(tokenizer.text_of, workers, memory, observers.miss), book)
        observers.advised.append(live.missed)
    if tracer is not None:
        observers.ended.append(trace_answer)
    readers = await asyncio.to_thread(
        AnswerReaders, tokenizer, config.tool_parser, config.reasoning_parser,
        stop_in_reasoning=config.stop_in_reasoning,
    )  # fmt: skip
    if readers.unread:
        logger.warning("requests with tools are refused: %s", readers.unread)
    completions = Completions(
        config, preparer, dispatcher, tokenizer, readers, observers, metrics, front_door, workers, common.drain
    )
    completions.no_replica = lambda: not core.replica_ids or core.all_out
    admin = AdapterAdmin(config, adapters, broadcast.replicas, broadcast.ingresses)
    if several is not None:
        completions.entrance, completions.choose = several.entrance, several.choose
        admin.taken = several.taken
    if common.desk is not None:
        common.desk.gates.append(
            ModelGate(
                lambda name: name == model or adapters.get(name) is not None,
                front_door,
                lambda: len(core.replica_ids),
                core.waiting,
            )
        )
    services = Services(
        config,
        app_name,
        common.name,
        Access(tenants, common.guard, shares, limits, common.budgets, front_door, common.drain, common.admin),
        Catalog(
            model_body(model, int(time.time()), lengths.max_model_len),
            tokenizer,
            preparer,
            adapters,
            admin,
            prompts,
            prompt_admin,
        ),
        Fleet(
            core,
            broadcast,
            common.receiver,
            run_until_done(
                partial(broadcast.connect, adapters, prompt_admin.learn, from_zero=not config.first_replicas)
            ),
            SessionList(broadcast.replicas),
            board,
            figures_prefix(replica.deployment_name),
        ),
        Records(
            metrics,
            live,
            common.usage,
            common.history,
            common.journal,
            common.tables,
            tracer,
            common.stored,
            common.desk,
        ),
        completions,
        several=several,
    )
    observers.ended.append(FinalSessions(services.close_sessions).ended)
    services.fleet.posting = run_in_background(partial(post_weights, board, common.admin.registry))
    return services


async def open_storage(config: AppConfig, bounds: StorageLimits) -> Database | None:
    """Open the database of responses, files and batches, None if the deployment stores none. Raises StoreError."""
    budgets = any(tenant.budget is not None for tenant in config.tenants)
    stores = config.store_responses or config.files_max_bytes or budgets or config.require_tenants
    if not (stores or config.operator_key_sha256):
        return None
    url, given = os.environ.get(URL_VARIABLE), config.responses_file
    if not url and given is None and not await asyncio.to_thread(on_head_node):
        logger.warning(
            "no responses, files and batches are stored: this ingress is not on Ray's head node, so others would not "
            f"find them; set ${URL_VARIABLE} to a Redis or Postgres, or store_responses to false and files_max_bytes "
            "to 0"
        )
        return None
    file = (given or own_state_dir() / "responses.sqlite").expanduser()
    try:
        return await asyncio.to_thread(open_database, url, file, bounds)
    except StoreError:
        if stores or url or given is not None or await asyncio.to_thread(file.exists):
            raise
        logger.warning("operators cannot change tenants and keys here: %s cannot be made", file)
        return None


async def _registry(objects: StoredObjects | None, config: AppConfig) -> TenantRegistry:
    """Return the tenants of the settings and of the database, read now if that answers."""
    registry = TenantRegistry(objects, config)
    try:
        await registry.look()
        # What is at the default place may be the database of another deployment of the same user.
        if config.tenants and (os.environ.get(URL_VARIABLE) or config.responses_file is not None):
            await registry.remember()
        await registry.note_lives()
    except WarmpathError as error:
        logger.warning("tenants and keys: %s", error.message)
    return registry


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


def _load_tokenizer(path: Path, config: AppConfig, workers: FairWorkers) -> tuple[PromptTokenizer, Prompts]:
    tokenizer = PromptTokenizer(
        path,
        cache_bytes=config.tokenizer_cache_bytes,
        block_size=config.block_size,
        workers=workers,
        chat_template=config.chat_template,
        lookahead=config.draft_lookahead_tokens,
    )
    prompts = Prompts.of(config.public_prompts, config.prompts_dir)
    prompts.install(tokenizer)
    return tokenizer, prompts


def return_large_buffers() -> bool:
    """Make malloc map buffers over ``LARGE_BYTES`` separately in this process; return False without glibc's malloc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
