"""Figures of versions: warm and cold apart, none of too few, several ingresses' as one's, all bounded."""

from __future__ import annotations

from serve_app.prompts.traffic import MIN_WARM, PromptTraffic, Use, merged

USE = Use("acme", "demo", None, None, chat=True)


def test_warm_times_are_told_once_there_are_enough() -> None:
    """A request is warm when all of the prompt was cached; cold ones are in no warm time."""
    traffic = PromptTraffic({"clerk@1": 64}.__getitem__)
    traffic.add("clerk@1", 100, 48, 9.0)
    for _ in range(MIN_WARM - 1):
        traffic.add("clerk@1", 100, 64, 0.5)
    few = traffic.report()[0]["clerk@1"].to_json()
    assert (few["requests"], few["cold_requests"], few["warm_ttft_p50_s"]) == (MIN_WARM, 1, None)
    traffic.add("clerk@1", 100, 80, 0.5)
    enough = traffic.report()[0]["clerk@1"].to_json()
    assert (enough["cold_requests"], enough["warm_ttft_p50_s"], enough["warm_ttft_p99_s"]) == (1, 0.5, 0.5)
    assert enough["hit_rate"] == round((48 + 64 * (MIN_WARM - 1) + 80) / (100 * (MIN_WARM + 1)), 4)


def test_several_ingresses_are_shown_as_one() -> None:
    parts = [PromptTraffic(), PromptTraffic()]
    for traffic in parts:
        for _ in range(MIN_WARM - 1):
            traffic.add("clerk@1", 10, 5, 0.1)
    total = merged(traffic.report()[0] for traffic in parts)["clerk@1"].to_json()
    assert (total["requests"], total["hit_rate"], total["warm_ttft_p50_s"]) == (2 * (MIN_WARM - 1), 0.5, 0.1)
    assert parts[0].report()[0]["clerk@1"].requests == MIN_WARM - 1, "what was merged is as it was"


def test_ways_to_ask_are_told_apart_as_far_as_their_kv_is() -> None:
    """Tenants and salts share a public prompt's KV, and none else; the latest ways are kept."""
    traffic = PromptTraffic()
    others = [USE._replace(tenant="globex", cache_salt="s"), USE._replace(chat=False), USE._replace(lora_name="pirate")]
    for use in (USE, *others):
        traffic.add_use("clerk@1", use, public=True)
        traffic.add_use("pilot@1", use, public=False)
    uses = traffic.report()[1]
    assert uses["clerk"] == others
    assert uses["pilot"] == [USE, *others]
    for number in range(1000):
        traffic.add_use("pilot@1", USE._replace(cache_salt=str(number)), public=False)
    assert 1 < len(traffic.report()[1]["pilot"]) < 100
