"""The dashboard and the rules query only existing metrics. (docs: monitoring)

Each alert fires in its case and is silent just below it. promtool checks this if Prometheus is installed.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.ingress.observe.families import FAMILIES
from tests.harness.boards import ALERTS, BOARDS, DASHBOARD, FOLDER, PANELS, SERIES, WINDOW
from tests.harness.prometheus import HOW, PROMTOOL, promtool

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=HOW)


@dataclass(frozen=True, slots=True)
class Case:
    """Series with one value per minute, in promtool's notation: (values that fire, values just below).

    ``labels``: those of the alert, besides its severity. ``value``: the firing value in the alert's texts.
    """

    series: dict[str, tuple[str, str]]
    labels: tuple[tuple[str, str], ...] = ()
    minutes: int = 60
    value: str = ""


def increasing(fires: int, silent: int) -> tuple[str, str]:
    return f"0+{fires}x120", f"0+{silent}x120"


def requests(status: int, fires: tuple[int, int], silent: tuple[int, int]) -> dict[str, tuple[str, str]]:
    """Successful requests per minute, and those of another status."""
    name = "warmpath_requests_total"
    rates = zip((200, status), zip(fires, silent, strict=True), strict=True)
    found = {f'{name}{{endpoint="chat",status="{code}",tenant="acme"}}': increasing(*counts) for code, counts in rates}
    # Scrapes and health checks go on while answers fail.
    return found | {f'{name}{{endpoint="metrics",status="200",tenant="acme"}}': increasing(1000, 1000)}


def hits(fires: int, silent: int) -> tuple[str, str]:
    """Cached tokens per minute of 100 prompt tokens: 80 for 20 hours, then another number for an hour."""
    return f"0+80x1200 96000+{fires}x60", f"0+80x1200 96000+{silent}x60"


TTFT, QUEUE = "warmpath_time_to_first_token_seconds_bucket", "warmpath_router_queued_tokens"
HIT_TOKENS, PROMPT_TOKENS = "warmpath_tenant_cached_prompt_tokens_total", "warmpath_tenant_prompt_tokens_total"
TARGET = 'warmpath_autoscaling_target_replicas{reason="work"}'
EVICTED = 'warmpath_prefix_cache_evicted_reused_blocks_total{replica="a"}'
CASES = {
    "WarmpathDown": Case(
        {'up{job="warmpath",instance="a"}': ("0x120", "1x120"), 'up{job="other",instance="b"}': ("1x120", "0x120")},
        (("instance", "a"), ("job", "warmpath")),
    ),
    "WarmpathSlowFirstToken": Case(
        {f'{TTFT}{{le="5.0"}}': increasing(90, 96)}
        | {f'{TTFT}{{le="{le}"}}': increasing(100, 100) for le in ("10.0", "+Inf")}
    ),
    "WarmpathErrors": Case(requests(503, (94, 6), (96, 4))),
    "WarmpathRejecting": Case(requests(429, (88, 12), (92, 8)), (("tenant", "acme"),)),
    "WarmpathBudget": Case(
        {
            'warmpath_tenant_budget_used_ratio{tenant="acme",ingress="i"}': ("0.81x120", "0.79x120"),
            'warmpath_tenant_budget_used_ratio{tenant="acme",ingress="j"}': ("0.5x120", "0.5x120"),
        },
        (("tenant", "acme"),),
        value="81%",
    ),
    "WarmpathQueueLong": Case(
        {
            f'{QUEUE}{{replica="a",ingress="i"}}': ("21000x120", "19000x120"),
            f'{QUEUE}{{replica="a",ingress="j"}}': ("20000x120", "19000x120"),
            'warmpath_prefill_tokens_per_second{replica="a"}': ("2000x120", "2000x120"),
        }
    ),
    "WarmpathHitRateFell": Case({HIT_TOKENS: hits(30, 60), PROMPT_TOKENS: ("0+100x1260", "0+100x1260")}, minutes=1255),
    "WarmpathPoolTooSmall": Case(
        {EVICTED: increasing(20, 20), 'warmpath_kv_cache_blocks{state="cached"}': ("2000x120", "3000x120")}, minutes=100
    ),
    "WarmpathPreempting": Case({'warmpath_num_preemptions_total{replica="a"}': increasing(2, 1)}, (("replica", "a"),)),
    "WarmpathReplicasMissing": Case({"warmpath_router_replicas": ("2x120", "3x120"), TARGET: ("3x120", "3x120")}),
    "WarmpathReplicasLost": Case(
        {
            'warmpath_request_retries_total{after_first_token="true"}': increasing(1, 0),
            "warmpath_request_retries_total": ("9x120", "9x120"),
        }
    ),
    "WarmpathRoutingFaults": Case(
        {"warmpath_router_faults_total": ("0+1x120", "7x120"), "warmpath_feed_malformed_total": ("0x120", "0x120")}
    ),
    "WarmpathDirectoryFull": Case({"warmpath_directory_refused_blocks_total": ("0+1x120", "5x120")}),
    "WarmpathDirectoryDrifts": Case(
        {'warmpath_directory_drift_total{replica="a",kind="missing"}': ("0+1x120", "0x30 1x30 2x60")},
        (("kind", "missing"),),
    ),
    "WarmpathBackgroundFailing": Case(
        {'warmpath_background_failures_total{ingress="a",loop="Worker.run"}': increasing(1, 0)},
        (("loop", "Worker.run"),),
    ),
    "WarmpathSettingsRefused": Case({"warmpath_refused_configurations_total": ("0+1x120", "5x120")}),
}


def test_each_alert_has_a_case() -> None:
    assert list(CASES) == [alert["alert"] for alert in ALERTS]


@needs_promtool
def test_alerts_fire_when_they_are_to(tmp_path: Path) -> None:
    """Each alert fires in its case, with its labels and texts, but not just below; Prometheus accepts the files."""
    promtool("check", "config", FOLDER / "prometheus.yaml")
    tests = [promtool_test(alert, fires=fires) for alert in ALERTS for fires in (True, False)]
    file = tmp_path / "alerts_test.yaml"
    rules = {"rule_files": [str(BOARDS / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(rules, sort_keys=False))
    promtool("test", "rules", file)


@needs_promtool
def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [{"record": "checked", "expr": series.promql.replace(WINDOW, "5m")} for series in SERIES]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", file)


CLEARING: dict[str, tuple[dict[str, str], int, int]] = {
    "WarmpathDown": ({'up{job="warmpath",instance="a"}': "0x30 1x90"}, 20, 35),
    "WarmpathBudget": ({'warmpath_tenant_budget_used_ratio{tenant="acme",ingress="i"}': "0.81x30 0.79x90"}, 30, 35),
    "WarmpathRejecting": (
        {
            f'warmpath_requests_total{{endpoint="chat",status="{status}",tenant="acme"}}': values
            for status, values in (("429", "0+12x30 360x90"), ("200", "0+88x120"))
        },
        25,
        60,
    ),
}
"""Series of alerts whose cause ends after half an hour, a minute in which they fire, and one in which they are over."""


@needs_promtool
def test_alerts_clear_when_their_cause_ends(tmp_path: Path) -> None:
    """A server that is up again, a raised budget, a tenant within its limits: nothing stays on."""
    alerts = {alert["alert"]: alert for alert in ALERTS}
    tests = []
    for name, (series, fires_at, clear_at) in CLEARING.items():
        fired = promtool_test(alerts[name], fires=True)["alert_rule_test"][0] | {"eval_time": f"{fires_at}m"}
        over = {"eval_time": f"{clear_at}m", "alertname": name, "exp_alerts": []}
        given = [{"series": one, "values": values} for one, values in series.items()]
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": [fired, over]})
    file = tmp_path / "clear_test.yaml"
    rules = {"rule_files": [str(BOARDS / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(rules, sort_keys=False))
    promtool("test", "rules", file)


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", BOARDS / "alerts.yaml")


def promtool_test(alert: dict[str, Any], *, fires: bool) -> dict[str, Any]:
    case = CASES[alert["alert"]]
    texts = dict(alert["annotations"])
    for label, value in case.labels:
        texts["summary"] = texts["summary"].replace("{{ $labels." + label + " }}", value)
    texts["summary"] = texts["summary"].replace("{{ $value | humanizePercentage }}", case.value)
    expected = {"exp_labels": {**alert["labels"], **dict(case.labels)}, "exp_annotations": texts}
    asked = {"eval_time": f"{case.minutes}m", "alertname": alert["alert"], "exp_alerts": [expected] if fires else []}
    given = [{"series": name, "values": pair[0] if fires else pair[1]} for name, pair in case.series.items()]
    return {"interval": "1m", "input_series": given, "alert_rule_test": [asked]}


ASKED = [(series.title, series.promql) for series in SERIES]
ASKED += [(alert["alert"], alert["expr"]) for alert in ALERTS if "warmpath_" in alert["expr"]]
_ENDS = ("_bucket", "_sum", "_count")
MOVED = frozenset(
    {"warmpath_prewarm_blocks_total", "warmpath_handover_blocks_total", "warmpath_handover_refused_blocks_total"}
)
"""Counters that a new replica shows with their final value: their rate would be 0."""


@pytest.mark.parametrize(("title", "promql"), ASKED, ids=[f"{title}-{i}" for i, (title, _) in enumerate(ASKED)])
def test_a_query_asks_for_existing_families_and_labels(title: str, promql: str) -> None:
    """A renamed family cannot break the dashboard unnoticed. Counters are read by their rate, gauges directly."""
    labels = {"le"}
    read = re.findall(r"(?<![\w{])(warmpath_[a-z0-9_]+)(?:\{[^}]*\})?(\[[$\w]+\])?", promql)
    assert read, title
    for name, window in read:
        end = next((end for end in _ENDS if name.endswith(end) and name.removesuffix(end) in FAMILIES), "")
        assert name.removesuffix(end) in FAMILIES, f"{title}: there is no {name}"
        family = FAMILIES[name.removesuffix(end)]
        assert (family.kind == "histogram") == bool(end)
        assert bool(window) == (family.kind != "gauge" and name not in MOVED), f"{title}: {name}"
        labels |= set(family.labels)
    asked = {
        label.strip() for names in re.findall(r"(?:by|ignoring) \(([^)]*)\)", promql) for label in names.split(",")
    }
    asked |= {label for pairs in re.findall(r"\{([^}]*)\}", promql) for label in re.findall(r"(\w+)[=!]", pairs)}
    assert asked <= labels, title
    assert promql.count("(") == promql.count(")")


def test_legends_name_labels_that_the_query_keeps_and_rates_use_grafanas_window() -> None:
    """Otherwise all lines of a graph would have one name, or be empty or coarse at other scrape intervals."""
    assert any("[" in series.promql for series in SERIES)
    for series in SERIES:
        kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", series.promql) for label in by.split(",")}
        assert set(re.findall(r"\{\{(\w+)\}\}", series.legend)) == kept - {"le"}, series.title
        assert set(re.findall(r"\[([^\]]+)\]", series.promql)) <= {WINDOW}


def test_panels_are_described_and_lie_on_grafanas_grid() -> None:
    """Each panel has its own id, a unit and a text, and no row of panels is wider than the grid."""
    assert len(PANELS) >= 30
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}) == len(PANELS)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in PANELS) == 24
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["id"]
