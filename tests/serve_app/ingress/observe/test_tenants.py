"""The rows of the table of tenants, without an ingress: rates, caches, refusals, money, order."""

from collections import Counter
from decimal import Decimal

from serve_app.config.tenants import PriceConfig
from serve_app.ingress.observe.tenants import (
    MAX_ROWS,
    held_tokens,
    refusals_by_tenant,
    spent_today,
    tenant_row,
    tenant_rows,
)
from serve_app.live.tally import Bucket
from serve_app.usage import Counts, UsageKey


def bucket(**counts: int) -> Bucket:
    return Counter(counts)


def test_a_row_has_counts_and_rates_of_its_span() -> None:
    """A tenant without requests has a row too, with nulls for what is unknown."""
    counts = bucket(requests=30, failed=1, refused=2, prompt_tokens=600, cached_tokens=450, tokens=60)
    counts |= Counter({"refused by ingress: budget": 2, "missed by time": 3, "lost by time": 90})
    row = tenant_row("acme", counts, 60.0)
    assert (row["tenant"], row["requests"], row["failed"], row["refused"]) == ("acme", 30, 1, 2)
    assert (row["requests_per_s"], row["prompt_tokens_per_s"], row["output_tokens_per_s"]) == (0.5, 10.0, 1.0)
    assert (row["cached_tokens"], row["hit_rate"]) == (450, 0.75)
    assert [(one["limit"], one["requests"]) for one in row["refused_by"]] == [("budget", 2)]
    (miss,) = row["missed_by"]
    assert (miss["reason"], miss["requests"], miss["lost_tokens"]) == ("time", 3, 90)
    assert miss["remedy"].startswith("Move the date or time")
    idle = tenant_row("globex", Counter(), 60.0)
    assert (idle["requests_per_s"], idle["hit_rate"], idle["ttft_p95_s"], idle["refused_by"]) == (0.0, None, None, [])


def test_the_busiest_tenants_come_first_and_one_sees_itself_alone() -> None:
    """Counts of all ingresses are summed. A refused request is one, too."""
    here = {"b": bucket(requests=2), "c": bucket(refused=9)}
    there = {"b": bucket(requests=3), "none": bucket(failed=1)}
    rows = tenant_rows([here, there], ["a", "b", "c"], 60.0)
    assert [(row["tenant"], row["requests"], row["refused"]) for row in rows] == [
        ("c", 0, 9),
        ("b", 5, 0),
        ("none", 0, 0),
        ("a", 0, 0),
    ]
    assert [row["tenant"] for row in tenant_rows([here, there], ["b"], 60.0, "b")] == ["b"]
    assert [row["tenant"] for row in tenant_rows([here, there], ["a"], 60.0, "a")] == ["a"]
    many = [f"t{number}" for number in range(MAX_ROWS + 1)]
    assert [row["tenant"] for row in tenant_rows([here, there], many, 60.0)][:2] == ["c", "b"]
    assert len(tenant_rows([here, there], many, 60.0)) == MAX_ROWS


def test_refusals_name_tenant_limit_and_remedy() -> None:
    counts = {"a": Counter({"refused by ingress: budget": 1}), "b": Counter({"refused by port: odd": 5})}
    rows = refusals_by_tenant([counts, counts], None)
    assert [(row["tenant"], row["place"], row["limit"], row["requests"]) for row in rows] == [
        ("b", "port", "odd", 10),
        ("a", "ingress", "budget", 2),
    ]
    assert all(row["remedy"].endswith(".") for row in rows)
    assert [row["tenant"] for row in refusals_by_tenant([counts], "a")] == ["a"]


def test_caches_are_summed_over_replicas_in_tokens() -> None:
    def report(acme: float, free: float) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        pool = [
            ("warmpath_kv_cache_blocks", (("state", state),), number)
            for state, number in (("used", acme), ("free", free))
        ]
        return [("warmpath_tenant_kv_cache_blocks", (("engine", "torch"), ("tenant", "acme")), acme), *pool]

    held, pool = held_tokens([report(3, 5), report(2, 6), []], 16)
    assert (held["acme"], held["globex"], pool) == (80, 0, 256)


def test_money_of_today_is_summed_by_tenant() -> None:
    price = PriceConfig(input=Decimal(10), cached=Decimal(1), output=Decimal(20))
    rows = [
        (UsageKey("2027-01-01", tenant, model, ""), Counts(1, 1, 1_000_000, 500_000, 0, 100_000))
        for tenant, model in (("a", "m"), ("a", "m"), ("b", "m"), ("b", "free"))
    ]
    spent = spent_today(rows, {"m": price})
    assert spent["a"] == {"cost": 2 * (5 + 0.5 + 2), "saved": 2 * 4.5}
    assert spent["b"] == {"cost": 7.5, "saved": 4.5}
