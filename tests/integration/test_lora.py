"""LoRA adapters over HTTP: preloaded, loaded and unloaded while serving, chosen by model or lora_name."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from openai import OpenAI

from benchmarks.common.server import instance
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.prompts.lock import PromptDirectory
from serve_app.tenants.tenants import make_api_key
from tests.integration.conftest import PATIENCE_S, alone, eventually
from tests.serve_app.engine.adapters import save_adapter

pytestmark = pytest.mark.integration

KEYS = {name: make_api_key() for name in ("acme", "globex", "operator")}
SYSTEM = "You answer about ships and harbours. " * 40


@dataclass(frozen=True, slots=True)
class Instance:
    url: str
    root: Path

    def client(self, tenant: str = "acme") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEYS[tenant][0], max_retries=0, timeout=PATIENCE_S)

    def post(self, path: str, body: dict[str, Any], who: str = "operator") -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS[who][0]}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=PATIENCE_S)

    def replica_pids(self) -> set[int]:
        """Of this instance alone: others may run on the machine."""
        headers = {"authorization": f"Bearer {KEYS['operator'][0]}"}
        state = httpx.get(f"{self.url}/v1/cache/state", headers=headers, timeout=PATIENCE_S).json()
        return {replica["pid"] for replica in state["replicas"] if "pid" in replica}

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """Two replicas and two ingresses of the demo model with one preloaded adapter; more lie in ``lora_root``."""
    root = tmp_path_factory.mktemp("adapters")
    model = ensure_demo_model("demo")
    for seed, name in enumerate(("pirate", "poet", "judge")):
        save_adapter(model, root / name, seed)
    save_adapter(model, root / "large", 9, ("q_proj",), r=32)
    for version in "123":
        (root / "clerk.txt").write_text(f"You are the clerk number {version}. " * 60)
        PromptDirectory(root / "prompts").add(f"clerk@{version}", root / "clerk.txt", None)
    settings = root / "settings.yaml"
    settings.write_text(
        yaml.safe_dump(
            {
                "model": "demo",
                "tenants": [{"name": name, "key_sha256": [KEYS[name][1]]} for name in ("acme", "globex")],
                "operator_key_sha256": [KEYS["operator"][1]],
                "lora_adapters": {"pirate": str(root / "pirate")},
                "lora_root": str(root),
                "allow_runtime_lora": True,
                "max_lora_rank": 16,
                "ingress_replicas": 2,
                "prompts_dir": "prompts",
                "usage_file": str(root / "usage.sqlite"),
                "dtype": "float32",
                "kv_cache_bytes": 64 * 1024 * 1024,
            }
        )
    )
    with alone(instance("--config", str(settings))) as url:
        yield Instance(url, root)


def ask(client: OpenAI, model: str = "demo", **extra: Any) -> tuple[str, int, str]:
    """The answer's text, its cached tokens and the model it names."""
    made = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where?"}],
        max_tokens=12,
        temperature=0,
        extra_body=extra,
    )
    assert made.usage is not None
    assert made.usage.prompt_tokens_details is not None
    return made.choices[0].message.content or "", made.usage.prompt_tokens_details.cached_tokens or 0, made.model


def ask_until_warm(client: OpenAI, model: str, **extra: Any) -> tuple[str, str]:
    """The same answer from cached KV, asked for until each ingress' router has heard of it."""
    answers: list[tuple[str, int, str]] = []

    def warm() -> bool:
        answers.append(ask(client, model, **extra))
        return answers[-1][1] > 100

    eventually(warm)
    return answers[-1][0], answers[-1][2]


def test_a_preloaded_adapter_answers_under_its_name_and_shares_nothing_with_the_base(served: Instance) -> None:
    """By ``model`` or by ``lora_name`` it is the same adapter, with KV of its own."""
    client = served.client()
    plain, plain_cached, plain_model = ask(client)
    worn, worn_cached, worn_model = ask(client, "pirate")
    assert (plain_cached, plain_model, worn_cached, worn_model) == (0, "demo", 0, "pirate")
    assert worn != plain
    assert ask_until_warm(client, "demo", lora_name="pirate") == (worn, "pirate")
    assert ask_until_warm(client, "demo") == (plain, "demo")
    streamed = client.chat.completions.create(
        model="pirate", messages=[{"role": "user", "content": "Where?"}], max_tokens=4, stream=True
    )
    assert {chunk.model for chunk in streamed} == {"pirate"}


def test_models_lists_adapters_with_root_and_parent(served: Instance) -> None:
    """As vLLM does; where the files lie is for the operator."""
    models = {model.id: model.to_dict() for model in served.client().models.list()}
    assert models["demo"]["parent"] is None
    assert (models["pirate"]["parent"], models["pirate"]["root"]) == ("demo", "pirate")
    shown = {model.id: model.to_dict() for model in served.client("operator").models.list()}
    assert shown["pirate"]["root"] == str(served.root / "pirate")
    assert served.client().models.retrieve("pirate").id == "pirate"


def test_unknown_adapters_are_named_errors(served: Instance) -> None:
    """404 for a model, 400 for a lora_name; both say what there is."""
    with pytest.raises(openai.NotFoundError, match="'pirate'") as missing:
        ask(served.client(), "ghost")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="'pirate'") as wrong:
        ask(served.client(), lora_name="ghost")
    assert wrong.value.param == "lora_name"


def test_load_use_reload_and_unload_while_serving(served: Instance) -> None:
    """Both ingresses know at once; a reload with other weights is cold; the old answer never comes back."""
    assert served.load("style", "poet").text == "Success: LoRA adapter 'style' added successfully."
    poet, cached, _ = ask(served.client(), "style")
    assert cached == 0
    # New connections, so that both ingresses are asked.
    assert {ask(served.client(), "style")[0] for _ in range(6)} == {poet}
    assert ask_until_warm(served.client(), "style") == (poet, "style")
    assert served.load("style", "poet").status_code == 400
    running = served.client().chat.completions.create(
        model="style", messages=[{"role": "user", "content": "On and on"}], max_tokens=300, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(running))
    assert served.load("style", "judge", load_inplace=True).status_code == 200
    judge, cached, _ = ask(served.client(), "style")
    assert cached == 0, "KV of the old weights was used"
    assert judge != poet
    assert served.unload("style").text == "Success: LoRA adapter 'style' removed successfully."
    for _ in range(6):
        with pytest.raises(openai.NotFoundError):
            ask(served.client(), "style")
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length", "what ran was not stopped"
    assert served.unload("style").status_code == 404


def test_a_private_adapter_exists_for_its_tenant_alone(served: Instance) -> None:
    assert served.load("private", "poet", tenants=["acme"]).status_code == 200
    assert ask(served.client("acme"), "private")[2] == "private"
    with pytest.raises(openai.NotFoundError) as unseen:
        ask(served.client("globex"), "private")
    assert "private" not in unseen.value.message.replace("'private' is not served", "")
    assert "private" not in {model.id for model in served.client("globex").models.list()}
    assert served.unload("private").status_code == 200


def test_only_operators_change_adapters_and_only_inside_the_root(served: Instance) -> None:
    """A tenant's key is 403 and no key is 401; what cannot be served is 400 with the reason. (docs/security.md)"""
    body = {"lora_name": "x", "lora_path": "poet"}
    assert served.post("/v1/load_lora_adapter", body, "acme").status_code == 403
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "pirate"}, "acme").status_code == 403
    assert httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S).status_code == 401
    assert served.load("x", "/etc").status_code == 403
    assert "no adapter_model.safetensors" in served.load("x", "nothing").json()["error"]["message"]
    refused = served.load("x", "large")
    assert refused.status_code == 400
    assert "over max_lora_rank 16" in refused.json()["error"]["message"]
    assert ask(served.client(), "pirate")[0]


def test_usage_is_that_of_both_ingresses_whichever_is_asked(served: Instance) -> None:
    """They share a file, and each request counts once."""

    def requests() -> int:
        headers = {"authorization": f"Bearer {KEYS['operator'][0]}"}
        found = httpx.get(f"{served.url}/v1/usage", headers=headers, timeout=PATIENCE_S).raise_for_status().json()
        rows = [row for row in found["data"] if (row["tenant"], row["model"]) == ("globex", "pirate")]
        return sum(row["requests"] for row in rows)

    before = requests()
    for _ in range(8):
        ask(served.client("globex"), "pirate")
    assert [requests() for _ in range(4)] == [before + 8] * 4


def test_one_event_stream_tells_what_both_ingresses_decide(served: Instance) -> None:
    """To an operator, and to the tenant whose requests they were; another tenant hears of none."""

    @contextmanager
    def listening(name: str) -> Iterator[Iterator[dict[str, Any]]]:
        path, headers = f"{served.url}/v1/cache/events", {"authorization": f"Bearer {KEYS[name][0]}"}
        with httpx.stream("GET", path, headers=headers, timeout=PATIENCE_S) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            events = map(json.loads, lines)
            assert next(events)["type"] == "snapshot"
            yield (event for event in events if event["type"] == "decision")

    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            ask(served.client())  # on a connection of its own

    with listening("operator") as operator, listening("acme") as own, listening("globex") as other:
        # Several at once: HAProxy gives each to the ingress that has fewest connections, and streams are such.
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking) for _ in range(4)]
            try:
                for decisions in (operator, own):
                    seen: set[str] = set()
                    while len(seen) < 2:
                        decision = next(decisions)
                        assert decision["tenant"] == "acme"
                        seen.add(decision["ingress"])
            finally:
                over.set()
            for each in asking:
                each.result()
        ask(served.client("globex"))
        assert next(other)["tenant"] == "globex"


def test_a_replica_that_starts_later_serves_what_was_loaded_before(served: Instance) -> None:
    """Both replicas are killed: their successors were told nothing, and load from what the request carries.

    Routers hear which of them has the adapter in memory now, and what loading it would take the other.
    """
    assert served.load("kept", "judge").status_code == 200
    before, _, _ = ask(served.client(), "kept")
    old = served.replica_pids()
    assert len(old) == 2
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    # Both: one that starts beside a peer that has loaded the adapter takes it along, as a hot one.
    eventually(lambda: len(served.replica_pids() - old) == 2 and not served.replica_pids() & old)
    after: list[str] = []
    eventually(lambda: not after.append(ask(served.client(), "kept")[0]))  # the other ingress may know none yet: 503
    assert after == [before]

    def who_would_load_it() -> list[bool]:
        body = {"model": "kept", "prompt": "Something else.", "tenant": "acme"}
        said = served.post("/v1/cache/explain", body).json()["prompts"][0]
        return sorted(replica["adapter_load_s"] > 0.0 for replica in said["replicas"])

    eventually(lambda: who_would_load_it() == [False, True])


def test_every_ingress_goes_by_a_promotion_and_finds_it_warm(served: Instance) -> None:
    """Also under an adapter that any of them was asked for; each request takes a connection of its own."""

    def answered(model: str) -> tuple[str, bool]:
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Where?"}]}
        answer = served.post("/v1/chat/completions", {**body, "prompt_ref": "clerk"}, "acme").raise_for_status()
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers["x-warmpath-prompt"], cached > 200

    def promote(version: str) -> None:
        served.post("/v1/prompts/promote", {"prompt_ref": f"clerk@{version}"}).raise_for_status()

    for version in "12":
        promote(version)
        assert {answered("demo") for _ in range(10)} == {(f"clerk@{version}", True)}
    eventually(lambda: answered("pirate") == ("clerk@2", True))
    promote("3")
    assert {answered(model) for model in ("demo", "pirate") for _ in range(10)} == {("clerk@3", True)}
    assert served.post("/v1/prompts/rollback", {"prompt_ref": "clerk"}).json()["promoted"] == "2"
    assert {answered("pirate") for _ in range(10)} == {("clerk@2", True)}
