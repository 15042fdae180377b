"""Metrics, the catalog and the code agree: each is described and bounded. State, explanations and sessions."""

import ast
import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httpx
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from router.core import RoutingCore
from router.policies import POLICIES
from router.protocol.events import BlocksStored, StatsReport
from router.protocol.request import RoutedRequest
from router.protocol.samples import Labels, Sample
from router.settings import RouterSettings
from serve_app.api.openai.request import parse_chat
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import Save
from serve_app.engine.reports import EngineMeters
from serve_app.engine.vllm.settings import capability_samples
from serve_app.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Overloaded, RateLimited
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.shares import Shares
from serve_app.generation.prepare import Limits, Preparer, session_key
from serve_app.ingress.observe import reports as module
from serve_app.ingress.observe.answer_meter import AnswerMeter
from serve_app.ingress.observe.families import FAMILIES, LABELS, SECTIONS, VLLM_FAMILIES, metrics_page
from serve_app.ingress.observe.metrics import IngressMetrics, render, router_samples, with_label, without_tenants
from serve_app.ingress.observe.reports import MOST_FINAL, FinalSessions, SessionList, cache_state, explanation
from serve_app.ingress.observe.vllm_names import vllm_samples
from serve_app.ingress.routes.application import make_application
from serve_app.live.replicas import replica_rows
from serve_app.replica.lifecycle.handover import MoveMeters, Receipt
from serve_app.replica.pull import PullMeters
from serve_app.replica.session_gate import SessionGate, session_report
from serve_app.tenants import Tenant, Tenants, make_api_key
from serve_app.tokenization.segments import SegmentCacheStats
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.tiers import tier_settings
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import prompt, request, run_all
from tests.serve_app.ingress.routes.test_application import address_of
from tests.serve_app.sessions.test_admission import Bench

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
_NAME = re.compile(r"warmpath_[a-z0-9_]+")


def test_the_page_of_metrics_is_current() -> None:
    """To write it again: ``python -m serve_app.ingress.observe.families > docs: metrics``."""
    assert PAGE.read_text() == metrics_page()


def test_every_name_in_the_code_is_described_and_every_described_name_is_in_the_code() -> None:
    """An undescribed family would not be shown; a described one that is never counted would mislead."""
    described = [ROOT / "serve_app/ingress/observe" / name for name in ("reference.py", "families.py")]
    counted = {
        node.value
        for room in ("router", "serve_app")
        for file in (ROOT / room).rglob("*.py")
        if file not in described
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value)
    }
    foreign = {name for name in counted if name.startswith("warmpath_end_token")}  # a grammar's
    foreign.add("warmpath_traffic")  # of the header of recorded traffic
    assert counted - foreign == set(FAMILIES)


def test_a_help_text_says_more_than_the_name() -> None:
    """It is a separate sentence that adds information; each possible label is explained, and no other."""
    for name, family in FAMILIES.items():
        assert family.help.endswith("."), name
        assert len(set(re.findall(r"[a-z]+", family.help.lower())) - set(name.split("_"))) >= 3, name
        assert not re.search(r"_(ms|us|percent|perc|mib)(_|$)", name), f"{name}: base units only"
    assert {label for family in FAMILIES.values() for label in family.labels} == set(LABELS)
    assert sum(len(families) for _, families in SECTIONS.values()) == len(FAMILIES)


def test_all_samples_of_replicas_are_shown(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Engine, pool, tiers, adapters, drafts, pulls, moves, sessions: no sample is left out for name or labels."""
    engine = make_engine(tiers=tier_settings(1 << 20, 1 << 20, tmp_path), num_blocks=24, pin_budget_blocks=8)
    run_all(engine, [request(f"r{i}", prompt(150, i), 3, tenant="acme") for i in range(4)])
    run_all(engine, [structs.replace(request("saver", prompt(60, 9), 1), saves=(Save(b"s" * 16, 48, None),))])
    meters, pulls, moves = EngineMeters(), PullMeters(), MoveMeters(Receipt())
    meters.drafts.update(
        f"warmpath_spec_decode_num_{kind}_total" for kind in ("drafts", "draft_tokens", "accepted_tokens")
    )
    pulls.refused["slow"] += 1
    pulls.ended["whole"] += 1
    pulls.exports["sent"] += 1
    assert moves.joined is not None
    moves.joined.moved("prefix", 1, 1)
    moves.joined.skipped["gone"] += 1
    moves.taken_blocks["save"] += 1
    moves.taken_saves["pinned"] += 1
    beside = [*meters.samples((("engine", "vllm"),)), *pulls.samples((), 1.0), *moves.samples()]
    beside += capability_samples({"turns"}, (("engine", "vllm"),))
    beside += SessionGate(engine, AppConfig(model="demo")).samples()
    samples: list[Sample] = [*engine.stats().samples, *beside]
    labelled = [(name, (*labels, ("replica", "a")), value) for name, labels, value in samples]
    families = list(text_string_to_metric_families(render(labelled).decode()))
    shown = {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}
    assert shown == {(name, tuple(sorted(labels))) for name, labels, _ in labelled}
    assert all(family.documentation != family.name.replace("_", " ") for family in families)
    expected = {
        name for name, family in FAMILIES.items() if "replica" in family.labels and "ingress" not in family.labels
    } | {"warmpath_wait_seconds"}  # ingresses have it, too
    assert {name if name in FAMILIES else name.rsplit("_", 1)[0] for name, _ in shown} == expected - {
        "warmpath_feed_mirror_drift_total",
        "warmpath_replica_info",
        "warmpath_unplaced_kv_blocks_total",
        "warmpath_kv_cache_block_tokens",  # vLLM's
        "warmpath_worker_up",  # of servers that run elsewhere
        "warmpath_worker_predictions_total",
    }


def test_counters_are_there_before_their_first_event() -> None:
    """Else `increase()` would not see it: an outage's first errors, a lost replica, a wrong directory."""
    metrics, core = IngressMetrics(), RoutingCore("router")
    core.update_replicas(["a"])
    metrics.expect(["acme", *(f"t{number}" for number in range(1000))])
    metrics.answered("messages", 200, "late")
    found = {(name, labels): value for name, labels, value in [*metrics.samples(), *router_samples(core)]}
    for tenant, endpoint in (("acme", "chat"), ("acme", "responses"), ("late", "messages")):
        for status in ("500", "503", "429"):
            labels = (("endpoint", endpoint), ("status", status), ("tenant", tenant))
            assert found["warmpath_requests_total", labels] == 0.0
    for after in ("true", "false"):
        assert found["warmpath_request_retries_total", (("after_first_token", after),)] == 0.0
    for kind in ("extra", "missing", "altered"):
        assert found["warmpath_directory_drift_total", (("replica", "a"), ("kind", kind))] == 0.0
    assert found["warmpath_inter_token_latency_seconds_count", (("tenant", "acme"),)] == 0.0
    assert len(found) < 5000, "a bounded number of tenants"
    engine = {(name, labels[1:]): value for name, labels, value in EngineMeters().samples((("engine", "torch"),))}
    assert engine["warmpath_requests_finished_total", (("finished_reason", "error"),)] == 0.0


def test_undescribed_samples_are_not_shown() -> None:
    """A replica's invented families, labels or sentences change nothing on the page."""
    good: Sample = ("warmpath_generation_tokens_total", (("engine", "torch"), ("replica", "a")), 3.0)
    odd: list[Sample] = [
        ("warmpath_generation_tokens", (("replica", "a"),), 1.0),
        ("warmpath_generation_tokens_total_sum", (("replica", "a"),), 1.0),
        ("warmpath_secret_plans_total", (), 1.0),
        ("warmpath_generation_tokens_total", (("replica", "a"), ("why", "a sentence, and more")), 1.0),
        ("warmpath_request_queue_time_seconds", (("replica", "a"),), 1.0),
    ]
    assert render([good, *odd]) == render([good])


def test_rendered_samples_parse_back() -> None:
    """Labels and values survive; a decision's best, selected and delivered cached tokens are there, by reason."""
    metrics = IngressMetrics()
    metrics.add("warmpath_requests_total", 3, endpoint="chat", status="200", tenant="acme")
    metrics.first_token("acme", 0.1, 40, 24)
    metrics.retried(after_first_token=True)
    core = RoutingCore("router", RouterSettings(shadow_policy="round_robin"))
    core.update_replicas(["a", "b"])
    decision = core.decide(RoutedRequest("r", b"\1" * 32, 40, b"k" * 16))
    assert decision is not None
    core.record_delivered(decision, 24, 0.2)
    samples = with_label([*metrics.samples(), *router_samples(core)], "ingress", "i-1")
    families = text_string_to_metric_families(render(samples).decode())
    parsed = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    assert parsed == {(name, tuple(sorted(labels))): value for name, labels, value in samples}
    labels = (("ingress", "i-1"), ("policy", core.settings.policy), ("reason", decision.reason))
    counted = {"best_cached": 0, "selected_cached": 0, "delivered_cached": 24, "prompt": 40}
    for name, tokens in counted.items():
        assert parsed[f"warmpath_router_{name}_tokens_total", labels] == tokens
    both = (("ingress", "i-1"), ("policy", core.settings.policy), ("shadow", "round_robin"))
    assert parsed["warmpath_router_shadow_decisions_total", both] == 1
    assert parsed["warmpath_router_shadow_prompt_tokens_total", both] == 40
    for choice in ("acting", "shadow"):
        seconds = parsed["warmpath_router_shadow_estimated_ttft_seconds_total", (("choice", choice), *both)]
        assert seconds == pytest.approx(decision.estimated_ttft_s)


def test_vllms_names_have_the_same_values_by_replica_and_model(make_engine: MakeEngine) -> None:
    """Summed over tenants, ends by vLLM's reasons, the pool's used part from its blocks; every name is shown."""
    engine, metrics = make_engine(num_blocks=24), IngressMetrics()
    run_all(engine, [request(f"r{i}", prompt(40, i), 3, tenant=tenant) for i, tenant in enumerate(("a", "b"))])
    metrics.expect(["a", "b"])
    metrics.first_token("a", 0.1, 40, 24)
    metrics.first_token("b", 0.1, 40, 24)
    labels: Labels = (("engine", "torch"), ("replica", "one"), ("model", "poet"))
    ends = [("cancelled", 2.0), ("timeout", 1.0), ("stop", 5.0)]
    ours: list[Sample] = [
        *with_label([one for one in engine.stats().samples if "finished" not in one[0]], "replica", "one"),
        *with_label(metrics.samples(), "ingress", "i"),
        *[("warmpath_requests_finished_total", (*labels, ("finished_reason", end)), count) for end, count in ends],
        *[
            ("warmpath_kv_cache_blocks", (*labels, ("state", state)), blocks)
            for state, blocks in (("used", 6.0), ("cached", 10.0), ("free", 8.0))
        ],
    ]
    families = list(text_string_to_metric_families(render(vllm_samples(ours, "demo")).decode()))
    shown = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    demo, poet = (("engine", "one"), ("model_name", "demo")), (("engine", "one"), ("model_name", "poet"))
    assert shown["vllm:prompt_tokens_total", demo] == 80
    assert shown["vllm:prefix_cache_queries_total", demo] == 80, "of both tenants"
    assert shown["vllm:generation_tokens_total", demo] == 6
    assert shown["vllm:time_to_first_token_seconds_count", (("ingress", "i"), ("model_name", "demo"))] == 2
    assert shown["vllm:kv_cache_usage_perc", poet] == 0.25
    for end, count in (("abort", 3.0), ("stop", 5.0)):
        assert shown["vllm:request_success_total", tuple(sorted((*poet, ("finished_reason", end))))] == count
    counters = {name.removesuffix("_total") for name in VLLM_FAMILIES}
    assert {family.name for family in families} == counters


def test_without_tenants_only_sums_are_left() -> None:
    """Counters, gauges and buckets are added up; the tenants behind them cannot be seen."""

    def of(tenant: str, *more: tuple[str, str]) -> Labels:
        return (("ingress", "i"), ("tenant", tenant), *more)

    bucket, count = "warmpath_time_to_first_token_seconds_bucket", "warmpath_tenant_prompt_tokens_total"
    samples: list[Sample] = [
        (count, of("acme"), 2.0),
        (count, of("globex"), 3.0),
        (bucket, of("acme", ("le", "1.0")), 1.0),
        (bucket, of("globex", ("le", "1.0")), 4.0),
        ("warmpath_requests_in_flight", (("ingress", "i"),), 7.0),
        ("warmpath_prompt_version_tokens_total", (("ingress", "i"), ("prompt", "clerk@1")), 1.0),
        ("warmpath_prompt_version_tokens_total", (("ingress", "i"), ("prompt", "pilot@1")), 2.0),
    ]
    assert without_tenants(samples) == [
        (count, (("ingress", "i"),), 5.0),
        (bucket, (("ingress", "i"), ("le", "1.0")), 5.0),
        ("warmpath_requests_in_flight", (("ingress", "i"),), 7.0),
        ("warmpath_prompt_version_tokens_total", (("ingress", "i"),), 3.0),
    ]


def test_the_state_has_each_tenants_tokens_and_each_replicas_blocks() -> None:
    core = RoutingCore("router")
    core.update_replicas(["a"])
    blocks: Sample = ("warmpath_kv_cache_blocks", (("state", "cached"),), 3.0)
    core.apply("a", [StatsReport((("warmpath_kv_cache_block_bytes", (), 64.0), blocks))])
    totals = {"acme": (2, 80, 32), "zeta": (1, 40, 16)}
    state = cache_state(core, totals, SegmentCacheStats(0, 0, 0, 0, 0), {}, model="m", engine="torch")
    assert state["tenants"] == {
        "acme": {"requests": 2, "prompt_tokens": 80, "cached_tokens": 32, "hit_rate": 0.4},
        "zeta": {"requests": 1, "prompt_tokens": 40, "cached_tokens": 16, "hit_rate": 0.4},
    }
    (replica,) = state["replicas"]
    assert (replica["blocks_cached"], replica["bytes_cached"], replica["tokens_cached"]) == (3, 192, 48)


SECRET = b"s" * 32
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tell me about the harbour. " * 20}]}
TWO_TENANTS = [TenantConfig(name=name, key_sha256=[digit * 64]) for name, digit in (("acme", "a"), ("globex", "b"))]


class Desk:
    def __init__(self, path: Path, tenants: Tenants) -> None:
        self.core = RoutingCore("me", RouterSettings(), clock=lambda: 0.0)
        self.core.update_replicas(["a", "b"])
        self.tenants = tenants
        self.door = FrontDoor(Shares({}), places=lambda: 1, max_waiting=1, max_bytes=1 << 20)
        self.preparer = Preparer(
            load_checkpoint_info(path), PromptTokenizer(path), tenants, SECRET, AdapterRegistry("demo"), Limits(1024, 8)
        )

    def ask(self, body: Any) -> dict[str, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        said = asyncio.run(explanation(raw, self.core, self.preparer, self.tenants, self.door))
        answer: dict[str, Any] = json.loads(json.dumps(said))
        return answer

    def hold(self, replica_id: str, tenant: str) -> None:
        """Let a replica hold the chat as one tenant's prompt."""
        wanted = parse_chat(json.dumps(CHAT).encode())
        generation = asyncio.run(self.preparer.prepare(wanted, Tenant(tenant), "x"))[0]
        self.core.apply(replica_id, [BlocksStored(generation.block_hashes)])


@pytest.fixture
def alone(demo_model_path: Path) -> Desk:
    return Desk(demo_model_path, Tenants([], SECRET))


def test_the_shadows_winner_is_named(alone: Desk) -> None:
    """Also where the body asks for another policy alone; without a shadow there is none."""
    [prompt] = alone.ask(CHAT)["prompts"]
    assert prompt["shadow"] is None
    alone.core.configure(RouterSettings(shadow_policy="least_loaded"))
    [prompt] = alone.ask({**CHAT, "policy": "estimated_ttft"})["prompts"]
    assert set(prompt["winners"]) == {"estimated_ttft"}
    assert prompt["shadow"]["policy"] == "least_loaded"
    assert prompt["shadow"]["replica_id"] in alone.core.replica_ids
    assert "least queued work" in prompt["shadow"]["because"]


def test_the_limit_that_would_refuse_a_request_or_let_it_wait_is_named(alone: Desk) -> None:
    """With the tenant's own numbers, as in an error; nothing is counted."""

    async def run() -> None:
        free = {"refusal": None, "wait": None}
        assert alone.door.outlook("default") == free
        with alone.door.arrive("default") as arrival:
            full = {"place": "ingress", "limit": "max_queued_requests", "used": 1, "most": 1, "retry_after_s": 1.0}
            assert alone.door.outlook("default") == {"refusal": full, "wait": None}
            with pytest.raises(RateLimited) as refused:
                alone.door.arrive("default")
            assert refused.value.shown_reason == {"reason": full}
            await arrival.turn(1)
            place = arrival.hand_over()
        taken = {"place": "ingress", "limit": "max_num_seqs", "used": 1, "most": 1}
        assert alone.door.outlook("default") == {"refusal": None, "wait": taken}
        place.give_back()
        assert alone.door.outlook("default") == free

    asyncio.run(run())
    assert alone.ask(CHAT)["refusal"] is None


def test_a_request_is_explained_as_it_would_be_routed(alone: Desk) -> None:
    """Its holder wins under all cache-aware policies; choices share a prompt, and a response has a chat's."""
    alone.hold("b", "default")
    said = alone.ask(CHAT)
    assert (said["tenant"], said["policy"], said["model"]) == ("default", "estimated_ttft", "demo")
    prompt = said["prompts"][0]
    assert set(prompt["winners"]) == set(POLICIES)
    assert {prompt["winners"][policy]["replica_id"] for policy in ("estimated_ttft", "lmetric")} == {"b"}
    first = prompt["replicas"][0]
    assert first["cached_tokens"] == first["cached_tokens_by_tier"]["pool"] > 64
    assert alone.core.counters.by_policy["estimated_ttft"].by_reason == {}
    assert set(alone.ask({**CHAT, "policy": "lmetric"})["prompts"][0]["winners"]) == {"lmetric"}
    completion = alone.ask({"model": "demo", "prompt": ["one", "another one"], "n": 2, "max_tokens": 4})
    assert [each["prompt_tokens"] > 0 for each in completion["prompts"]] == [True, True]
    response = alone.ask({"model": "demo", "input": CHAT["messages"]})
    assert response["prompts"][0]["prefix"] == prompt["prefix"]


def test_what_a_replica_goes_without_is_said(alone: Desk) -> None:
    """In explanations, and in operators' rows of replicas, by the replica's gauge."""
    assert alone.ask(CHAT)["notes"] == []
    labels = (("engine", "vllm"),)
    alone.core.apply("b", [StatsReport(tuple(capability_samples({"turns", "shares"}, labels)))])
    first, second = alone.ask(CHAT)["notes"]
    assert first.startswith("b goes without shares: ") and second.startswith("b goes without turns: ")
    about = {"engine": "vllm", "simulated": False}
    reports = {name: report.samples for name, report in alone.core.stats().items()}
    rows = replica_rows(alone.core.state()["replicas"], reports, about)
    assert (rows["a"].get("without"), rows["b"]["without"]) == (None, ["shares", "turns"])


def test_the_tenant_named_is_the_one_explained(demo_model_path: Path) -> None:
    """One tenant's cached prompt does not affect another's; with several tenants the request must name one."""
    shared = Desk(demo_model_path, Tenants(TWO_TENANTS, SECRET))
    shared.hold("b", "acme")
    cached = {t: shared.ask({**CHAT, "tenant": t})["prompts"][0]["best_cached_tokens"] for t in ("acme", "globex")}
    assert cached["acme"] > 64
    assert cached["globex"] == 0
    with pytest.raises(InvalidRequest, match="one of acme, globex") as missing:
        shared.ask(CHAT)
    assert missing.value.param == "tenant"


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        (b"[", InvalidRequest, None),
        ({**CHAT, "prompt": "and text"}, InvalidRequest, None),
        ({**CHAT, "policy": "best"}, InvalidRequest, "policy"),
        ({**CHAT, "tenant": "nobody"}, InvalidRequest, "tenant"),
        ({**CHAT, "temperature": 9}, InvalidRequest, "temperature"),
        ({**CHAT, "model": "other"}, ModelNotFound, "model"),
        ({"model": "demo", "prompt": "word " * 2000}, ContextLengthExceeded, "prompt"),
    ],
)
def test_bad_bodies_are_refused_as_the_request_would_be(
    alone: Desk, body: Any, error: type[Exception], param: str | None
) -> None:
    with pytest.raises(error) as caught:
        alone.ask(body)
    assert getattr(caught.value, "param", None) == param


PATH = "/v1/cache/sessions"
KEYS = {name: make_api_key() for name in ("acme", "globex", "operator")}
TENANTS = [TenantConfig(name=name, key_sha256=[KEYS[name][1]]) for name in ("acme", "globex")]
CLOSED = AppConfig(model="demo", tenants=TENANTS, operator_key_sha256=[KEYS["operator"][1]])


class Replicas:
    """Two replicas with sessions of their own: ``r1`` of both tenants, ``r2`` of acme alone."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.benches = {"r1": Bench(), "r2": Bench()}
        for name, tokens, tenant in (("r1", 100, "acme"), ("r1", 200, "globex"), ("r2", 300, "acme")):
            bench = self.benches[name]
            bench.end(bench.arrive(tokens, tenant))
            bench.clock.now_s += 10.0

    async def __call__(
        self, method: str, tenant: str | None, names: Sequence[str] = (), *, timeout_s: float
    ) -> list[Any]:
        if method == "close_sessions":
            return [len(bench.sessions.close(tenant or "", names)) for bench in self.benches.values()]
        assert method == "sessions"
        self.asked.append(tenant)
        await asyncio.sleep(0)
        return [
            {"replica": name, **session_report(bench.sessions, bench.admission, tenant, bench.clock())}
            for name, bench in self.benches.items()
        ]


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


def get(config: AppConfig, replicas: Any, *names: str) -> list[httpx.Response]:
    """Return each key holder's answer, all at once."""

    async def answers() -> list[httpx.Response]:
        application = make_application(address_of(config, sessions=SessionList(replicas)))
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = [{"authorization": f"Bearer {KEYS[name][0]}"} if name else {} for name in names]
            return await asyncio.gather(*(client.get(PATH, headers=one) for one in headers))

    return asyncio.run(answers())


def test_each_key_sees_its_own(replicas: Replicas) -> None:
    """The operator sees all, with the pools' capacity; a tenant sees no trace of another."""
    acme, globex, operator = (answer.json() for answer in get(CLOSED, replicas, "acme", "globex", "operator"))
    seen = [
        {(row["replica"], row["tenant"], row["tokens"]) for row in each["sessions"]}
        for each in (acme, globex, operator)
    ]
    assert seen[0] == {("r1", "acme", 100), ("r2", "acme", 300)}
    assert seen[1] == {("r1", "globex", 200)}
    assert seen[2] == seen[0] | seen[1]
    assert (acme["viewer"], acme["tenant"]) == ("tenant", "acme")
    assert (operator["viewer"], operator["tenant"]) == ("operator", None)
    assert globex["replicas"] == [
        {"replica": "r1", "sessions": 1, "live_tokens": 200},
        {"replica": "r2", "sessions": 0, "live_tokens": 0},
    ]
    assert [set(row) - {"replica", "sessions", "live_tokens"} for row in operator["replicas"]] == [{"room_tokens"}] * 2
    assert "acme" not in str(globex)


def test_each_key_closes_its_own(replicas: Replicas) -> None:
    """On every replica, and in the limit of every ingress; a session of another tenant with the same name stays."""
    for bench in replicas.benches.values():
        for session in bench.sessions.all():
            session.name = session_key(session.tenant, "one")
    address = address_of(CLOSED, sessions=SessionList(replicas))
    address.session_limit = Mock()
    application = make_application(address)

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"authorization": f"Bearer {KEYS['acme'][0]}"}
            asked = [("GET", PATH), ("DELETE", "/v1/sessions/two"), ("DELETE", "/v1/sessions/one"), ("GET", PATH)]
            return [await client.request(method, path, headers=headers) for method, path in asked]

    before, other, closed, after = asyncio.run(answers())
    assert [len(listing.json()["sessions"]) for listing in (before, after)] == [2, 0], "the list is made anew"
    assert other.json() == {"id": "two", "object": "session", "deleted": True, "replicas": 0}
    assert closed.json() == {"id": "one", "object": "session", "deleted": True, "replicas": 2}
    assert [session.tenant for bench in replicas.benches.values() for session in bench.sessions.all()] == ["globex"]
    assert address.session_limit.close.call_args.args == ("acme", [session_key("acme", "one")])


def test_without_tenants_everybody_sees_all(replicas: Replicas) -> None:
    (answer,) = get(AppConfig(model="demo"), replicas, "")
    assert len(answer.json()["sessions"]) == 3


def test_sessions_used_last_come_first(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order covers all replicas, and the number is bounded."""
    monkeypatch.setattr(module, "MOST_TOLD", 2)
    (answer,) = get(CLOSED, replicas, "operator")
    assert [(row["tokens"], row["idle_s"]) for row in answer.json()["sessions"]] == [(200, 10.0), (300, 10.0)]


def test_replicas_are_asked_once_for_many_clients(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each viewer has its own answer; a leaving client affects no other; later the replicas are asked again."""
    asking = SessionList(replicas)

    async def ask() -> None:
        first, second = (asyncio.create_task(asking.of("acme")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second)["sessions"]) == 2
        assert await asking.of("acme") is await asking.of("acme")
        await asking.of(None)
        assert replicas.asked == ["acme", None]
        later_s = time.monotonic() + module.FRESH_S
        monkeypatch.setattr(module.time, "monotonic", lambda: later_s)
        await asking.of("acme")
        assert replicas.asked == ["acme", None, "acme"]

    asyncio.run(ask())


def test_a_silent_replica_is_a_sentence() -> None:
    async def silent(*_: Any, **__: Any) -> list[Any]:
        raise TimeoutError

    (answer,) = get(CLOSED, silent, "acme")
    assert (answer.status_code, answer.headers["retry-after"]) == (Overloaded.status, "5")
    assert answer.json()["error"]["message"] == "A replica does not report its sessions; ask again."


def test_last_answers_close_their_sessions_in_few_calls() -> None:
    """By name; a tenant's flood of ends makes bounded calls, and others' ends do not wait for it."""
    calls: list[tuple[str, list[str]]] = []
    done = asyncio.Event()

    async def close(tenant: str, names: Sequence[str]) -> None:
        calls.append((tenant, list(names)))
        if tenant == "acme" and len(calls) == 1:
            raise Overloaded("a replica is silent", retry_after_s=1.0)
        if "last" in names:
            done.set()

    def ended(closer: FinalSessions, tenant: str, session: str, *, final: bool = True) -> None:
        generation = SimpleNamespace(tenant=tenant, session=session, final=final)
        closer.ended(cast(AnswerMeter, SimpleNamespace(generations=[generation])), None)

    async def run() -> None:
        closer = FinalSessions(close)
        ended(closer, "acme", "first")
        await asyncio.sleep(0)
        for number in range(2 * MOST_FINAL):
            ended(closer, "acme", str(number))
        for session, final in (("one", False), ("", True)):
            ended(closer, "globex", session, final=final)
        ended(closer, "globex", "last")
        await asyncio.wait_for(done.wait(), 60)
        await asyncio.wait_for(asyncio.gather(*closer._tasks.values()), 60)

    asyncio.run(run())
    assert calls[0] == ("acme", ["first"]) and ("globex", ["last"]) in calls
    assert [len(names) for tenant, names in calls if tenant == "acme"] == [1, MOST_FINAL]
