"""Figures of versions: warm and cold separately, several ingresses merged, all bounded."""

from serve_app.prompts.traffic import PromptTraffic, Use, merged

USE = Use("acme", "demo", None, None, chat=True)


def test_cold_requests_are_counted_over_all_ingresses() -> None:
    """A request is warm if all of the prompt was cached."""
    parts = [PromptTraffic({"clerk@1": 64}.__getitem__) for _ in range(2)]
    for traffic in parts:
        for cached_tokens in (48, 64, 80):
            traffic.add("clerk@1", 100, cached_tokens)
    total = merged(traffic.report()[0] for traffic in parts)["clerk@1"].to_json()
    assert total == {"requests": 6, "cold_requests": 2, "hit_rate": 0.64}
    assert parts[0].report()[0]["clerk@1"].requests == 3, "merging leaves its inputs unchanged"


def test_uses_are_distinguished_if_their_kv_differs() -> None:
    """Tenants and salts share a public prompt's KV, and no other; the latest uses are kept."""
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
