"""The HTTP front door as a Serve deployment: its application, and the methods that other ingresses call."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from router.protocol.samples import Sample
from serve_app.checkpoints.adapter_registry import AdapterEntry
from serve_app.live.others import Batch
from serve_app.prompts.cutover import Cutovers
from serve_app.reconfigure import LiveSettings
from serve_app.usage.report import Rows

if TYPE_CHECKING:
    from serve_app.ingress.prompts.admin import Report
    from serve_app.ingress.prompts.warming import Warm


@serve.ingress()
class Ingress:
    """One ingress replica, and so one router."""

    async def __init__(self, config: dict[str, Any], replica: DeploymentHandle) -> None:  # type: ignore[misc]
        do_without_torch()
        # Only here: whoever deploys an ingress imports this class, and need not wait for transformers.
        from serve_app.ingress.assembly import make_services

        self._live = await LiveSettings.start(config)
        self._services = await make_services(self._live.config, self._live.args, replica)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take other settings while requests run (Serve calls it; ``LiveSettings`` says what happens to bad ones)."""
        if not await self._live.reconfigure(user_config, self._services.configure):
            self._services.metrics.refused_configurations.inc()
        self._services.refused_settings = self._live.why

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return what answers HTTP; Serve asks for it once the constructor is done."""
        from serve_app.ingress.routes.application import make_application

        return make_application(self._services)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy needs of this ingress; Serve asks every second where that is on."""
        return self._services.autoscaling_stats()

    async def stop(self, timeout_s: float) -> int:
        """Refuse requests, wait for answers under way, end those that take longer; returns how many those were."""
        self._services.live.close()
        ended = await self._services.drain.run(timeout_s)
        self._services.receiver.close()
        await self._services.usage.flush()
        if self._services.tracer is not None:
            await asyncio.to_thread(self._services.tracer.close)
        return ended

    async def merge_adapters(self, entries: list[AdapterEntry]) -> None:
        """Take in what another ingress knows of adapters."""
        self._services.adapters.merge(entries)

    async def known_adapters(self) -> tuple[AdapterEntry, ...]:
        """Say which adapters this ingress knows, to one that has just started."""
        return self._services.adapters.entries()

    async def reload_prompts(self) -> str:
        """Read the directory of prompts again; returns what is wrong with it, or ""."""
        return await self._services.prompt_admin.reload()

    async def prompts_heard(self, warm: list[Warm]) -> bool:
        """Return whether this ingress' router knows who holds warm prompts, once it does or the time is over."""
        return await self._services.prompt_admin.warmer.heard(warm)

    async def exchange_cutovers(self, cutovers: Cutovers) -> Cutovers:
        """Take in what another ingress lets names of prompts mean, where it is newer; say what they mean here then."""
        return await self._services.prompt_admin.exchange(cutovers)

    async def prompt_report(self) -> Report:
        """Say how prompts are used here."""
        return self._services.prompt_admin.traffic.report()

    async def usage(self, first_day: str, last_day: str, tenant: str | None) -> tuple[str, Rows]:
        """What this ingress' file says was used; called by whichever ingress is asked for /v1/usage."""
        return await self._services.usage.here(first_day, last_day, tenant)

    async def recent_events(self, numbers: dict[str, int]) -> Batch:
        """What was decided here since; called once a second by an ingress that somebody watches."""
        return self._services.live.recent(numbers)

    async def named_samples(self) -> tuple[str, list[Sample]]:
        """This ingress' name and samples; called by whichever ingress is asked for /metrics."""
        return self._services.name, self._services.samples()


def do_without_torch() -> None:
    """Hide torch from transformers, unless it is loaded: a tokenizer alone needs no 200 MB and seconds of it."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's own way to say "not to be found"
