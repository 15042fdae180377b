"""An ingress' concurrency limit, its reaction to other settings, and data that its process frees."""

import asyncio
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # what an ingress has to do without

from serve_app.config.app import AppConfig
from serve_app.errors import InvalidRequest
from serve_app.ingress.assembly import make_address
from serve_app.ingress.model import about, places
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.eventually import let_others_run, until
from tests.serve_app.ingress.scripted import ReadCheckpoint, ScriptedOutside
from tests.serve_app.ingress.several import Several
from tests.serve_app.ingress.test_models import CHAT, config_of, key_of, tenants

SAID = "Say \u00fc."
INGRESS = f"""
import json, sys
from pathlib import Path
from serve_app.ingress.ingress import do_without_torch
do_without_torch()
import serve_app.ingress.routes.application
from serve_app.ingress.assembly import return_large_buffers
returned = return_large_buffers()
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024
before = resident()
kept = []
for round in range(8):
    large = [bytes(bytearray(b"x" * (6 << 20))) for _ in range(6)]
    kept.append(bytes(64 << 10))
    del large
grown_mib = resident() - before
from serve_app.tokenization.tokenizer import PromptTokenizer
tokenizer = PromptTokenizer(Path(sys.argv[1]))
text = tokenizer.template.render([{{"role": "user", "content": {SAID!r}}}]).text
ids = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
modules = sum(name.startswith("torch") for name in sys.modules)
print(json.dumps(dict(returned=returned, grown_mib=grown_mib, text=text, ids=ids, modules=modules)))
"""


@pytest.fixture(scope="module")
def ingress(demo_model_path: Path) -> dict[str, Any]:
    """What a process with an ingress' modules says."""
    command = [sys.executable, "-c", INGRESS, str(demo_model_path)]
    said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return said


def test_ingresses_divide_the_replicas_capacity() -> None:
    """At most half as many as run there may wait there; replicas that have not started count, and so do new ones."""
    config = AppConfig(replicas=2, max_num_seqs=64)
    assert places(config, 0) == places(config, 2) == 2 * 96
    assert places(config, 3) == 3 * 96
    assert places(config.model_copy(update={"ingress_replicas": 4}), 2) == 48
    assert places(config.model_copy(update={"max_waiting_requests": 8}), 2) == 2 * 72
    assert places(AppConfig(replicas=1, max_num_seqs=1, ingress_replicas=64), 1) == 1


def test_watchers_learn_whether_requests_need_a_tenants_key() -> None:
    """An operator's page without a key in it, behind a proxy that adds one, cannot chat then."""
    closed = AppConfig.model_validate({"tenants": [{"name": "acme", "key_sha256": ["a" * 64]}]})
    assert [about(config)["keys"] for config in (AppConfig(), closed)] == [False, True]


def test_adapters_are_for_the_current_tenants(demo_model_path: Path) -> None:
    """An adapter can be restricted to a tenant added while the ingress runs, but not to a removed one."""

    def config(name: str) -> AppConfig:
        tenants = [{"name": name, "key_sha256": ["a" * 64]}]
        return AppConfig.model_validate({"allow_runtime_lora": True, "tenants": tenants})

    async def run() -> None:
        address = await make_address(config("acme"), ScriptedOutside(ReadCheckpoint(demo_model_path)))
        await address.configure(config("zeta"))
        for name, reason in (("zeta", "no adapter_model.safetensors"), ("acme", "no tenant 'acme'")):
            body = b'{"lora_name": "a", "lora_path": "/nowhere", "tenants": ["%b"]}' % name.encode()
            with pytest.raises(InvalidRequest, match=reason):
                await address.first.adapter_admin.load(body)

    asyncio.run(run())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_buffers_go_back_to_the_system(ingress: dict[str, Any]) -> None:
    """Eight rounds of 36 MiB each leave a small buffer above the freed memory, but all of that is returned."""
    assert ingress["returned"] and ingress["grown_mib"] < 6


def test_an_ingress_tokenizes_without_torch(ingress: dict[str, Any], demo_model_path: Path) -> None:
    """Chat template and token ids are those of this process, which has torch."""
    tokenizer = PromptTokenizer(demo_model_path)
    text = tokenizer.template.render([{"role": "user", "content": SAID}]).text
    assert ingress["text"] == text
    assert ingress["ids"] == tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    assert ingress["modules"] == 1 < sum(name.startswith("torch") for name in sys.modules)


def test_advice_waits_for_each_tenant_that_there_is_now(demo_model_path: Path) -> None:
    """Also for one that was added while the ingress runs."""
    checkpoint = ReadCheckpoint(demo_model_path)

    async def run() -> None:
        several = await Several.open(checkpoint, config_of("m0", tenants=tenants(acme=None)))
        await several.address.configure(config_of("m0", tenants=tenants(acme=None, globex=None)))
        misses = several.models["m0"].metrics.values

        async def ask(tenant: str, day: int) -> str:
            system = f"Today is 2026-11-{day}. {'Answer kindly, and in full sentences. ' * 60}"
            body = {"model": "m0", "max_tokens": 5, "system": system, "messages": CHAT["messages"]}
            answer = await several.ask("/v1/messages", body, key_of(tenant))
            assert answer.status_code == 200
            return str(answer.headers.get("x-warmpath-advice", ""))

        def explained(tenant: str) -> float:
            counts = ((name, dict(labels), number) for (name, labels), number in misses.items())
            return sum(n for name, of, n in counts if name == "warmpath_cache_misses_total" and of["tenant"] == tenant)

        async def miss(tenant: str) -> None:
            for day in (21, 22):
                assert not await ask(tenant, day)
            await until(lambda: explained(tenant) == 2)
            await let_others_run(3)  # the explanation's task tells of its end

        await miss("acme")
        await miss("globex")
        for tenant in ("acme", "globex"):
            assert "a date or time changes" in await ask(tenant, 22), tenant

    asyncio.run(run())
