"""A real Prometheus scrapes the instance: its metrics pass promtool, and each query of the board works on them.

docs: monitoring
"""

import re
from collections.abc import Iterator

import pytest

from tests.harness.boards import SERIES, WINDOW
from tests.harness.prometheus import HOW, PROMTOOL, WINDOW_OF_SCRAPES, Prometheus, prometheus, promtool
from tests.integration.conftest import eventually
from tests.integration.demo.conftest import KEYS, Served

pytestmark = [pytest.mark.integration, pytest.mark.skipif(PROMTOOL is None, reason=HOW)]

RULES = ("system", "You keep the harbour's books. " * 20)
FAMILY = re.compile(r"(?<![\w{])(warmpath_[a-z0-9_]+)")
NOT_HERE = {"autoscaling", "kv_tier", "feed_mirror", "broken", "requests_waiting", "refusals"}
NOT_HERE |= {"kv_pulls", "prewarm", "handover"}
"""Parts of names of families that this instance need not have: it does not scale, has no tiers, nobody waits or is
refused, and nothing is copied."""


@pytest.fixture(scope="module")
def scraping(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus beside the instance, with traffic of two tenants and of a registered prompt between two scrapes."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), served.url, KEYS["operator"][0]) as server:
        eventually(lambda: bool(server.ask('up{job="warmpath"} == 1')))
        for number in range(4):
            for tenant in ("acme", "globex"):
                served.chat(tenant, RULES, ("user", f"Entry {number}?"))
            served.chat("acme", ("user", f"Entry {number}?"), prompt_ref="clerk@1")
        yield server


def test_promtool_accepts_the_metrics(served: Served) -> None:
    """Names, helps and units of everything that is served are as Prometheus wants them."""
    shown = served.get("/metrics", "operator").text
    assert "warmpath_time_to_first_token_seconds_bucket" in shown
    promtool("check", "metrics", stdin=shown)


def test_every_query_of_the_board_works_on_what_is_scraped(scraping: Prometheus) -> None:
    """None is refused; one whose families the instance has shows data, so no label or join of it is wrong."""
    wanted = {series: FAMILY.findall(series.promql.replace(WINDOW, WINDOW_OF_SCRAPES)) for series in SERIES}
    known = {name for families in wanted.values() for name in families if not any(part in name for part in NOT_HERE)}
    eventually(lambda: known <= set(scraped_names(scraping)))  # some come with a later scrape
    names, asked = set(scraped_names(scraping)), 0
    assert len(names) > 80
    for series, families in wanted.items():
        promql = series.promql.replace(WINDOW, WINDOW_OF_SCRAPES)
        if names.issuperset(families):
            eventually(lambda promql=promql: bool(scraping.ask(promql)))
            asked += 1
        else:
            scraping.ask(promql)  # with `or`, it may show data all the same
    assert asked >= 0.8 * len(SERIES)


def test_the_board_shows_the_traffic(scraping: Prometheus, served: Served) -> None:
    """Times, hit rates by tenant and by prompt, and rates have numbers that fit what was sent."""
    shown = {series.title: series.promql.replace(WINDOW, "5m") for series in SERIES}  # of several, the last
    for title in ("Time to first token", "Time between tokens", "Time of a decision"):
        eventually(lambda title=title: 0 < value(scraping, shown[title]) < 600)
    rates = {row["metric"]["tenant"]: float(row["value"][1]) for row in scraping.ask(shown["Hit rate by tenant"])}
    assert 0 < rates["acme"] < 1
    by_prompt = {row["metric"]["prompt"] for row in scraping.ask(shown["Hit rate by prompt version"])}
    assert "clerk@1" in by_prompt
    assert scraping.firing("WarmpathDown") == []


def scraped_names(server: Prometheus) -> list[str]:
    rows = server.ask('count by (__name__) ({__name__=~"warmpath_.+"})')
    return [row["metric"]["__name__"] for row in rows]


def value(server: Prometheus, promql: str) -> float:
    """Return the number of a query with one series; a query without data is not a number."""
    rows = server.ask(promql)
    return float(rows[0]["value"][1]) if rows else float("nan")
