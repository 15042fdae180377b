"""Writes the files that Prometheus and Grafana read: ``python -m cluster.observability.build`` (extra ``boards``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.observability.alerts import rules
from cluster.observability.panels import ROWS

FOLDER = Path(__file__).parent / "files"
DASHBOARD = "grafana/dashboards/warmpath.json"
_MADE = "# Made by `python -m cluster.observability.build`; change the tables in cluster/observability/.\n"
_SCRAPE = """\
# One target is the whole app, however many replicas and ingresses there are.
global:
  scrape_interval: 15s
  evaluation_interval: 15s
rule_files: [alerts.yaml]
scrape_configs:
- job_name: warmpath
  metrics_path: /metrics
  # With tenants configured /metrics needs an operator key, which is all that this file holds:
  # authorization: {type: Bearer, credentials_file: operator.key}
  static_configs:
  - targets: ['127.0.0.1:8000']
"""


def provisioning() -> dict[str, dict[str, Any]]:
    """Return what makes Grafana find Prometheus and the dashboard, by file."""
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": "http://127.0.0.1:9090"}
    provider = {"name": "warmpath", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
    return {
        "grafana/provisioning/datasources/prometheus.yaml": {
            "apiVersion": 1,
            "datasources": [{**source, "isDefault": True}],
        },
        "grafana/provisioning/dashboards/warmpath.yaml": {"apiVersion": 1, "providers": [provider]},
    }


def yaml_files() -> dict[str, str]:
    """Return the YAML files by their path below this folder."""
    files = {"alerts.yaml": rules(), **provisioning()}
    dumped = {path: yaml.safe_dump(content, sort_keys=False, width=120) for path, content in files.items()}
    return {path: _MADE + text for path, text in ({"prometheus.yaml": _SCRAPE} | dumped).items()}


def main() -> None:
    """Write all of them."""
    from cluster.observability.grafana import dashboard_json  # the extra's; the rest needs no more than yaml

    for path, text in (yaml_files() | {DASHBOARD: dashboard_json(ROWS)}).items():
        file = FOLDER / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
