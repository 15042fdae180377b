"""The ingress as a Serve deployment: its HTTP application, and the methods that other ingresses call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from router.protocol.samples import Sample
from router.protocol.version import VERSION_METADATA, WIRE_VERSION
from serve_app.checkpoints.adapter_registry import AdapterEntry
from serve_app.fairness.levels import LevelAnswer, LevelQuestion
from serve_app.live.journal import RequestRow
from serve_app.live.live import Batch
from serve_app.live.tally import Bucket
from serve_app.logs import log_at_once
from serve_app.prompts.registry import Cutovers
from serve_app.reconfigure import LiveSettings
from serve_app.traffic.recording_key import KeyOffer
from serve_app.usage import UsageRows

if TYPE_CHECKING:
    from serve_app.ingress.prompts import PromptReport, Warm

logger = logging.getLogger(__name__)


@serve.ingress()
class Ingress:
    """One ingress replica, and so one router for each model. Calls about one of several models end with its name."""

    async def __init__(self, config: dict[str, Any], *replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        log_at_once()
        do_without_torch()
        # Imported only here: deploying an ingress imports this class, and should not wait for transformers.
        from serve_app.ingress.assembly import make_address
        from serve_app.ingress.outside import InServe

        self._live = await LiveSettings.start(config)
        self._address = await make_address(self._live.config, InServe(self._live.args, replicas))
        if self._address.tenants.open:
            logger.warning("no tenants are configured: every client of this port is the tenant `default`")

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply other settings while requests run. Serve calls this; ``LiveSettings`` handles invalid settings."""
        if not await self._live.reconfigure(user_config, self._address.configure):
            self._address.metrics.add("warmpath_refused_configurations_total")
        self._address.refused_settings = self._live.why

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the HTTP application; Serve calls this after the constructor."""
        from serve_app.ingress.routes.application import make_application

        return make_application(self._address)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Advertise the version of the methods below to the other ingresses (read by ``Broadcast``)."""
        return {VERSION_METADATA: WIRE_VERSION}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress' figures for the autoscaling policy; with autoscaling, Serve calls this every second."""
        return self._address.scaling_figures()

    async def stop(self, timeout_s: float) -> int:
        """Refuse new requests, wait for running answers, and end the late ones; return the number of those."""
        return await self._address.stop(timeout_s)

    async def merge_adapters(self, entries: list[AdapterEntry], model: str = "") -> None:
        """Merge another ingress' entries of adapters."""
        if self._address.has(model):
            self._address.labelled(model).adapters.merge(entries)

    async def known_adapters(self, model: str = "") -> tuple[AdapterEntry, ...]:
        """Return this ingress' entries of adapters, for a newly started ingress."""
        return self._address.labelled(model).adapters.entries() if self._address.has(model) else ()

    async def reload_prompts(self, model: str = "") -> str:
        """Reload the prompt directory; return its problem, or ""."""
        return await self._address.labelled(model).prompt_admin.reload()

    async def prompts_heard(self, warm: list[Warm], model: str = "") -> bool:
        """Wait until this ingress' router knows the holders of warm prompts; return whether it does in time."""
        return await self._address.labelled(model).prompt_admin.warmer.heard(warm)

    async def exchange_cutovers(self, cutovers: Cutovers, model: str = "") -> Cutovers:
        """Apply another ingress' cut-overs of prompts if they are newer; return the resulting state here."""
        if not self._address.has(model):
            return cutovers
        return await self._address.labelled(model).prompt_admin.exchange(cutovers)

    async def prompt_report(self, model: str = "") -> PromptReport:
        """Return the usage of prompts at this ingress."""
        return self._address.labelled(model).prompt_admin.traffic.report()

    async def usage(self, first_day: str, last_day: str, tenant: str | None) -> tuple[str, UsageRows]:
        """Return the usage in this ingress' file; the ingress that serves /v1/usage calls this."""
        return await self._address.usage.here(first_day, last_day, tenant)

    async def keeps_tenants(self) -> bool:
        """Return whether this ingress has a database of tenants and keys; one that changes them calls this."""
        return self._address.registry.has_database

    async def tenant_level(self, question: LevelQuestion) -> LevelAnswer:
        """Return what a tenant has at this ingress; one that may be over a limit calls this."""
        return self._address.limits.levels.told(question)

    async def close_sessions(self, tenant: str, names: Sequence[str]) -> None:
        """End a tenant's sessions of some names in this ingress' limit; the ingress that closes them calls this."""
        self._address.session_limit.close(tenant, names)

    async def exchange_recording_key(self, offer: KeyOffer) -> KeyOffer | None:
        """Compare keys of a recording of traffic; an ingress that records calls this."""
        return self._address.traffic_log.exchange(offer)

    async def recent_events(self, numbers: dict[str, int], model: str = "") -> Batch:
        """Return this ingress' events since ``numbers``; an ingress with watchers calls this every second."""
        return self._address.labelled(model).live.recent(numbers)

    async def tenant_counts(self, windows_s: Sequence[int]) -> list[dict[str, Bucket]]:
        """Return what tenants sent through this ingress; the ingress that serves /v1/tenants/stats calls this."""
        from serve_app.ingress.documents import tenant_counts

        return tenant_counts(self._address, windows_s)

    async def tenant_requests(self, tenant: str) -> list[RequestRow]:
        """Return a tenant's latest requests at this ingress; the ingress that lists them calls this."""
        return self._address.journal.of(tenant)

    async def named_samples(self) -> tuple[str, list[Sample]]:
        """Return this ingress' name and samples; the ingress that serves /metrics calls this."""
        from serve_app.ingress.documents import samples_here

        return self._address.name, samples_here(self._address)


def do_without_torch() -> None:
    """Hide torch from transformers, unless it is loaded: a tokenizer does not need its 200 MB and seconds of import."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python documents None as "not found"
