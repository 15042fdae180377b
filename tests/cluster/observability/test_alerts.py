"""Each alert fires for what it is meant for and is silent just below; checked by promtool where Prometheus is."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.boards import ALERTS, FOLDER

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


@dataclass(frozen=True, slots=True)
class Case:
    """Series with a value a minute, in promtool's words. ``labels``: of what fires, beside its severity."""

    fires: dict[str, str]
    silent: dict[str, str]
    labels: tuple[tuple[str, str], ...] = ()
    minutes: int = 60


def _ttft(le5: int, le10: int) -> dict[str, str]:
    name = "warmpath_time_to_first_token_seconds_bucket"
    buckets = {"5.0": le5, "10.0": le10, "+Inf": le10}
    return {f'{name}{{le="{le}"}}': f"0+{count}x120" for le, count in buckets.items()}


def _requests(ok: int, other: int, status: int) -> dict[str, str]:
    name = "warmpath_requests_total"
    counts = {200: ok, status: other}
    return {f'{name}{{status="{code}",tenant="acme"}}': f"0+{count}x120" for code, count in counts.items()}


def _hits(before: int, now: int) -> dict[str, str]:
    """Cached tokens a minute of 100 prompt tokens, for 20 hours, then for one."""
    return {
        "warmpath_tenant_cached_prompt_tokens_total": f"0+{before}x1200 {before * 1200}+{now}x60",
        "warmpath_tenant_prompt_tokens_total": "0+100x1260",
    }


def _increasing(series: str, by: int) -> dict[str, str]:
    return {series: f"0+{by}x120"}


CASES = {
    "WarmpathDown": Case(
        {'up{job="warmpath",instance="a"}': "0x120"},
        {'up{job="warmpath",instance="a"}': "1x120", 'up{job="other",instance="b"}': "0x120"},
        (("instance", "a"), ("job", "warmpath")),
    ),
    "WarmpathSlowFirstToken": Case(_ttft(90, 100), _ttft(96, 100)),
    "WarmpathErrors": Case(_requests(94, 6, 503), _requests(96, 4, 503)),
    "WarmpathRejecting": Case(_requests(88, 12, 429), _requests(92, 8, 429), (("tenant", "acme"),)),
    "WarmpathQueueLong": Case(
        {
            'warmpath_router_queued_tokens{replica="a",ingress="i"}': "21000x120",
            'warmpath_router_queued_tokens{replica="a",ingress="j"}': "20000x120",
            'warmpath_prefill_tokens_per_second{replica="a"}': "2000x120",
        },
        {
            'warmpath_router_queued_tokens{replica="a",ingress="i"}': "19000x120",
            'warmpath_router_queued_tokens{replica="a",ingress="j"}': "19000x120",
            'warmpath_prefill_tokens_per_second{replica="a"}': "2000x120",
        },
    ),
    "WarmpathHitRateFell": Case(_hits(80, 30), _hits(80, 60), minutes=1255),
    "WarmpathPoolTooSmall": Case(
        {
            **_increasing('warmpath_prefix_cache_evicted_reused_blocks_total{replica="a"}', 20),
            'warmpath_kv_cache_blocks{state="cached"}': "2000x120",
        },
        {
            **_increasing('warmpath_prefix_cache_evicted_reused_blocks_total{replica="a"}', 20),
            'warmpath_kv_cache_blocks{state="cached"}': "3000x120",
        },
        minutes=100,
    ),
    "WarmpathPreempting": Case(
        _increasing('warmpath_num_preemptions_total{replica="a"}', 2),
        _increasing('warmpath_num_preemptions_total{replica="a"}', 1),
        (("replica", "a"),),
    ),
    "WarmpathReplicasMissing": Case(
        {"warmpath_router_replicas": "2x120", 'warmpath_autoscaling_target_replicas{reason="work"}': "3x120"},
        {"warmpath_router_replicas": "3x120", 'warmpath_autoscaling_target_replicas{reason="work"}': "3x120"},
    ),
    "WarmpathReplicasLost": Case(
        _increasing('warmpath_request_retries_total{after_first_token="true"}', 1),
        {"warmpath_request_retries_total": "9x120"},
    ),
    "WarmpathRoutingFaults": Case(
        {"warmpath_router_faults_total": "0+1x120", "warmpath_feed_malformed_total": "0x120"},
        {"warmpath_router_faults_total": "7x120", "warmpath_feed_malformed_total": "0x120"},
    ),
    "WarmpathDirectoryFull": Case(
        _increasing("warmpath_directory_refused_blocks_total", 1), {"warmpath_directory_refused_blocks_total": "5x120"}
    ),
    "WarmpathDirectoryDrifts": Case(
        _increasing('warmpath_directory_drift_total{replica="a",kind="missing"}', 1),
        {'warmpath_directory_drift_total{replica="a",kind="missing"}': "0x30 1x30 2x60"},
        (("kind", "missing"),),
    ),
    "WarmpathSettingsRefused": Case(
        _increasing("warmpath_refused_configurations_total", 1), {"warmpath_refused_configurations_total": "5x120"}
    ),
}


def test_each_alert_has_a_case() -> None:
    assert list(CASES) == [alert["alert"] for alert in ALERTS]


@needs_promtool
def test_prometheus_takes_the_files() -> None:
    """The scrape settings with their rules."""
    checked = subprocess.run(
        [str(PROMTOOL), "check", "config", str(FOLDER / "prometheus.yaml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_alerts_fire_when_they_are_to(tmp_path: Path) -> None:
    """For its case, with its labels and texts; and not for the case just below."""
    tests = [
        _promtool_test(alert, series, fires=fires)
        for alert in ALERTS
        for fires, series in ((True, CASES[alert["alert"]].fires), (False, CASES[alert["alert"]].silent))
    ]
    file = tmp_path / "alerts_test.yaml"
    rules = {"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(rules, sort_keys=False))
    checked = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _promtool_test(alert: dict[str, Any], series: dict[str, str], *, fires: bool) -> dict[str, Any]:
    case = CASES[alert["alert"]]
    labels = dict(case.labels)
    texts = dict(alert["annotations"])
    for label, value in case.labels:
        texts["summary"] = texts["summary"].replace("{{ $labels." + label + " }}", value)
    expected = {
        "exp_labels": {**alert["labels"], **labels},
        "exp_annotations": texts,
    }
    asked = {
        "eval_time": f"{case.minutes}m",
        "alertname": alert["alert"],
        "exp_alerts": [expected] if fires else [],
    }
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": given, "alert_rule_test": [asked]}
