"""Ray Serve LLM with two real vLLM replicas on CPUs, deployed from the example's file, with an adapter in S3."""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.common.random_adapters import make_adapters
from benchmarks.peers.ray_llm import ENGINE, SECRET, RayLlm, ray_llm
from serve_app.ray_llm.scopes import Scopes
from tests.vllm.marks import mark

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_serve_llm.yaml"
BUCKET = "adapters"
ADAPTER = "demo:adapter-0"
OPERATOR = "operator of these tests"
HOST_MEMORY = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "CpuMemory", "spec_module_path": "benchmarks.common.cpu_memory", "cpu_bytes_to_use": 96 << 20}
}  # fmt: skip
"""What `kv_offloading_size` means on a GPU; only the copies are other ones, since vLLM's need its streams."""

if any(importlib.util.find_spec(name) is None for name in ("vllm", "pyarrow", "moto")):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)


@dataclass
class LlmApp:
    """A deployed application, as its clients and its operator use it. A tenant's name is its key too."""

    ray: RayLlm
    document: dict[str, Any]
    scopes: Scopes

    def chat(self, text: str, tenant: str = "a", **more: Any) -> dict[str, Any]:
        """Return the answer to a chat with the system prompt ``text``."""
        body = chat_body(text, **more)
        url = f"{self.ray.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=key_of(tenant), timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cache(self, path: str, key: str = OPERATOR, body: dict[str, Any] | None = None) -> httpx.Response:
        """Return the answer of the application beside Ray's. ``body``: a chat to explain."""
        url, method = f"{self.ray.url}/cache/{path}", "POST" if body else "GET"
        return httpx.request(method, url, json=body, headers=key_of(key), timeout=60)

    def explain(self, text: str, tenant: str = "a", **more: Any) -> dict[str, Any]:
        """Return the operator's explanation of that chat."""
        body = {**chat_body(text, **more), "tenant": self.scopes.tenant_in(key_of(tenant))}
        answer = self.cache("v1/cache/explain", body=body)
        (found,) = answer.json()["prompts"]
        explained: dict[str, Any] = found
        return explained

    def state(self) -> dict[str, Any]:
        """Return the state of the router beside Ray's; empty while it is missing."""
        answer = self.cache("v1/cache/state")
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


@pytest.fixture(scope="session", params=["standard", "direct"])
def app(request: pytest.FixtureRequest, demo_model_path: Path) -> Iterator[LlmApp]:
    """The example's file with the demo model on CPUs, on each of Ray's paths; the direct one has host memory."""
    document = yaml.safe_load(EXAMPLE.read_text())
    llm, beside = (application["args"] for application in document["applications"])
    (config,) = llm["llm_configs"]
    beside["deployment"] = "WarmLLMServer:demo"
    config["model_loading_config"] = {"model_id": "demo", "model_source": str(demo_model_path)}
    config["accelerator_config"] = {"kind": "cpu"}
    config["lora_config"] = {"dynamic_lora_loading_path": f"s3://{BUCKET}"}
    config["deployment_config"]["ray_actor_options"] = {"num_cpus": 0.1}
    config["engine_kwargs"] = {
        **ENGINE,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 200,
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    if request.param == "direct":
        config["engine_kwargs"]["kv_transfer_config"] = HOST_MEMORY
    with (
        pytest.MonkeyPatch.context() as patched,
        adapters_in_s3(demo_model_path) as s3,
        ray_llm(
            document,
            "/cache/v1/cache/events?once=true",
            direct=request.param == "direct",
            WARMPATH_OPERATOR_KEY=OPERATOR,
            **s3,
        ) as ray,
    ):
        patched.setenv("WARMPATH_SECRET", SECRET["WARMPATH_SECRET"])
        yield LlmApp(ray, document, Scopes("demo", "authorization"))


@contextmanager
def adapters_in_s3(model: Path) -> Iterator[dict[str, str]]:
    """The place where Ray finds one adapter: a bucket of an S3 server on this machine."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        access = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        with tempfile.TemporaryDirectory() as folder:
            (spec,) = make_adapters(model, Path(folder), 1, rank=4)
            client = boto3.client(
                "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1",
                aws_access_key_id="test", aws_secret_access_key="test",
            )  # fmt: skip
            client.create_bucket(Bucket=BUCKET)
            for file in Path(spec.path).iterdir():
                client.upload_file(str(file), BUCKET, f"{Path(spec.path).name}/{file.name}")
        yield {**access, "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}"}
    finally:
        server.stop()
