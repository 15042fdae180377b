"""What an ingress may have under way at the replicas, and who hears of other settings."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.config.app import AppConfig
from serve_app.errors import InvalidRequest
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.assembly import places
from serve_app.ingress.services import Services


def test_ingresses_divide_what_the_replicas_take() -> None:
    """Half as many as run may wait there, if so many may; replicas that are not there yet count, and new ones too."""
    config = AppConfig(replicas=2, max_num_seqs=64)
    assert places(config, 0) == places(config, 2) == 2 * 96
    assert places(config, 3) == 3 * 96
    assert places(config.model_copy(update={"ingress_replicas": 4}), 2) == 48
    assert places(config.model_copy(update={"max_waiting_requests": 8}), 2) == 2 * 72
    assert places(AppConfig(replicas=1, max_num_seqs=1, ingress_replicas=64), 1) == 1


def test_adapters_are_for_the_tenants_of_now() -> None:
    """An adapter can be kept for a tenant that came while the ingress ran, and for none that has gone."""

    def config(name: str) -> AppConfig:
        return AppConfig.model_validate(
            {"allow_runtime_lora": True, "tenants": [{"name": name, "key_sha256": ["a" * 64]}]}
        )

    async def refusal(name: str) -> str:
        with pytest.raises(InvalidRequest) as refused:
            await admin.load(b'{"lora_name": "a", "lora_path": "/nowhere", "tenants": ["%b"]}' % name.encode())
        return refused.value.message

    async def run() -> None:
        assert "no adapter_model.safetensors" in await refusal("acme")
        await services.configure(config("zeta"))
        assert "no adapter_model.safetensors" in await refusal("zeta")
        assert "no tenant 'acme'" in await refusal("acme")

    admin = AdapterAdmin(config("acme"), AdapterRegistry("demo"), AsyncMock(), AsyncMock())
    parts: dict[str, Any] = {field.name: MagicMock() for field in fields(Services)}
    services = Services(
        **parts | {"prompts": AsyncMock(), "base_model": {"max_model_len": 4096}, "adapter_admin": admin}
    )
    asyncio.run(run())
