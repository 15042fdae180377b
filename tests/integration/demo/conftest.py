"""One instance of a real model for this folder: tenants, adapters, prompts; two replicas and two ingresses."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.server import instance
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.prompts.lock import PromptDirectory
from serve_app.tenants import make_api_key
from tests.integration.conftest import HTTP, PATIENCE_S, alone, replicas_of, wait_until_cached

CHAT = "/v1/chat/completions"
INGRESSES = 2
NAMES = (
    *("acme", "globex", "initech", "initrode", "passing", "narrow", "limited", "seated", "expired", "revoked"),
    "operator",
)
KEYS = {name: make_api_key() for name in NAMES}
RULES = "You advise on berths and tides. Name the ship before any advice, and the hour after it. " * 6
"""A public prompt."""


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


@dataclass(frozen=True, slots=True)
class Served:
    """The instance, for its tenants and its operator. ``root``: the folder of its adapters and prompts."""

    url: str
    root: Path

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {KEYS[name][0]}"}

    def openai(self, name: str = "acme") -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=KEYS[name][0], max_retries=0, timeout=PATIENCE_S, http_client=HTTP
        )

    def get(self, path: str, name: str) -> httpx.Response:
        return HTTP.get(self.url + path, headers=self.headers(name))

    def post(self, path: str, name: str, **body: object) -> httpx.Response:
        return HTTP.post(self.url + path, headers=self.headers(name), json=body)

    def chat(self, name: str, *messages: tuple[str, str], **body: object) -> tuple[int, int, str]:
        """Return the prompt tokens, the cached ones among them, and the answer."""
        wanted = {"model": "demo", "max_tokens": 4, "temperature": 0, "messages": said(*messages), **body}
        answer = self.post(CHAT, name, **wanted).raise_for_status().json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, answer["choices"][0]["message"]["content"]

    def wait_until_held(self, name: str, tokens: int, *messages: tuple[str, str], **body: Any) -> None:
        """Wait until both routers know that a replica holds this much of a tenant's prompt."""
        asked = {"model": "demo", "tenant": name, "messages": said(*messages), **body}
        wait_until_cached(self.url, asked, tokens, self.headers("operator"), INGRESSES)

    def replicas(self) -> dict[str, dict[str, Any]]:
        return replicas_of(self.url, self.headers("operator"))


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model in float32 with one preloaded adapter; ``root`` has more, and versions of two prompts."""
    root, model = tmp_path_factory.mktemp("served"), ensure_demo_model("demo")
    for spec, name in zip(make_adapters(model, root, 3), ("pirate", "poet", "judge"), strict=True):
        Path(spec.path).rename(root / name)
    shelf, file = PromptDirectory(root / "prompts"), root / "prompt.txt"
    for ref, tenant in (("clerk@1", None), ("clerk@2", None), ("pilot@1", "acme")):
        file.write_text(f"You are {ref}. " * 60)
        shelf.add(ref, file, tenant)
    keys = {name: key[1] for name, key in KEYS.items()}
    ended = [
        {"sha256": keys["expired"], "expires": "2001-01-01T00:00:00Z"},
        {"sha256": keys["revoked"], "revoked": True},
    ]
    tenants: list[dict[str, Any]] = [
        {"name": "acme", "key_sha256": [keys["acme"]]},
        {"name": "globex", "key_sha256": [keys["globex"], *ended]},
        {"name": "initech", "key_sha256": [keys["initech"]], "trust_group": "init"},
        {"name": "initrode", "key_sha256": [keys["initrode"]], "trust_group": "init"},
        {"name": "passing", "key_sha256": [keys["passing"]], "store_kv": False},
        {"name": "narrow", "key_sha256": [keys["narrow"]], "models": ["pirate"]},
        {"name": "limited", "key_sha256": [keys["limited"]], "concurrent_requests": 1},
        {"name": "seated", "key_sha256": [keys["seated"]], "concurrent_sessions": 2},
    ]
    settings = {
        "model": "demo",
        "dtype": "float32",
        "kv_cache_bytes": 128 * 1024 * 1024,
        "ingress_replicas": INGRESSES,
        "tenants": tenants,
        "operator_key_sha256": [keys["operator"]],
        "public_prompts": [{"name": "rules", "version": "2", "text": RULES}],
        "prompts_dir": str(root / "prompts"),
        "usage_file": str(root / "usage.sqlite"),
        "responses_file": str(root / "responses.sqlite"),
        "pin_budget": 300,
        "lora_adapters": {"pirate": str(root / "pirate")},
        "lora_root": str(root),
        "allow_runtime_lora": True,
        "traffic_log": {"path": str(root / "traffic.jsonl")},
    }
    (root / "settings.yaml").write_text(yaml.safe_dump(settings))
    with alone(instance("--config", str(root / "settings.yaml"))) as url:
        yield Served(url, root)
