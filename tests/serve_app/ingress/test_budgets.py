"""A tenant's budget at the doors of an ingress: refusals in each API's shape, and what `/v1/usage` tells."""

import asyncio
from typing import Any

from tests.serve_app.ingress.scripted import ReadCheckpoint
from tests.serve_app.ingress.several import Several
from tests.serve_app.ingress.test_models import DOORS, OPERATOR, checkpoint, config_of, digest, key_of, tenants

__all__ = ["checkpoint"]


def test_a_spent_budget_is_refused_at_every_door_and_told_to_its_tenant(checkpoint: ReadCheckpoint) -> None:
    acme, globex = tenants(acme=None, globex=None)
    config = config_of(
        "m0",
        tenants=[acme | {"budget": {"tokens": 30, "period": "day"}}, globex],
        operator_key_sha256=[digest(OPERATOR)],
        prices={"m0": {"input": 1_000_000, "output": 2_000_000}},
    )

    async def run() -> None:
        several = await Several.open(checkpoint, config)

        async def ask(path: str, key: str, body: dict[str, Any] | None = None) -> Any:
            return await several.ask(path, body, key)

        body = DOORS["/v1/chat/completions"] | {"model": "m0"}
        while (answer := await ask("/v1/chat/completions", key_of("acme"), body)).status_code == 200:
            pass
        for path, more in DOORS.items():
            answer = await ask(path, key_of("acme"), more | {"model": "m0"})
            assert answer.status_code == 429, (path, answer.text)
            assert answer.headers["x-should-retry"] == "false" and int(answer.headers["retry-after"]) > 0
            error = answer.json()["error"]
            assert "Your budget of 30 tokens a day is spent" in error["message"]
            assert error["reason"]["limit"] == "budget"
            assert (await ask(path, key_of("globex"), more | {"model": "m0"})).status_code == 200
        document = (await ask("/v1/usage", key_of("acme"))).json()
        (budget,) = document["budgets"]
        total = document["total"]
        assert budget["used"] == total["prompt_tokens"] + total["output_tokens"] >= 30
        assert (budget["left"], budget["limit"], budget["unit"]) == (0, 30, "tokens")
        assert total["cost"] == total["prompt_tokens"] + 2 * total["output_tokens"]
        assert "budgets" not in (await ask("/v1/usage", key_of("globex"))).json()
        assert len((await ask("/v1/usage", OPERATOR)).json()["budgets"]) == 1

    asyncio.run(run())
