"""The page of metrics, the catalog and the code agree: each family is described and bounded. And the caches' state."""

import ast
import re
from pathlib import Path

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from router.core import RoutingCore
from router.protocol.events import StatsReport
from router.protocol.request import RoutedRequest
from router.protocol.samples import Labels, Sample
from serve_app.cache.tiers.tiers import TierSettings
from serve_app.config.app import AppConfig
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import Save
from serve_app.ingress.observe.cache_state import cache_state
from serve_app.ingress.observe.families import FAMILIES, SECTIONS
from serve_app.ingress.observe.metrics import IngressMetrics, render, router_samples, with_label, without_tenants
from serve_app.ingress.observe.reference import LABELS, metrics_page
from serve_app.replica.lifecycle.receipt import MoveMeters, Receipt
from serve_app.replica.pull import PullMeters
from serve_app.replica.session_gate import SessionGate
from serve_app.tokenization.segment_cache import SegmentCacheStats
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import prompt, request, run_all

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
_NAME = re.compile(r"warmpath_[a-z0-9_]+")


def test_the_page_of_metrics_is_current() -> None:
    """To write it again: ``python -m serve_app.ingress.observe.reference > docs: metrics``."""
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
    engine = make_engine(tiers=TierSettings(1 << 20, 1 << 20, tmp_path), num_blocks=24, pin_budget_blocks=8)
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
    core = RoutingCore("router")
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
