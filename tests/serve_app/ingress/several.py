"""An ingress in this process with several models, each with a script and, for its router, one replica."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
from ray.serve.handle import DeploymentHandle

from router.core import RoutingCore
from router.settings import RouterSettings
from serve_app.api.anthropic.history import MessageHistory
from serve_app.api.openai.response import model_body
from serve_app.budgets import Budgets
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig, deployment_of
from serve_app.engine.protocol import AdapterSpec
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.batches import BatchDesk
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.completions import Completions
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.models import Models
from serve_app.ingress.observe.answer_meter import Observers
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.reports import SessionList, Shared
from serve_app.ingress.routes.application import make_application
from serve_app.ingress.services import Access, Catalog, Fleet, Records, Services
from serve_app.ingress.tenant_admin import TenantAdmin
from serve_app.live.journal import Journal
from serve_app.prompts.registry import PromptTraffic
from serve_app.stored.objects import StoredObjects
from serve_app.stored.responses import StoredResponses
from serve_app.stored.url import open_database
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.usage import Ledger, Ledgers
from tests.serve_app.ingress.scripted import BOUNDS, Script, observed

SECRET = b"s" * 32


@dataclass
class Checkpoint:
    """What is read once of a checkpoint that all models have."""

    path: Path
    tokenizer: PromptTokenizer = field(init=False)
    readers: AnswerReaders = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = PromptTokenizer(self.path)
        self.readers = AnswerReaders(self.tokenizer, "auto")
        self.info = load_checkpoint_info(self.path)


class Several:
    """The ingress. ``scripts``: of each model; ``adapters``: those of each, with their tenants."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: AppConfig,
        adapters: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
    ) -> None:
        shares, drain, metrics = Shares({}), Drain(), IngressMetrics()
        tenants = Tenants(
            config.tenants, SECRET, operator_key_sha256=config.operator_key_sha256, aliases=config.aliases
        )
        limits = TenantLimits(config.tenants)
        journal, tables = Journal(lambda: len(tenants.by_name)), Shared()
        told = Observers(refused=[metrics.refused, journal.refused])
        guard = RouteGuard(tenants, metrics, drain, limits, observers=told)
        workers = FairWorkers(shares)
        entrance = FrontDoor(shares, places=lambda: 1, max_waiting=64, max_bytes=1 << 26, limits=limits)
        handle = cast(DeploymentHandle, SimpleNamespace(deployment_name="Replica"))
        self.models = Models(config, entrance, metrics, Broadcast(handle, "app", 1))
        self.scripts: dict[str, Script] = {}
        self._folder = TemporaryDirectory()
        self.folder = Path(self._folder.name)
        database = open_database(None, self.folder / "responses.sqlite", BOUNDS)
        stored = StoredResponses(database, SECRET, workers, BOUNDS)
        history, ledger = MessageHistory(), Ledger(None, 16)
        budgets = Budgets(config.tenants, config.prices, StoredObjects(database, SECRET, workers, BOUNDS))
        ledger.heard.append(budgets.count)
        limits.checks.append(budgets.check)
        metrics.more.append(budgets.samples)
        objects = StoredObjects(database, SECRET, workers, BOUNDS)
        self.batches = BatchDesk(objects, "ingress", lambda: tenants.by_name)
        self.registry = TenantRegistry(objects, config)
        admin = TenantAdmin(self.registry, Broadcast(handle, "app", 1))
        usage = Ledgers.__new__(Ledgers)  # without its regular writes, which need a loop
        usage._ledger, usage._ingresses = ledger, AsyncMock(return_value=[])
        for name, own in config.served().items():
            script = self.scripts[name] = Script(checkpoint.tokenizer, f"I am {name}.")
            registry = AdapterRegistry(name)
            registry.merge(
                AdapterEntry(adapter, AdapterSpec(adapter, "0" * 16, f"/adapters/{adapter}"), users)
                for adapter, users in (adapters or {}).get(name, {}).items()
            )
            counts = IngressMetrics()
            door = FrontDoor(
                shares,
                places=lambda: 8,
                max_waiting=own.max_queued_requests,
                max_bytes=1 << 26,
                limits=limits,
                starting=lambda own=own, name=name: (  # type: ignore[misc]
                    not self.core(name).replica_ids and own.first_replicas == 0
                ),
            )
            core = RoutingCore("router", RouterSettings.from_json(own.routing()))
            core.update_replicas([f"replica-of-{name}"])
            preparer = Preparer(
                checkpoint.info, checkpoint.tokenizer, tenants, SECRET, registry, Limits(4096, 64), workers=workers
            )
            completions = Completions(
                own, preparer, script, checkpoint.tokenizer, checkpoint.readers, observed(counts, door, None, ledger),
                counts, door,
                workers, drain, entrance, self.models.choose,
            )  # fmt: skip
            completions.observers.refused.append(journal.refused)
            replica = cast(DeploymentHandle, SimpleNamespace(deployment_name=deployment_of(name, config)))
            broadcast = Broadcast(replica, "app", 1, name)
            live = SimpleNamespace(watchers=0, snapshot=AsyncMock(return_value={"model": name}))
            self.models.served[name] = Services(
                own,
                "app",
                "ingress",
                Access(tenants, guard, shares, limits, budgets, door, drain, admin),
                Catalog(
                    model_body(name, int(time.time()), 4096), checkpoint.tokenizer, preparer, registry,
                    AdapterAdmin(own, registry, AsyncMock(return_value=[]), AsyncMock(), self.models.taken),
                    cast(Any, SimpleNamespace(replace=AsyncMock())),
                    cast(Any, SimpleNamespace(traffic=PromptTraffic())),
                ),
                Fleet(
                    core, broadcast, cast(Any, None), cast(Any, SimpleNamespace(done=lambda: True)),
                    SessionList(AsyncMock(return_value=[{"replica": f"replica-of-{name}", "rows": []}])),
                ),
                Records(counts, cast(Any, live), usage, history, journal, tables, None, stored, self.batches),
                completions,
                several=self.models,
            )  # fmt: skip
        admin.changed = self.models.first.tenants_changed
        self.application = make_application(self.models.first)

    def core(self, name: str) -> RoutingCore:
        """Return a model's router."""
        return self.models.served[name].fleet.core

    @property
    def asked(self) -> dict[str, int]:
        """The number of generations of each model that was asked for any."""
        return {name: len(script.asked) for name, script in self.scripts.items() if script.asked}

    async def ask(self, path: str, body: Any = None, key: str = "") -> httpx.Response:
        """Send a request, GET without a body."""
        transport = httpx.ASGITransport(self.application)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request("GET" if body is None else "POST", path, json=body, headers=headers)
