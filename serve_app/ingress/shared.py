"""What all models of an address share: who may ask and how much, what is counted and kept, and the other ingresses."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.api.anthropic.history import MessageHistory
from serve_app.budgets import Budgets
from serve_app.config.app import AppConfig
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.ingress.broadcast import Broadcast
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.observe.answer_meter import Observers
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.reports import SharedAnswers
from serve_app.ingress.observe.traffic import TrafficObserver
from serve_app.ingress.outside import Outside
from serve_app.ingress.tenant_admin import TenantAdmin
from serve_app.live.journal import Journal
from serve_app.sessions import SessionLimit
from serve_app.stored.responses import StoredResponses
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenants import Tenants
from serve_app.tracing import Tracer
from serve_app.usage import Ledger, Ledgers

BODIES = 8
"""The number of bodies of maximum size that an ingress holds before admission, over all tenants."""


@dataclass(eq=False, kw_only=True)
class Shared:
    """The parts. ``stored``, ``objects`` None: no responses, no files and batches are stored."""

    config: AppConfig
    """All settings in force."""
    outside: Outside
    name: str
    """Of this ingress."""
    secret: bytes
    tenants: Tenants
    tenant_admin: TenantAdmin
    guard: RouteGuard
    shares: Shares
    limits: TenantLimits
    session_limit: SessionLimit
    budgets: Budgets
    workers: FairWorkers
    drain: Drain
    metrics: IngressMetrics
    """Counts what chose no model; the only model of a deployment without ``models`` counts there too."""
    observers: Observers
    """Of what chose no model."""
    broadcast: Broadcast
    """To all ingresses."""
    ledger: Ledger
    usage: Ledgers
    history: MessageHistory
    journal: Journal
    traffic: TrafficObserver
    tracer: Tracer | None
    stored: StoredResponses | None
    tables: SharedAnswers = field(default_factory=SharedAnswers)
    """Of tenants, as last told."""

    @property
    def several(self) -> bool:
        """Whether the deployment names its models: clients choose one, and figures have its name."""
        return bool(self.config.models)

    @property
    def registry(self) -> TenantRegistry:
        """The tenants of the settings and of the database."""
        return self.tenant_admin.registry
