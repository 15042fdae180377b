"""Several models at one address: who may use which, by every door, and what else is of one model alone."""

import asyncio
import json
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serve_app.config.app import AppConfig
from serve_app.config.live import app_config
from serve_app.ingress.model import Model
from tests.serve_app.ingress.scripted import OTHER, PATIENCE_S, PLACES, Place, ReadCheckpoint, scripted
from tests.serve_app.ingress.several import Several

OPERATOR = "wp-operator"
TENANTS = ("acme", "globex", "zeta")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Who are you?", "max_tokens": 8},
    "/v1/responses": {"input": "Who are you?", "max_output_tokens": 16},
    "/v1/messages": {**CHAT},
}
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "Who are you?"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"input": "Who are you?"},
}
ZERO: dict[str, Any] = {"autoscaling": {"min_replicas": 0, "max_replicas": 1}}
QUERIES = ("/v1/cache/events?once=true&model=", "/v1/cache/sessions?model=")


def key_of(tenant: str) -> str:
    return f"wp-{tenant}"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def tenants(**lists: list[str] | None) -> list[dict[str, Any]]:
    return [{"name": name, "key_sha256": [digest(key_of(name))], "models": models} for name, models in lists.items()]


@pytest.fixture(scope="module")
def checkpoint(demo_model_path: Path) -> ReadCheckpoint:
    return ReadCheckpoint(demo_model_path)


def config_of(*names: str, **more: Any) -> AppConfig:
    """Return settings of models with these names."""
    entries = [{"served_model_name": name, **more.pop(name, {})} for name in names]
    return app_config({"model": "demo", "engine": "simulated", "models": entries, **more})


NAMES = ("m0", "m1", "m2")
ADAPTERS = ("a0", "a1", "a2", "a3")
ALIASES = ("gpt-4o", "claude", "m3")


@st.composite
def deployments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, dict[str, tuple[str, ...]]]]:
    """Draw settings, and each model's adapters with their tenants."""
    names = NAMES[: draw(st.integers(1, 3))]
    adapters: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in names}
    for adapter in ADAPTERS[: draw(st.integers(0, 4))]:
        users = draw(st.lists(st.sampled_from(TENANTS), unique=True, max_size=2))
        adapters[draw(st.sampled_from(names))][adapter] = tuple(users)
    known = [*names, *(adapter for own in adapters.values() for adapter in own)]
    aliases = draw(st.dictionaries(st.sampled_from(ALIASES), st.sampled_from(known)))
    listed = st.none() | st.lists(st.sampled_from([*NAMES, *ADAPTERS, *ALIASES]), unique=True, max_size=4)
    lists = {tenant: draw(listed) for tenant in TENANTS}
    return {"names": names, "aliases": aliases, "lists": lists}, adapters


@settings(max_examples=40)
@given(deployments(), st.sampled_from([*NAMES, *ADAPTERS, *ALIASES, "none"]), st.sampled_from(TENANTS))
def test_a_key_reaches_the_models_of_its_list_and_no_other_by_any_door(
    checkpoint: ReadCheckpoint,
    drawn: tuple[dict[str, Any], dict[str, dict[str, tuple[str, ...]]]],
    name: str,
    tenant: str,
) -> None:
    """An independent rule tells who may use what. A refusal is a 404 with the names that the caller may use."""
    given_, adapters = drawn
    aliases, mine = given_["aliases"], given_["lists"][tenant]
    config = config_of(
        *given_["names"],
        tenants=tenants(**given_["lists"]),
        operator_key_sha256=[digest(OPERATOR)],
        allow_runtime_lora=True,  # adapters may come and go, so aliases and lists may name missing ones
        aliases=aliases,
    )
    owner = {model: model for model in given_["names"]}
    users: dict[str, tuple[str, ...]] = {}
    for model, own in adapters.items():
        owner |= dict.fromkeys(own, model)
        users |= own
    listed = None if mine is None else {aliases.get(one, one) for one in mine}
    usable = {
        one: of
        for one, of in owner.items()
        if (listed is None or one in listed) and (not users.get(one) or tenant in users[one])
    }
    target = usable.get(aliases.get(name, name))

    async def ask() -> None:
        several = await Several.open(checkpoint, config, adapters)

        async def check(path: str, body: Any, key: str) -> None:
            answer = await several.ask(path, body, key)
            if target is not None:
                assert answer.status_code == 200, (path, answer.text)
                return
            assert answer.status_code == 404, (path, answer.text)
            message = answer.json()["error"]["message"]
            shown = {one for one in owner if f"{one!r}" in message.partition("; ")[2]}
            assert shown == set(usable), message

        for path, body in DOORS.items():
            await check(path, {**body, "model": name}, key_of(tenant))
        assert several.asked == ({} if target is None else {target: len(DOORS)})
        for path, body in COUNTS.items():
            await check(path, {**body, "model": name}, key_of(tenant))
        for path in QUERIES:
            await check(f"{path}{name}", None, key_of(tenant))
        await check("/v1/cache/explain", {**CHAT, "model": name, "tenant": tenant}, OPERATOR)
        rows = (await several.ask("/v1/models", key=key_of(tenant))).json()["data"]
        reachable = {*usable, *(alias for alias, one in aliases.items() if one in usable)}
        assert {row["id"] for row in rows} == reachable
        assert ((await several.ask(f"/v1/models/{name}", key=key_of(tenant))).status_code == 200) == (name in reachable)
        # An adapter under the name of another model, or of one outside of the list, is none.
        for model in usable.keys() & set(given_["names"]):
            for adapter in users:
                answer = await several.ask(
                    "/v1/chat/completions", {**CHAT, "model": model, "lora_name": adapter}, key_of(tenant)
                )
                assert (answer.status_code == 200) == (usable.get(adapter) == model), answer.text

    asyncio.run(ask())


@pytest.mark.parametrize("place", PLACES)
def test_a_model_answers_alone_as_among_others(demo_model_path: Path, place: Place) -> None:
    """By every door, whole and streamed; all other tests of the APIs ask the first of two models."""
    with (
        scripted(demo_model_path, place=place) as (url, script),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
    ):
        script.text = "It rains."
        for path, body in DOORS.items():
            for stream in (False, True):
                answer = http.post(path, json={**body, "model": "demo", "stream": stream})
                assert answer.status_code == 200 and "rains" in answer.text
        for path, body in COUNTS.items():
            assert http.post(path, json={**body, "model": "demo"}).status_code == 200
        names = [row["id"] for row in http.get("/v1/models").json()["data"]]
        assert names == {"alone": ["demo"], "first": ["demo", OTHER], "second": [OTHER, "demo"]}[place]
        assert ("model" in http.get("/metrics").text.partition("warmpath_router_replicas{")[2][:80]) == (
            place != "alone"
        )


def test_a_request_without_a_model_gets_the_callers_first(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", tenants=tenants(acme=None, zeta=["m1"]))

    async def ask() -> dict[str, str]:
        several = await Several.open(checkpoint, config)
        return {
            tenant: (await several.ask("/v1/chat/completions", CHAT, key_of(tenant))).json()["model"]
            for tenant in ("acme", "zeta")
        }

    assert asyncio.run(ask()) == {"acme": "m0", "zeta": "m1"}


def test_a_conversation_may_go_on_with_another_model_and_only_its_tenant_has_it(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", tenants=tenants(acme=None, zeta=["m1"]))

    async def ask() -> None:
        several, path = await Several.open(checkpoint, config), "/v1/responses"
        first = (await several.ask(path, {"input": "Hi", "model": "m0"}, key_of("acme"))).json()
        more = {"input": "And?", "model": "m1", "previous_response_id": first["id"]}
        assert (await several.ask(path, more, key_of("acme"))).json()["model"] == "m1"
        assert (await several.ask(path, more, key_of("zeta"))).status_code == 400
        assert (await several.ask(f"{path}/{first['id']}", key=key_of("acme"))).json()["model"] == "m0"
        assert (await several.ask(f"{path}/{first['id']}", key=key_of("zeta"))).status_code == 404
        assert (await several.ask(path, {"input": "Hi", "model": "m0"}, key_of("zeta"))).status_code == 404
        assert several.asked == {"m0": 1, "m1": 1}

    asyncio.run(ask())


def test_usage_metrics_and_explanations_name_the_model(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", aliases={"gpt-4o": "m1"}, m1={"policy": "round_robin"})

    async def ask() -> tuple[str, Any, Any, Any]:
        several = await Several.open(checkpoint, config)
        for name in ("m0", "m1", "gpt-4o", "none"):
            await several.ask("/v1/chat/completions", {**CHAT, "model": name})
        explained = [
            (await several.ask("/v1/cache/explain", {**CHAT, "model": name})).json() for name in ("m0", "gpt-4o")
        ]
        metrics, usage, health = [await several.ask(path) for path in ("/metrics", "/v1/usage", "/health")]
        return metrics.text, usage.json(), health.json(), explained

    metrics, usage, health, explained = asyncio.run(ask())
    assert {(row["model"], row["requests"]) for row in usage["data"]} == {("m0", 1), ("m1", 2)}
    families = {one.name: one for one in text_string_to_metric_families(metrics)}
    counted = {
        (sample.labels.get("model"), sample.labels["status"]): sample.value
        for sample in families["warmpath_requests"].samples
        if sample.labels["endpoint"] == "chat" and sample.value
    }
    assert counted == {("m0", "200"): 1, ("m1", "200"): 2, (None, "404"): 1}
    assert {sample.labels.get("model") for sample in families["warmpath_router_replicas"].samples} == {"m0", "m1"}
    assert [(one["model"], one["policy"]) for one in explained] == [("m0", "estimated_ttft"), ("m1", "round_robin")]
    assert health["models"].keys() == {"m0", "m1"}


def test_a_model_that_cannot_be_served_is_a_503_for_its_tenants_alone(checkpoint: ReadCheckpoint) -> None:
    listed = tenants(acme=None, zeta=["m1"], globex=["m0"])
    config = config_of("m0", "m1", tenants=listed, operator_key_sha256=[digest(OPERATOR)])

    async def ask() -> None:
        several = await Several.open(checkpoint, config, down={"m0": "/models/m0 has no config.json"})
        answers = {
            (tenant, name): await several.ask("/v1/chat/completions", {**CHAT, "model": name}, key_of(tenant))
            for tenant in ("acme", "zeta")
            for name in ("m0", "m1")
        }
        assert {each: answer.status_code for each, answer in answers.items()} == {
            ("acme", "m0"): 503, ("acme", "m1"): 200, ("zeta", "m0"): 404, ("zeta", "m1"): 200,
        }  # fmt: skip
        assert answers["acme", "m0"].headers["retry-after"] == "10"
        assert "config.json" not in answers["acme", "m0"].text
        health = (await several.ask("/health", key=OPERATOR)).json()
        assert health["models"]["m0"] == {"status": "down", "replicas": 0, "why": "/models/m0 has no config.json"}
        assert "models" not in (await several.ask("/health", key=key_of("acme"))).json()
        for tenant, status in ("acme", 200), ("zeta", 200), ("globex", 404):  # who has the down one alone sees no other
            answer = await several.ask("/v1/cache/events?once=true", key=key_of(tenant))
            assert (answer.status_code, "m1" in answer.text) == (status, status == 200), answer.text

    asyncio.run(ask())


@pytest.mark.parametrize("tenant", ["acme", "zeta"])
def test_a_fallback_answers_for_a_full_model_if_the_tenant_may_use_it(checkpoint: ReadCheckpoint, tenant: str) -> None:
    """The queue of the model has one place, which a request holds. The answer names its model, and says why."""
    config = config_of(
        "m0",
        "m1",
        m0={"fallback": "m1", "max_queued_requests": 1},
        tenants=tenants(acme=None, zeta=["m0"]),
        operator_key_sha256=[digest(OPERATOR)],
    )

    async def ask() -> None:
        several, body = await Several.open(checkpoint, config), {**CHAT, "model": "m0"}
        with several.models["m0"].front_door.arrive(tenant):
            answer = await several.ask("/v1/chat/completions", body, key_of(tenant))
        if tenant == "zeta":
            assert answer.status_code == 429 and several.asked == {}
            return
        assert (answer.status_code, answer.json()["model"]) == (200, "m1")
        assert answer.headers["x-warmpath-warning"] == "m0 is full: its fallback answers"
        again = await several.ask("/v1/chat/completions", body, key_of(tenant))
        assert again.json()["model"] == "m0" and "x-warmpath-warning" not in again.headers
        shown = (await several.ask("/metrics", key=OPERATOR)).text
        assert 'warmpath_fallbacks_total{cause="full",fallback="m1",ingress="ingress",model="m0"} 1.0' in shown

    asyncio.run(ask())


def test_a_fallback_answers_for_a_model_that_could_not_be_loaded(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", m0={"fallback": "m1"}, tenants=tenants(acme=None, zeta=["m0"]))

    async def ask() -> None:
        several = await Several.open(checkpoint, config, down={"m0": "there is no config.json"})
        body = {**CHAT, "model": "m0"}
        for path, counted in COUNTS.items():
            assert (await several.ask(path, {**counted, "model": "m0"}, key_of("acme"))).status_code == 200
        assert (await several.ask("/v1/chat/completions", {**body, "n": "x"}, key_of("acme"))).status_code == 400
        assert not [one for one in several.address.metrics.samples() if "fallbacks" in one[0]], "none was answered"
        answers = {who: await several.ask("/v1/chat/completions", body, key_of(who)) for who in ("acme", "zeta")}
        assert answers["acme"].json()["model"] == "m1"
        assert [one[2] for one in several.address.metrics.samples() if "fallbacks" in one[0]] == [1.0]
        assert answers["zeta"].status_code == 503, "m1 is not in its list"

    asyncio.run(ask())


@pytest.mark.parametrize("state", ["down", "not loaded", "full", "asleep"])
def test_a_fallback_answers_for_no_model_that_its_tenant_does_not_have(checkpoint: ReadCheckpoint, state: str) -> None:
    """A model that is not in its list is not there, whatever becomes of it."""
    own = {"fallback": "m1", "max_queued_requests": 1} | (ZERO if state == "asleep" else {})
    config = config_of("m0", "m1", m0=own, tenants=tenants(acme=None, zeta=["m1"]))

    async def ask() -> None:
        down = {"m0": "there is no config.json"} if state == "not loaded" else {}
        several = await Several.open(checkpoint, config, down=down)
        held = several.models["m0"].front_door.arrive("acme") if state == "full" else nullcontext()
        if state in ("down", "asleep"):
            several.core("m0").update_replicas([])
        with held:
            for path, body in DOORS.items():
                answer = await several.ask(path, {**body, "model": "m0"}, key_of("zeta"))
                assert answer.status_code == 404, (path, answer.text)
            answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"}, key_of("acme"))
            assert answer.json()["model"] == "m1"

    asyncio.run(ask())


def test_a_model_without_replicas_counts_its_own_tokens(checkpoint: ReadCheckpoint) -> None:
    """Its fallback may have another tokenizer and another template."""
    config = config_of("m0", "m1", m0={"fallback": "m1"})

    async def ask() -> None:
        several = await Several.open(checkpoint, config)
        several.core("m0").update_replicas([])
        answer = await several.ask("/tokenize", {"model": "m0", "prompt": "Who are you?"})
        assert (answer.status_code, "x-warmpath-warning" in answer.headers) == (200, False)

    asyncio.run(ask())


def test_a_live_change_that_one_model_refuses_changes_none(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1")

    async def change() -> None:
        several = await Several.open(checkpoint, config)
        prompts = [{"name": "brief", "version": "1", "text": "Be brief."}]
        changed = config_of("m0", "m1", policy="round_robin", aliases={"x": "m0"}, public_prompts=prompts)
        several.models["m1"].prompts.replace = AsyncMock(side_effect=ValueError("refused"))  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="refused"):
            await several.address.configure(changed)
        assert [several.core(name).settings.policy for name in ("m0", "m1")] == ["estimated_ttft"] * 2
        assert several.address.tenants.aliases == {} and not several.models["m0"].prompts.all()

    asyncio.run(change())


def test_a_fallback_answers_for_a_model_without_replicas_but_not_for_its_adapters(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", m0={"fallback": "m1"})

    async def ask() -> None:
        several = await Several.open(checkpoint, config, {"m0": {"a0": ()}})
        several.core("m0").update_replicas([])
        answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})
        assert answer.json()["model"] == "m1"
        assert answer.headers["x-warmpath-warning"] == "m0 is down: its fallback answers"
        for own in ({"model": "a0"}, {"model": "m0", "lora_name": "a0"}):
            assert (await several.ask("/v1/chat/completions", {**CHAT, **own})).json()["model"] == "a0"
        assert several.asked == {"m0": 2, "m1": 1}

    asyncio.run(ask())


def test_a_fallback_without_replicas_takes_no_request(checkpoint: ReadCheckpoint) -> None:
    """The refusal of the model that was asked for is the better answer: it tells when to come again."""
    config = config_of("m0", "m1", m0={"fallback": "m1", "max_queued_requests": 1})

    async def ask() -> None:
        several = await Several.open(checkpoint, config)
        several.core("m1").update_replicas([])
        with several.models["m0"].front_door.arrive("default"):
            answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})
        assert (answer.status_code, several.asked) == (429, {})
        answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})
        assert answer.json()["model"] == "m0"

    asyncio.run(ask())


def waiting(several: Several, name: str) -> float:
    """Return what the autoscaler learns of requests that wait for a model."""
    return several.address.scaling_figures()[f"{several.models[name].broadcast.figures_prefix}waiting_requests"]


@pytest.mark.parametrize("tenant", ["acme", "zeta"])
def test_a_fallback_answers_while_a_model_is_asleep_which_starts_for_it(
    checkpoint: ReadCheckpoint, tenant: str
) -> None:
    """The answer names who gave it, and says why. What is no client's request now stays: lines of batches, tokens.

    docs: cluster
    """
    own = {**ZERO, "fallback": "m1", "max_queued_requests": 2}
    config = config_of(
        "m0",
        "m1",
        m0=own,
        m1={"max_queued_requests": 1},
        tenants=tenants(acme=None, zeta=["m0"]),
        operator_key_sha256=[digest(OPERATOR)],
    )

    async def ask() -> None:
        several, body = await Several.open(checkpoint, config, {"m0": {"a0": ()}}), {**CHAT, "model": "m0"}
        several.core("m0").update_replicas([])
        assert waiting(several, "m0") == 0
        for path, told in COUNTS.items():
            assert (await several.ask(path, {**told, "model": "m0"}, key_of(tenant))).status_code == 200
        assert waiting(several, "m0") == 0, "tokens are counted without a replica"
        answer = await several.ask("/v1/chat/completions", body, key_of(tenant))
        assert waiting(several, "m0") == 1
        if tenant == "zeta":
            assert (answer.json()["model"], several.asked) == ("m0", {"m0": 1})
            return
        assert (answer.status_code, answer.json()["model"]) == (200, "m1")
        assert answer.headers["x-warmpath-warning"] == "m0 is asleep: its fallback answers"
        streamed = await several.ask("/v1/chat/completions", {**body, "stream": True}, key_of(tenant))
        assert '"model":"m1"' in streamed.text and "asleep" in streamed.headers["x-warmpath-warning"]
        counted = {labels: value for name, labels, value in several.address.metrics.samples() if "fallbacks" in name}
        assert counted == {(("cause", "asleep"), ("fallback", "m1"), ("model", "m0")): 2.0}
        for more in ({"model": "a0"}, {"lora_name": "a0"}):
            assert (await several.ask("/v1/chat/completions", {**body, **more}, key_of(tenant))).json()["model"] == "a0"
        with several.models["m1"].front_door.arrive(tenant):
            full = await several.ask("/v1/chat/completions", body, key_of(tenant))
        assert full.json()["model"] == "m0", "it waits for the model, as without a fallback"
        several.core("m0").update_replicas(["r"])
        awake = await several.ask("/v1/chat/completions", body, key_of(tenant))
        assert awake.json()["model"] == "m0" and "x-warmpath-warning" not in awake.headers

    asyncio.run(ask())


def test_of_two_that_are_asleep_the_one_that_was_asked_starts(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", m0={**ZERO, "fallback": "m1"}, m1=ZERO)

    async def ask() -> None:
        several = await Several.open(checkpoint, config)
        for name in ("m0", "m1"):
            several.core(name).update_replicas([])
        assert (await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})).json()["model"] == "m0"
        assert (waiting(several, "m0"), waiting(several, "m1")) == (1, 0)

    asyncio.run(ask())


def test_a_batchs_line_waits_for_a_model_that_is_asleep(checkpoint: ReadCheckpoint) -> None:
    """It has a day; answers of two models in one file would be a surprise."""
    config = config_of("m0", "m1", m0={**ZERO, "fallback": "m1"})

    async def ask() -> None:
        several = await Several.open(checkpoint, config)
        several.core("m0").update_replicas([])
        desk = several.address.batches
        assert desk is not None
        desk._application = several.application
        body = json.dumps({**CHAT, "model": "m0"}).encode()
        said = [await desk._ask("default", "/v1/chat/completions", body, "r", waits) for waits in (True, False)]
        assert [json.loads(one.body)["model"] for one in said] == ["m0", "m0"]

    asyncio.run(ask())


def test_a_full_queue_of_one_model_refuses_no_request_of_another(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", m0={"max_queued_requests": 1})

    async def ask() -> None:
        several = await Several.open(checkpoint, config)
        with several.models["m0"].front_door.arrive("default"):
            full = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})
            other = await several.ask("/v1/chat/completions", {**CHAT, "model": "m1"})
        assert (full.status_code, other.status_code) == (429, 200)
        after = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})
        assert after.status_code == 200, "nothing is held"

    asyncio.run(ask())


def test_who_finds_no_place_while_the_first_replica_starts_is_told_when_to_come_again(
    checkpoint: ReadCheckpoint,
) -> None:
    own = {"autoscaling": {"min_replicas": 0, "max_replicas": 1}, "max_queued_requests": 1}
    config = config_of("m0", "m1", m0=own)

    async def ask() -> None:
        several = await Several.open(checkpoint, config)
        several.core("m0").update_replicas([])
        with several.models["m0"].front_door.arrive("default"):
            answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "m0"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert answer.json()["error"]["code"] == "model_starting"

    asyncio.run(ask())


def test_requests_wait_for_a_replica_that_runs_unless_it_is_known_not_to_take_them(
    checkpoint: ReadCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()

    def starting(unheard: bool) -> bool:
        asked.append(unheard)
        return unheard

    monkeypatch.setattr("serve_app.ingress.model.STARTING_S", -1.0)

    async def ask() -> None:
        several = await Several.open(checkpoint, config_of("m0"), starting=starting)
        core = several.core("m0")
        core.update_replicas([])
        assert await several.models["m0"].starting()
        core.other_versions = {"r0": 0}
        assert not await several.models["m0"].starting()

    asyncio.run(ask())
    assert asked == [True, False]


def test_adapters_are_loaded_on_a_named_model_under_a_name_that_no_other_has(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1", allow_runtime_lora=True, aliases={"gpt-4o": "m1"})

    async def ask() -> None:
        several = await Several.open(checkpoint, config, {"m1": {"a0": ()}})
        path = "/v1/load_lora_adapter"
        unnamed = await several.ask(path, {"lora_name": "b", "lora_path": "/nowhere"})
        assert unnamed.status_code == 400 and "?model=NAME, one of m0, m1" in unnamed.text
        for name in ("a0", "m1", "gpt-4o"):
            answer = await several.ask(f"{path}?model=m0", {"lora_name": name, "lora_path": "/nowhere"})
            assert answer.status_code == 400 and "names another" in answer.text, name
        own = await several.ask(f"{path}?model=m0", {"lora_name": "b", "lora_path": "/nowhere"})
        assert "cannot be loaded from" in own.text

    asyncio.run(ask())


def test_live_settings_of_one_model_change_it_alone(checkpoint: ReadCheckpoint) -> None:
    config = config_of("m0", "m1")

    async def change() -> None:
        several = await Several.open(checkpoint, config)
        await several.registry.look()  # as an ingress does before it serves
        changed = config_of("m0", "m1", m0={"policy": "round_robin"}, aliases={"gpt-4o": "m1"})
        await several.address.configure(changed)
        assert [several.core(name).settings.policy for name in ("m0", "m1")] == ["round_robin", "estimated_ttft"]
        answer = await several.ask("/v1/chat/completions", {**CHAT, "model": "gpt-4o"})
        assert answer.json()["model"] == "m1"

    asyncio.run(change())


def test_a_tenant_of_the_database_keeps_its_budget_while_settings_change(
    checkpoint: ReadCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of new settings take time, and may be refused; what is spent meanwhile counts, at the prices in force."""
    config = config_of("m0", tenants=[], prices={"m0": {"input": 1, "output": 1}})

    async def change() -> None:
        several = await Several.open(checkpoint, config)
        fields = {"budget": {"tokens": 100, "period": "day"}}
        await several.registry.change("an operator", lambda edit: edit.add_tenant("added", fields))
        several.address.tenants_changed()
        budgets = several.address.budgets
        seen = []

        async def refused(*_: object) -> None:
            seen.append((budgets.prices["m0"].input, [one["tenant"] for one in await budgets.told(None)]))
            raise ValueError("no such prompt")

        monkeypatch.setattr(Model, "replace_prompts", refused)
        changed = config_of("m0", tenants=[], prices={"m0": {"input": 9, "output": 9}})
        with pytest.raises(ValueError, match="no such prompt"):
            await several.address.configure(changed)
        assert seen == [(1, ["added"])]
        assert budgets.prices["m0"].input == 1

    asyncio.run(change())
