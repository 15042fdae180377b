"""A real Prometheus with the configuration and the rules of `cluster/`, on loopback, in a temporary folder."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port
from tests.harness.boards import BOARDS, FOLDER

HOW = "Prometheus is not installed: apt-get install --no-install-recommends prometheus"
PROMTOOL = shutil.which("promtool")
SCRAPE = "1s"
WINDOW_OF_SCRAPES = "20s"
"""A window of many scrapes, short enough for a test's traffic to be a visible part of it."""


def promtool(*arguments: str | Path, stdin: str | None = None) -> None:
    """Run promtool, which has to succeed. ``stdin``: a text for it."""
    checked = subprocess.run([str(PROMTOOL), *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server. ``url``: its address."""

    url: str

    def ask(self, promql: str) -> list[dict[str, Any]]:
        """Return the series of a query now, as ``{metric: ..., value: [time, text]}``. Fails if it is refused."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": promql}, timeout=60).json()
        assert answer["status"] == "success", f"{promql}: {answer}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Return the labels of each firing alert of a rule."""
        answer = httpx.get(f"{self.url}/api/v1/alerts", timeout=60).json()
        of_rule = [one for one in answer["data"]["alerts"] if one["labels"]["alertname"] == alert]
        return [one["labels"] for one in of_rule if one["state"] == "firing"]


@contextmanager
def prometheus(folder: Path, scraped: str, key: str) -> Iterator[Prometheus]:
    """Run Prometheus over an instance's address with an operator's key. Skips the test where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(HOW)
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    config["rule_files"] = [str(BOARDS / "alerts.yaml")]
    (folder / "operator.key").write_text(key)
    job = config["scrape_configs"][0]
    job["authorization"] = {"type": "Bearer", "credentials_file": str(folder / "operator.key")}
    job["static_configs"] = [{"targets": [scraped.removeprefix("http://")]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with held_port() as port:
        command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/-/ready"):
            yield Prometheus(url)
