"""LoRA adapters over HTTP: preloaded, loaded and unloaded while serving, chosen by model or lora_name."""

import os
import signal

import httpx
import openai
import pytest

from tests.integration.conftest import eventually
from tests.integration.demo.conftest import Served, said

pytestmark = pytest.mark.integration

SYSTEM, QUESTION = ("system", "You answer about ships and harbours. " * 40), ("user", "Where?")


def ask(served: Served, model: str, name: str = "acme", **extra: object) -> tuple[str, int]:
    """Return the answer and the number of cached tokens."""
    _, cached, text = served.chat(name, SYSTEM, QUESTION, model=model, max_tokens=12, **extra)
    return text, cached


def load(served: Served, name: str, path: str, **more: object) -> httpx.Response:
    return served.post("/v1/load_lora_adapter", "operator", lora_name=name, lora_path=path, **more)


def unload(served: Served, name: str) -> httpx.Response:
    return served.post("/v1/unload_lora_adapter", "operator", lora_name=name)


def test_an_adapter_has_kv_of_its_own(served: Served) -> None:
    """``model`` and ``lora_name`` select the same adapter, which shares no KV with the base model."""
    plain, worn = ask(served, "demo"), ask(served, "pirate")
    assert plain[1] == worn[1] == 0
    assert plain[0] != worn[0]
    for model, extra, text in (("demo", {"lora_name": "pirate"}, worn[0]), ("demo", {}, plain[0])):
        served.wait_until_held("acme", 100, SYSTEM, QUESTION, model=model, **extra)
        again, cached = ask(served, model, **extra)
        assert (again, cached > 100) == (text, True)
    roots = {name: served.openai(name).models.retrieve("pirate").to_dict()["root"] for name in ("acme", "operator")}
    assert roots == {"acme": "pirate", "operator": str(served.root / "pirate")}


def test_load_use_reload_and_unload_while_serving(served: Served) -> None:
    """Both ingresses know at once. A reload with other weights starts cold, and the old answer never returns."""
    client = served.openai()
    assert load(served, "style", "poet").text == "Success: LoRA adapter 'style' added successfully."
    poet, cached = ask(served, "style")
    assert cached == 0
    assert {ask(served, "style")[0] for _ in range(6)} == {poet}
    assert load(served, "style", "poet").status_code == 400
    running = client.chat.completions.create(
        model="style", messages=said(("user", "On and on")), max_tokens=300, stream=True,  # type: ignore[call-overload]
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(running))
    assert load(served, "style", "judge", load_inplace=True).status_code == 200
    judge, cached = ask(served, "style")
    assert cached == 0, "KV of the old weights was used"
    assert judge != poet
    assert unload(served, "style").text == "Success: LoRA adapter 'style' removed successfully."
    for _ in range(4):
        with pytest.raises(openai.NotFoundError, match="pirate"):
            client.completions.create(model="style", prompt="x")
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length", "running requests were not stopped"
    assert unload(served, "style").status_code == 404


def test_a_private_adapter_exists_for_its_tenant_alone(served: Served) -> None:
    assert load(served, "private", "poet", tenants=["acme"]).status_code == 200
    assert ask(served, "private")[0]
    with pytest.raises(openai.NotFoundError) as unseen:
        served.openai("globex").completions.create(model="private", prompt="x")
    assert "private" not in unseen.value.message.replace("'private' is not served", "")
    assert "private" not in {model.id for model in served.openai("globex").models.list()}
    assert unload(served, "private").status_code == 200


def test_a_replica_that_starts_later_serves_adapters_loaded_before(served: Served) -> None:
    """Both replicas are killed: their successors know no adapter, and load it from the request's own data.

    Routers learn which replica has the adapter in memory, and how long loading would take on the other.
    """
    assert load(served, "kept", "judge").status_code == 200
    before, _ = ask(served, "kept")
    old = served.replicas()
    assert len(old) == 2
    for replica in old.values():
        os.kill(replica["pid"], signal.SIGKILL)
    # Both: a replica that starts beside a peer with the adapter loaded copies it as a hot one.
    eventually(lambda: sum("pid" in new for name, new in served.replicas().items() if name not in old) == 2)
    after: list[str] = []
    eventually(lambda: not after.append(ask(served, "kept")[0]))  # the other ingress may not know a replica yet: 503
    assert after == [before]

    def who_would_load_it() -> list[bool]:
        asked = {"model": "kept", "prompt": "Something else.", "tenant": "acme"}
        explained = served.post("/v1/cache/explain", "operator", **asked).json()["prompts"][0]
        return sorted(replica["adapter_load_s"] > 0.0 for replica in explained["replicas"])

    eventually(lambda: who_would_load_it() == [False, True])
