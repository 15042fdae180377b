"""An address in this process with several models, each with a script and, for its router, one replica."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from router.core import RoutingCore
from serve_app.config.app import AppConfig
from serve_app.ingress.address import Address
from serve_app.ingress.assembly import make_address
from serve_app.ingress.model import Model
from serve_app.ingress.routes.application import make_application
from serve_app.stored.url import open_database
from serve_app.tenancy.registry import TenantRegistry
from tests.serve_app.ingress.scripted import BOUNDS, ReadCheckpoint, ScriptedOutside


class Several:
    """The address, made by ``open``. ``scripts``: of each model."""

    def __init__(self, address: Address, outside: ScriptedOutside, folder: TemporaryDirectory[str]) -> None:
        self.address, self.scripts, self._folder = address, outside.scripts, folder
        self.folder = Path(folder.name)
        self.application = make_application(address)

    @classmethod
    async def open(
        cls,
        checkpoint: ReadCheckpoint,
        config: AppConfig,
        adapters: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
        **outside: Any,
    ) -> Several:
        """Open an address. ``adapters``: those of each model, with their tenants; ``outside``: more of that."""
        folder = TemporaryDirectory()
        database = open_database(None, Path(folder.name) / "responses.sqlite", BOUNDS)
        texts = {name: f"I am {name}." for name in config.served()}
        scripted = ScriptedOutside(checkpoint, database, adapters or {}, texts, **outside)
        return cls(await make_address(config, scripted), scripted, folder)

    @property
    def models(self) -> dict[str, Model]:
        """The served models by name."""
        return self.address.models

    @property
    def registry(self) -> TenantRegistry:
        """The tenants of the settings and of the database."""
        return self.address.registry

    def core(self, name: str) -> RoutingCore:
        """Return a model's router."""
        return self.models[name].core

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
