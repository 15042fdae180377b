"""GET /v1/tenants/...: an operator sees all tenants over all models, a tenant itself alone."""

import asyncio
from typing import Any

import pytest

from router.protocol.events import StatsReport
from tests.serve_app.ingress.scripted import ReadCheckpoint
from tests.serve_app.ingress.several import Several
from tests.serve_app.ingress.test_models import CHAT, OPERATOR, checkpoint, config_of, digest, key_of, tenants

__all__ = ["checkpoint"]

STATS, CHATS = "/v1/tenants/stats", "/v1/chat/completions"


async def several_of(checkpoint: ReadCheckpoint) -> Several:
    acme, globex = tenants(acme=None, globex=None)
    config = config_of(
        "m0",
        "m1",
        tenants=[acme | {"requests_per_second": 0.001, "budget": {"tokens": 10_000}, "cache_share": 3}, globex],
        operator_key_sha256=[digest(OPERATOR)],
        prices={name: {"input": 1_000_000, "cached": 0, "output": 2_000_000} for name in ("m0", "m1")},
    )
    return await Several.open(checkpoint, config)


async def sent(several: Several) -> None:
    """Send two requests of each tenant, one for each model; the second one of acme is refused at the door."""
    for tenant, statuses in (("acme", (200, 429)), ("globex", (200, 200))):
        for model, status in zip(("m0", "m1"), statuses, strict=True):
            answer = await several.ask(CHATS, CHAT | {"model": model}, key_of(tenant))
            assert answer.status_code == status, answer.text


def test_an_operator_sees_every_tenant_and_a_tenant_itself_alone(checkpoint: ReadCheckpoint) -> None:
    """Requests, refusals by limit with the remedy, tokens, times, budget and money, over all models.

    docs: tenants
    """

    async def run() -> None:
        several = await several_of(checkpoint)
        await sent(several)
        document = (await several.ask(STATS, key=OPERATOR)).json()
        assert (document["object"], document["viewer"], document["window_s"]) == ("tenants.stats", "operator", 60)
        rows = {row["tenant"]: row for row in document["data"]}
        assert list(rows) == ["acme", "globex"]
        acme, globex = rows["acme"], rows["globex"]
        assert (acme["requests"], acme["refused"], globex["requests"], globex["refused"]) == (1, 1, 2, 0)
        ((refused,), (alarm,)) = acme["refused_by"], document["refusals"]
        assert (refused["limit"], alarm["tenant"], alarm["limit"]) == ("requests_per_second", "acme", refused["limit"])
        assert "requests_per_second" in alarm["remedy"]
        assert globex["prompt_tokens"] == 2 * acme["prompt_tokens"] > 0
        assert globex["output_tokens"] == 2 * acme["output_tokens"] > 0
        for row in rows.values():
            assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["e2e_p95_s"] * 1.2
            assert row["today"]["cost"] > 0
        assert (acme["budget"]["limit"], "budget" in globex) == (10_000, False)
        own = (await several.ask(STATS, key=key_of("globex"))).json()
        assert [row["tenant"] for row in own["data"]] == ["globex"]
        assert own["data"][0]["requests"] == 2
        assert (own["refusals"], own["viewer"], "acme" in str(own)) == ([], "tenant", False)
        assert (await several.ask(STATS)).status_code == 401

    asyncio.run(run())


def test_caches_are_told_against_each_tenants_share(checkpoint: ReadCheckpoint) -> None:
    """Shares are parts of all pools by weight; only operators see what others hold. Without reports there are none."""

    async def run() -> None:
        several = await several_of(checkpoint)
        bare = (await several.ask(STATS, key=OPERATOR)).json()
        assert all("kv_tokens" not in row for row in bare["data"]) and "kv" not in bare
        await asyncio.sleep(0)
        labels = ("engine", "simulated")
        owned = [(owner, number) for owner, number in (("acme", 3.0), ("(public)", 2.0))]
        report = StatsReport(
            (
                *(("warmpath_tenant_kv_cache_blocks", (labels, ("tenant", owner)), blocks) for owner, blocks in owned),
                *(("warmpath_kv_cache_blocks", (labels, ("state", state)), 4.0) for state in ("used", "free")),
            )
        )
        for name in ("m0", "m1"):
            several.core(name).apply(f"replica-of-{name}", [report])
        several.address.tables.forget((None, 60))
        document = (await several.ask(STATS, key=OPERATOR)).json()
        size = several.address.config.block_size
        rows = {row["tenant"]: (row["kv_tokens"], row["kv_share_tokens"]) for row in document["data"]}
        assert rows == {"acme": (6 * size, 12 * size), "globex": (0, 4 * size)}
        assert document["kv"] == {"pool_tokens": 16 * size, "held_tokens": {"acme": 6 * size, "(public)": 4 * size}}
        own = (await several.ask(STATS, key=key_of("globex"))).json()
        assert "kv" not in own and own["data"][0]["kv_share_tokens"] == 4 * size

    asyncio.run(run())


@pytest.mark.parametrize(("window", "status"), [("300", 200), ("900", 200), ("61", 400), ("x", 400), ("", 400)])
def test_the_span_is_one_of_a_few(checkpoint: ReadCheckpoint, window: str, status: int) -> None:
    """So that answers can be shared."""

    async def run() -> None:
        answer = await (await several_of(checkpoint)).ask(f"{STATS}?window_s={window}", key=OPERATOR)
        assert answer.status_code == status
        if status == 400:
            assert "60, 300, 900" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_refused_requests_are_listed_for_their_tenant_and_operators(checkpoint: ReadCheckpoint) -> None:
    """Another tenant gets a 403, whether the name exists or not."""

    async def run() -> None:
        several = await several_of(checkpoint)
        await sent(several)

        async def ask(tenant: str, key: str) -> Any:
            return await several.ask(f"/v1/tenants/{tenant}/requests", key=key)

        for key in (OPERATOR, key_of("acme")):
            (row,) = (await ask("acme", key)).json()["data"]
            assert (row["type"], row["tenant"], row["limit"]) == ("refusal", "acme", "requests_per_second")
            assert "requests_per_second" in row["remedy"]
        assert (await ask("globex", key_of("globex"))).json()["data"] == []
        refused = [await ask(name, key_of("globex")) for name in ("acme", "nobody")]
        assert [answer.status_code for answer in refused] == [403, 403]
        assert len({answer.json()["error"]["message"] for answer in refused}) == 1

    asyncio.run(run())
