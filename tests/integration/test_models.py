"""Several models at one address on real Ray Serve: changes of one leave the others, and one comes back from zero."""

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anthropic import Anthropic
from openai import OpenAI
from safetensors.numpy import load_file, save_file

from benchmarks.common.prompts import text_of
from benchmarks.common.random_adapters import make_adapters
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.local_ray import answers
from tests.integration.conftest import HTTP, cache_state, eventually
from tests.integration.test_deploy import KEYS, Cluster, bearer, cluster, ray, tenant

__all__ = ["cluster", "ray"]

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8, "temperature": 0}
TORCH = {"served_model_name": "torch-demo", "num_blocks": 512}
SIMULATED = {"served_model_name": "simulated-demo", "engine": "simulated"}
SURGE = {"max_surge_percent": 50}
OPERATOR = "operator"


def args_of(*models: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return settings for models; three tenants: of both models, of the simulated one, of the other one."""
    tenants = [tenant("acme"), tenant("zeta", models=["simulated-demo", "new"])]
    return {
        "model": "demo",
        "replicas": 1,
        "replica_num_cpus": 0.1,
        "models": list(models),
        "tenants": tenants,
        "operator_key_sha256": [KEYS[OPERATOR][1]],
        **more,
    }


def deploy(cluster: Cluster, args: dict[str, Any], *told: dict[str, Any], **live: Any) -> None:
    """Deploy settings, and ``live`` ones of all deployments; ``told``: what a file says about other deployments."""
    app = {"name": "warmpath", "route_prefix": "/", "import_path": "serve_app:build_app", "args": args}
    replicas = [{"name": f"Replica-{model['served_model_name']}", "user_config": live} for model in args["models"]]
    ingress = {"name": "Ingress", **SURGE, "user_config": live}
    cluster.serve("PUT", cluster.config({**app, "deployments": [ingress, *told, *(replicas if live else ())]}))


def health(cluster: Cluster) -> dict[str, Any]:
    answer = HTTP.get(f"{cluster.url}/health", headers=bearer(OPERATOR))
    if "json" not in answer.headers["content-type"]:  # no ingress runs yet
        answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def ask(cluster: Cluster, model: str, who: str = "acme", **body: Any) -> httpx.Response:
    return cluster.chat(who, **{**CHAT, "model": model, **body})


def state(cluster: Cluster, model: str) -> dict[str, Any]:
    found: dict[str, Any] = HTTP.get(f"{cluster.url}/v1/cache/state?model={model}", headers=bearer(OPERATOR)).json()
    return found


def pids(cluster: Cluster, model: str) -> set[int]:
    return {replica["pid"] for replica in state(cluster, model)["replicas"]}


def statuses(cluster: Cluster) -> dict[str, str]:
    """Return what `serve status` says of each deployment."""
    deployments = cluster.serve("GET")["applications"]["warmpath"]["deployments"]
    return {name: deployment["status"] for name, deployment in deployments.items()}


@contextmanager
def load(cluster: Cluster, model: str, who: str = "zeta") -> Iterator[list[int | str]]:
    """Send requests of two of a tenant's clients to a model; yield the answers' statuses, with the text of refusals."""
    stop, got = threading.Event(), list[int | str]()

    def client() -> None:
        while not stop.is_set():
            try:
                answer = ask(cluster, model, who)
                got.append(200 if answer.status_code == 200 else f"{answer.status_code} {answer.text}")
            except httpx.HTTPError as error:
                got.append(repr(error))

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield got
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def doors(url: str, key: str, model: str) -> dict[str, str]:
    """Use a model by every door of both APIs' own clients; return the model that each answer names."""
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        create: Any = client.chat.completions.create
        options: dict[str, Any] = {"model": model, "max_tokens": 8}
        chat = create(messages=CHAT["messages"], **options)
        chunks = {chunk.model for chunk in create(messages=CHAT["messages"], stream=True, **options)}
        assert len(chunks) == 1
        response = client.responses.create(input="Who are you?", model=model, max_output_tokens=16)
        more = client.responses.create(
            input="And?", model=model, max_output_tokens=16, previous_response_id=response.id
        )
        assert client.responses.retrieve(response.id).output_text == response.output_text
        named = {
            "chat": chat.model,
            "stream": chunks.pop(),
            "completion": client.completions.create(prompt="I am", **options).model,
            "response": response.model,
            "continued": more.model,
            "listed": client.models.retrieve(model).id,
        }
    with Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        message = client.messages.create(model=model, max_tokens=8, messages=[{"role": "user", "content": "Hi"}])
        counted = client.messages.count_tokens(model=model, messages=[{"role": "user", "content": "Hi"}])
        assert counted.input_tokens == message.usage.input_tokens
        named["message"] = message.model
    header = {"authorization": f"Bearer {key}"}
    told = HTTP.post(f"{url}/tokenize", json={"model": model, "prompt": "Hi"}, headers=header)
    assert told.json()["count"] > 0
    return named


def test_every_door_leads_to_the_named_model(cluster: Cluster, tmp_path: Path) -> None:
    """Two engines and an adapter on one of them, by both APIs' clients and two ingresses, for tenants with lists."""
    (spec,) = make_adapters(resolve_model("demo"), tmp_path, 1)
    adapted = {**TORCH, "lora_adapters": {"pirate": spec.path}}
    deploy(cluster, args_of(adapted, SIMULATED, aliases={"gpt-4o": "simulated-demo"}, ingress_replicas=2))
    eventually(lambda: health(cluster)["replicas"] == 2, 300)
    names = {"torch-demo": "torch-demo", "pirate": "pirate", "gpt-4o": "simulated-demo"}
    for model, answering in names.items():
        named = doors(cluster.url, KEYS["acme"][0], model)
        assert named.pop("listed") == model
        assert set(named.values()) == {answering}, named
    assert set(doors(cluster.url, KEYS["zeta"][0], "gpt-4o").values()) == {"gpt-4o", "simulated-demo"}
    for model in ("torch-demo", "pirate"):
        assert ask(cluster, model, "zeta").status_code == 404
    eventually(lambda: all(pids(cluster, model) for model in ("torch-demo", "simulated-demo") for _ in range(4)))
    before = pids(cluster, "torch-demo"), pids(cluster, "simulated-demo")
    args = args_of(adapted, SIMULATED, aliases={"gpt-4o": "simulated-demo"}, ingress_replicas=2)
    change = {"served_model_name": "torch-demo", "policy": "round_robin"}
    deploy(cluster, args, models=[change], aliases={"gpt-4o": "pirate"})
    eventually(lambda: {ask(cluster, "gpt-4o").json()["model"] for _ in range(8)} == {"pirate"})
    policies = [state(cluster, model)["policy"] for model in ("torch-demo", "simulated-demo")]
    assert policies == ["round_robin", "estimated_ttft"]
    assert state(cluster, "torch-demo")["notices"]["configuration"] == []
    assert before == (pids(cluster, "torch-demo"), pids(cluster, "simulated-demo"))
    usage = HTTP.get(f"{cluster.url}/v1/usage", headers=bearer("zeta")).json()
    assert {row["model"] for row in usage["data"]} == {"simulated-demo"}
    shown = HTTP.get(f"{cluster.url}/metrics", headers=bearer(OPERATOR)).text
    pools = [line for line in shown.splitlines() if line.startswith("warmpath_kv_cache_blocks{")]
    assert {line.split('model="')[1].split('"')[0] for line in pools} == {"torch-demo", "simulated-demo"}


def test_a_model_that_cannot_start_comes_or_goes_leaves_the_others(cluster: Cluster) -> None:
    """Under load on one model: it keeps its process, and none of its requests fails."""
    deploy(cluster, args_of(TORCH, SIMULATED))
    eventually(lambda: health(cluster)["replicas"] == 2, 300)
    assert statuses(cluster).keys() == {"Ingress", "Replica-torch-demo", "Replica-simulated-demo"}
    for who, model, status in (
        ("acme", "torch-demo", 200), ("acme", "simulated-demo", 200), ("zeta", "simulated-demo", 200),
        ("zeta", "torch-demo", 404), ("acme", "none", 404),
    ):  # fmt: skip
        answer = ask(cluster, model, who)
        assert answer.status_code == status, answer.text
    assert "use 'simulated-demo' (" in ask(cluster, "torch-demo", "zeta").text
    eventually(lambda: len(pids(cluster, "simulated-demo")) == 1)
    before = pids(cluster, "simulated-demo")
    with load(cluster, "simulated-demo") as got:
        broken = {"served_model_name": "broken", "model": "/nowhere/at/all"}
        deploy(cluster, args_of(TORCH, SIMULATED, broken))
        eventually(lambda: health(cluster)["models"].get("broken", {}).get("status") == "down", 300)
        assert "/nowhere/at/all" in health(cluster)["models"]["broken"]["why"]
        assert ask(cluster, "broken").status_code == 503
        new = {**SIMULATED, "served_model_name": "new"}
        deploy(cluster, args_of(SIMULATED, new, aliases={"torch-demo": "new"}))
        eventually(lambda: ask(cluster, "new").status_code == 200, 300)
        eventually(lambda: ask(cluster, "torch-demo").json().get("model") == "new", 300)
        eventually(lambda: statuses(cluster).keys() == {"Ingress", "Replica-simulated-demo", "Replica-new"}, 300)
        many = len(got)
        eventually(lambda: len(got) > many + 10)
    assert Counter(got).keys() == {200}, Counter(got)
    assert pids(cluster, "simulated-demo") == before


@pytest.mark.parametrize("surge", [0, 100])
def test_other_weights_take_over_a_name_without_an_error(cluster: Cluster, tmp_path: Path, surge: int) -> None:
    """Requests wait for the new replica, if the old one stops first; what was made for the old weights is answered."""
    tuned = shutil.copytree(resolve_model("demo"), tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] += np.float32(0.01)
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    told = [{"name": "Replica-torch-demo", "max_surge_percent": surge}] if surge else []
    deploy(cluster, args_of(TORCH, SIMULATED), *told)
    eventually(lambda: health(cluster)["replicas"] == 2, 300)
    eventually(lambda: len(pids(cluster, "torch-demo")) == 1)
    before = pids(cluster, "torch-demo")
    with load(cluster, "torch-demo", "acme") as got:
        deploy(cluster, args_of({**TORCH, "model": str(tuned)}, SIMULATED), *told)
        eventually(lambda: pids(cluster, "torch-demo") not in (before, set()), 300)
        eventually(lambda: set(statuses(cluster).values()) == {"HEALTHY"}, 300)
        many = len(got)
        eventually(lambda: len(got) > many + 10)
    assert Counter(got).keys() == {200}, Counter(got)


def test_a_model_goes_to_zero_and_comes_back_with_what_was_saved(cluster: Cluster, tmp_path: Path) -> None:
    """All who wait while its first replica starts are answered; saved prompts, a public one too, come from the disk.

    So they do for another model from an object store: its first request after zero reuses them.
    """
    scaled = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 10}
    clerk = {"name": "clerk", "version": "1", "text": text_of(1000, resolve_model("demo"), 2)}
    stopping = {"autoscaling": scaled, "num_blocks": 1024, "public_prompts": [clerk]}
    disk = {"disk_cache_bytes": "256MiB", "disk_cache_dir": str(tmp_path / "disk")}
    zero = {**stopping, **disk, "served_model_name": "zero"}
    far = {**stopping, "served_model_name": "far", "object_cache_url": f"file://{tmp_path}/store"}
    deploy(cluster, args_of(SIMULATED, zero, far))
    for model in ("simulated-demo", "zero", "far"):
        eventually(lambda: health(cluster)["models"][model]["status"] == "ok", 300)  # noqa: B023
    system = {"role": "system", "content": text_of(4000, resolve_model("demo"), 1)}

    def cached(*messages: dict[str, str], model: str = "zero", **body: Any) -> int:
        """Ask, and return the number of cached tokens."""
        answer = ask(cluster, model, messages=[*messages, *CHAT["messages"]], max_tokens=1, **body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    # An attempt that a starting replica gave up may have computed either before.
    for model in ("zero", "far"):
        cached(system, model=model, save_system_prompt_kv_cache=True)
        cached(model=model, prompt_ref="clerk@1", save_system_prompt_kv_cache=True)
        assert cached(system, model=model) >= 3900
    for model in ("zero", "far"):
        eventually(lambda: health(cluster)["models"][model]["replicas"] == 0, 300)  # noqa: B023
    got = list[int]()
    threads = [threading.Thread(target=lambda: got.append(ask(cluster, "zero").status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert cached(system) >= 3900
    assert cached(prompt_ref="clerk@1") >= 900
    assert cached(system, model="far") >= 3900
    assert cached(model="far", prompt_ref="clerk@1") >= 900
    for thread in threads:
        thread.join()
    assert got == [200] * 8


def test_two_applications_in_one_file_have_their_own_pages(cluster: Cluster) -> None:
    """Chat, page and docs of both; a prefix without its slash leads to the page."""
    apps = [
        {
            "name": name,
            "route_prefix": prefix,
            "import_path": "serve_app:build_app",
            "args": {"model": "demo", "engine": "simulated", "replicas": 1, "served_model_name": name},
        }
        for name, prefix in (("one", "/"), ("two", "/two"))
    ]
    cluster.serve("PUT", cluster.config(*apps))
    for name, prefix in (("one", ""), ("two", "/two")):
        url = cluster.url + prefix
        eventually(partial(answers, f"{url}/health"), 300)
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [name]
            answer = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
            assert answer.model == name
        page, docs = HTTP.get(f"{url}/"), HTTP.get(f"{url}/docs")
        assert "warmpath" in page.text and '"docs/swagger-ui.css"' in docs.text
        schema = HTTP.get(str(docs.url.join("openapi.json"))).json()
        assert schema.get("servers", [{"url": ""}]) == [{"url": prefix}]
        assert cache_state(url)["model"] == name
    moved = HTTP.get(f"{cluster.url}/two", follow_redirects=False)
    assert (moved.status_code, str(moved.url.join(moved.headers["location"]))) == (307, f"{cluster.url}/two/")
    refused = HTTP.post(f"{cluster.url}/two/v1/messages/none", json={})
    assert refused.json()["type"] == "error", "an error in Anthropic's shape"
