"""What an address reaches through the process that it runs in: replicas, other ingresses, the database, checkpoints."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from router.core import RoutingCore
from router.serve.core_registry import core_for, decisions_for
from router.serve.request_router import deployment_key
from router.settings import RouterSettings
from serve_app.checkpoints.adapter_registry import AdapterRegistry, configured_adapters
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.checkpoints.sources import load_served_model
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import EngineRequest, Prefilled
from serve_app.engine.token_channel import TokenReceiver
from serve_app.fairness.queue import FairWorkers
from serve_app.generation.answer import TokenSource
from serve_app.generation.dispatch import Aborts, Dispatcher
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.connections import CALLBACK, CLIENT_HEADERS
from serve_app.prompts.registry import Prompts
from serve_app.ray_compat import on_head_node
from serve_app.stored.database import Database, StorageLimits, StoreError
from serve_app.stored.url import URL_VARIABLE, open_database
from serve_app.tenants import load_secret, own_state_dir
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing import Tracer, open_tracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an ingress loads of a model: all that takes time, and can fail."""

    info: CheckpointInfo
    tokenizer: PromptTokenizer
    prompts: Prompts
    adapters: AdapterRegistry
    readers: AnswerReaders

    @classmethod
    def load(cls, config: AppConfig, info: CheckpointInfo, workers: FairWorkers) -> LoadedModel:
        """Load a model of a checkpoint; blocks. Raises ValueError and OSError for one that cannot be served."""
        tokenizer = PromptTokenizer(
            info.path,
            cache_bytes=config.tokenizer_cache_bytes,
            block_size=config.block_size,
            workers=workers,
            chat_template=config.chat_template,
            lookahead=config.draft_lookahead_tokens,
        )
        prompts = Prompts.of(config.public_prompts, config.prompts_dir)
        prompts.install(tokenizer)
        adapters = AdapterRegistry(config.model_name, current=not config.allow_runtime_lora)
        adapters.merge(configured_adapters(config.lora_adapters, config.max_lora_rank))
        readers = AnswerReaders(
            tokenizer, config.tool_parser, config.reasoning_parser, stop_in_reasoning=config.stop_in_reasoning
        )
        if readers.unread:
            logger.warning("requests with tools are refused: %s", readers.unread)
        return cls(info, tokenizer, prompts, adapters, readers)


Charge = Callable[[EngineRequest, Prefilled], None]
"""Charges what a replica computed for a request that was left before its first token."""


class Outside(Protocol):
    """All that an address reaches outside itself. ``name``: of this ingress."""

    name: str

    def close(self) -> None:
        """Receive no more tokens."""

    def secret(self, config: AppConfig) -> bytes:
        """Return the deployment's secret. Raises SecretError."""

    def tracer(self, config: AppConfig) -> Tracer | None:
        """Return where spans go, None for nowhere."""

    async def database(self, config: AppConfig, bounds: StorageLimits) -> Database | None:
        """Open the database of responses, files and batches, None if the deployment stores none. Raises StoreError."""

    def load(self, config: AppConfig, workers: FairWorkers) -> LoadedModel:
        """Load a model; blocks. Raises ValueError and OSError for one that cannot be served."""

    def broadcast(self, config: AppConfig, model: str, label: str) -> Broadcast:
        """Return calls to a model's replicas, and to all ingresses. ``label``: its name, "" if it is the only one."""

    def core(self, config: AppConfig) -> RoutingCore:
        """Return a model's router in this process."""

    def source(
        self, config: AppConfig, core: RoutingCore, dispatcher: Callable[..., Dispatcher], charge: Charge
    ) -> TokenSource:
        """Return where a model's tokens come from. ``dispatcher``: makes one for the model's replicas."""


@dataclass
class InServe:
    """A process in Ray Serve. ``args``: the settings of Serve's own routers; ``handles``: of each model's replicas."""

    args: AppConfig
    handles: Sequence[DeploymentHandle]

    def __post_init__(self) -> None:
        context = serve.get_replica_context()
        self._app_name, self.name = context.app_name, context.replica_id.unique_id
        self._receiver = TokenReceiver(ray.util.get_node_ip_address())
        self._caller = ray.get_runtime_context().get_actor_name() or ""
        if not os.environ.get(CALLBACK):
            logger.warning("no bounds of slow clients, and headers can steer Ray: set %s=%s", CALLBACK, CLIENT_HEADERS)
        self._args = self.args.served()
        self._handles = dict(zip(self._args, self.handles, strict=True))

    def secret(self, config: AppConfig) -> bytes:
        """See ``Outside``."""
        return load_secret(secret_file=config.secret_file)

    def tracer(self, config: AppConfig) -> Tracer | None:
        """See ``Outside``."""
        return open_tracer(config.otlp_endpoint, "ingress", self.name)

    def close(self) -> None:
        """See ``Outside``."""
        self._receiver.close()

    async def database(self, config: AppConfig, bounds: StorageLimits) -> Database | None:
        """See ``Outside``."""
        budgets = any(tenant.budget is not None for tenant in config.tenants)
        stores = config.store_responses or config.files_max_bytes or budgets or config.require_tenants
        if not (stores or config.operator_key_sha256):
            return None
        url, given = os.environ.get(URL_VARIABLE), config.responses_file
        if not url and given is None and not await asyncio.to_thread(on_head_node):
            logger.warning(
                "no responses, files and batches are stored: this ingress is not on Ray's head node, so others would "
                f"not find them; set ${URL_VARIABLE} to a Redis or Postgres, or store_responses to false and "
                "files_max_bytes to 0"
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

    def load(self, config: AppConfig, workers: FairWorkers) -> LoadedModel:
        """See ``Outside``."""
        return LoadedModel.load(config, load_served_model(config), workers)

    def broadcast(self, config: AppConfig, model: str, label: str) -> Broadcast:
        """See ``Outside``."""
        return Broadcast(self._handles[model], self._app_name, config.ingress_replicas, label)

    def core(self, config: AppConfig) -> RoutingCore:
        """See ``Outside``."""
        core = core_for(self._key(config), RouterSettings.from_json(self._args[config.model_name].routing()))
        core.configure(RouterSettings.from_json(config.routing()))
        return core

    def source(
        self, config: AppConfig, core: RoutingCore, dispatcher: Callable[..., Dispatcher], charge: Charge
    ) -> TokenSource:
        """See ``Outside``."""
        handle = self._handles[config.model_name]
        return dispatcher(
            handle,
            core,
            decisions=decisions_for(self._key(config)),
            caller=self._caller,
            inbox=self._receiver.inbox,
            left=Aborts(handle, charge).note,
        )

    def _key(self, config: AppConfig) -> str:
        return deployment_key(self._app_name, self._handles[config.model_name].deployment_name)
