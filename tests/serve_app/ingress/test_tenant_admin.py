"""Tenants and keys over HTTP: who may change them, what is in force at once, and what is never shown."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from serve_app.engine.protocol import AdapterSpec
from serve_app.tenants import make_api_key
from tests.serve_app.ingress.scripted import ReadCheckpoint
from tests.serve_app.ingress.several import Several
from tests.serve_app.ingress.test_models import CHAT, OPERATOR, checkpoint, config_of, digest, key_of, tenants

__all__ = ["checkpoint"]

CHAT_PATH = "/v1/chat/completions"
BODY = CHAT | {"model": "m0"}


class Desk:
    """An ingress with the tenants acme and globex in its settings, for its operator."""

    def __init__(self, several: Several) -> None:
        self.several = several

    async def ask(self, method: str, path: str, body: Any = None, key: str = OPERATOR) -> httpx.Response:
        transport = httpx.ASGITransport(self.several.application)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body, headers=headers)

    async def get(self, path: str) -> Any:
        answer = await self.ask("GET", f"/v1/admin/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.ask("POST", f"/v1/admin/{path}", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, key: str, model: str = "m0") -> int:
        return (await self.ask("POST", CHAT_PATH, BODY | {"model": model}, key)).status_code

    async def key_id(self, tenant: str) -> str:
        return str((await self.get(f"keys?tenant={tenant}"))["data"][0]["id"])


def running(checkpoint: ReadCheckpoint, walk: Any, **more: Any) -> None:
    async def run() -> None:
        declared = {"tenants": tenants(acme=None, globex=None), "operator_key_sha256": [digest(OPERATOR)]}
        await walk(Desk(await Several.open(checkpoint, config_of("m0", "m1", **declared | more))))

    asyncio.run(run())


def test_a_tenant_lives_from_its_creation_to_its_end(checkpoint: ReadCheckpoint) -> None:
    """Each step holds for the next request, and the log has who did it."""

    async def walk(desk: Desk) -> None:
        made = await desk.post("tenants", name="initech", concurrent_requests=3, cache_share=2, models=["m0"])
        assert (made["source"], made["keys"], made["concurrent_requests"]) == ("database", [], 3)
        key = await desk.post("keys", tenant="initech", label="of the build farm")
        assert key["key"].startswith("wp-") and key["state"] == "active"
        assert await desk.chat(key["key"]) == 200
        assert await desk.chat(key["key"], "m1") == 404  # `models`
        assert (await desk.post("tenants/initech", models=None))["models"] is None
        assert await desk.chat(key["key"], "m1") == 200
        assert desk.several.address.shares.weight("initech") == 2.0
        turned = await desk.post(f"keys/{key['id']}/rotate", overlap_s=3600)
        assert [await desk.chat(one["key"]) for one in (key, turned)] == [200, 200]
        assert turned["replaced"]["id"] == key["id"] and turned["replaced"]["expires_at"] is not None
        assert turned["label"] == "of the build farm"
        for disabled, status in ((True, 401), (False, 200)):
            await desk.post(f"keys/{turned['id']}", disabled=disabled)
            assert await desk.chat(turned["key"]) == status
        await desk.post("tenants/initech", disabled=True)
        refused = await desk.ask("POST", CHAT_PATH, BODY, turned["key"])
        assert refused.status_code == 401 and "is disabled" in refused.json()["error"]["message"]
        await desk.post("tenants/initech", disabled=False)
        assert (await desk.ask("DELETE", f"/v1/admin/keys/{key['id']}")).json()["deleted"]
        assert [await desk.chat(one["key"]) for one in (key, turned)] == [401, 200]
        assert (await desk.ask("DELETE", "/v1/admin/tenants/initech")).json()["deleted"]
        assert await desk.chat(turned["key"]) == 401
        log = (await desk.get("changes?limit=1000"))["data"]
        assert [one["action"] for one in reversed(log)] == [
            "tenant.created", "key.created", "tenant.changed", "key.created", "key.rotated", "key.changed",
            "key.changed", "tenant.changed", "tenant.changed", "key.deleted", "tenant.removed",
        ]  # fmt: skip
        assert {one["tenant"] for one in log} == {"initech"}
        assert {one["operator"] for one in log} == {f"operator_{digest(OPERATOR)[:16]}"}
        assert log[-3]["changes"] == {"models": [["m0"], None]}
        pages, after = [], ""
        while True:
            page = await desk.get(f"changes?limit=4{after}")
            pages += page["data"]
            if not page["has_more"]:
                break
            after = f"&after={page['data'][-1]['id']}"
        assert pages == log

    running(checkpoint, walk)


def test_a_declared_tenant_is_the_base_until_a_reset(checkpoint: ReadCheckpoint) -> None:
    """Its limits go back, its keys do not: one that was disabled stays so."""

    async def walk(desk: Desk) -> None:
        changed = await desk.post("tenants/acme", requests_per_second=1, models=["m1"])
        assert changed["overrides"] == ["models", "requests_per_second"] and changed["source"] == "settings"
        assert await desk.chat(key_of("acme")) == 404
        await desk.post(f"keys/{await desk.key_id('acme')}", disabled=True)
        assert await desk.chat(key_of("acme"), "m1") == 401
        reset = await desk.post("tenants/acme/reset")
        assert (reset["overrides"], reset["models"], reset["requests_per_second"]) == ([], None, None)
        assert await desk.chat(key_of("acme")) == 401
        assert await desk.chat(key_of("globex")) == 200

    running(checkpoint, walk)


def test_nothing_shows_a_key_again(checkpoint: ReadCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Neither lists nor changes nor logs nor the database hold a key or its whole SHA-256."""

    async def walk(desk: Desk) -> None:
        made = await desk.post("keys", tenant="acme", expires_at="2100-01-01T00:00:00+02:00")
        assert made["expires_at"] == "2099-12-31T22:00:00Z"
        turned = await desk.post(f"keys/{made['id']}/rotate")
        shown = [(await desk.ask("GET", f"/v1/admin/{path}")).text for path in ("tenants", "keys", "changes")]
        shown += [caplog.text, (await desk.ask("GET", f"/v1/admin/keys/{made['id']}")).text]
        stored = b"".join(file.read_bytes() for file in desk.several.folder.iterdir())
        for key in (made["key"], turned["key"], OPERATOR, key_of("acme")):
            assert not any(key in text or digest(key) in text for text in shown)
            assert key.encode() not in stored and digest(key).encode() not in stored

    caplog.set_level(logging.DEBUG)
    running(checkpoint, walk)


ROUTES = (
    ("GET", "tenants"), ("POST", "tenants"), ("GET", "tenants/acme"), ("POST", "tenants/acme"),
    ("POST", "tenants/acme/reset"), ("DELETE", "tenants/acme"), ("GET", "keys"), ("POST", "keys"), ("GET", "keys/k"),
    ("POST", "keys/k"), ("POST", "keys/k/rotate"), ("DELETE", "keys/k"), ("GET", "changes"),
)  # fmt: skip


def test_only_operators_may(checkpoint: ReadCheckpoint) -> None:
    """A tenant's key is a 403 at every route, none a 401; an open server without operators has nobody who may."""

    async def walk(desk: Desk) -> None:
        for method, path in ROUTES:
            for key, status in ((key_of("acme"), 403), ("", 401), ("wp-guess", 401)):
                answer = await desk.ask(method, f"/v1/admin/{path}", {} if method == "POST" else None, key)
                assert answer.status_code == status, (method, path, answer.text)

    async def opened(desk: Desk) -> None:
        for method, path in ROUTES:
            answer = await desk.ask(method, f"/v1/admin/{path}", {} if method == "POST" else None, "wp-any")
            assert answer.status_code == 403 and "operator_key_sha256" in answer.text

    running(checkpoint, walk)
    running(checkpoint, opened, tenants=[], operator_key_sha256=[])


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "sentence"),
    [
        ("POST", "tenants", {"name": "acme"}, 409, "There is a tenant 'acme' already"),
        ("POST", "tenants", {"name": "a b"}, 400, "name: must be 1 to 64 letters"),
        ("POST", "tenants", {}, 400, "name is missing"),
        ("POST", "tenants", {"name": "x", "tokens_per_minute": 0}, 400, "tokens_per_minute: must be at least 1."),
        ("POST", "tenants", {"name": "x", "token_per_minute": 9}, 400, "did you mean tokens_per_minute?"),
        ("POST", "tenants", {"name": "x", "key_sha256": ["a"]}, 400, "POST /v1/admin/keys makes a key"),
        ("POST", "tenants", {"name": "x", "budget": {"money": 5}}, 400, "needs `prices`"),
        ("POST", "tenants", {"name": "x", "budget": 7}, 400, "budget: must be pairs"),
        ("POST", "tenants", {"name": "x", "models": ["m" * 9000]}, 400, "at most 8192 bytes"),
        ("POST", "tenants", [], 400, "must be a JSON object"),
        ("POST", "tenants/acme", {}, 400, "Nothing is to be changed"),
        ("POST", "tenants/acme", {"trust_group": "g"}, 400, "would lose its cache"),
        ("POST", "tenants/acme", {"name": "zeta"}, 400, "name cannot change"),
        ("POST", "tenants/none", {"disabled": True}, 404, "There is no tenant 'none'"),
        ("DELETE", "tenants/acme", None, 409, "set `disabled` to true"),
        ("POST", "keys", {"tenant": "none"}, 404, "There is no tenant 'none'"),
        ("POST", "keys", {"tenant": "acme", "expires_at": "soon"}, 400, "a moment with its time zone"),
        ("POST", "keys", {"tenant": "acme", "expires_at": "2020-01-01T00:00:00Z"}, 400, "must lie in the future"),
        ("POST", "keys", {"tenant": "acme", "lable": "x"}, 400, "did you mean 'label'?"),
        ("POST", "keys", {"tenant": "acme", "label": "x" * 65}, 400, "label must be at most 64 letters"),
        ("POST", "keys/key_none", {"disabled": True}, 404, "GET /v1/admin/keys lists them"),
        ("DELETE", f"keys/key_{digest(key_of('acme'))[:16]}", None, 409, "is in the settings"),
        ("POST", f"keys/key_{digest(key_of('acme'))[:16]}", {}, 400, "Nothing is to be changed"),
        ("POST", f"keys/key_{digest(key_of('acme'))[:16]}/rotate", {"overlap_s": -1}, 400, "overlap_s must be"),
        ("GET", "changes?limit=0", None, 400, "from 1 to 1000"),
        ("GET", "keys?tenant=none", None, 404, "There is no tenant 'none'"),
    ],
)  # fmt: skip
def test_mistakes_change_nothing_and_name_the_remedy(
    checkpoint: ReadCheckpoint, method: str, path: str, body: Any, status: int, sentence: str
) -> None:
    async def walk(desk: Desk) -> None:
        answer = await desk.ask(method, f"/v1/admin/{path}", body)
        assert answer.status_code == status, answer.text
        assert sentence in answer.json()["error"]["message"], answer.text
        assert (await desk.get("changes"))["data"] == []
        assert await desk.chat(key_of("acme")) == 200

    running(checkpoint, walk)


def test_an_open_server_closes_with_its_first_tenant_and_never_opens_again(checkpoint: ReadCheckpoint) -> None:
    """Without tenants where there were some, everybody is refused, and the operator is told how to go on."""

    async def walk(desk: Desk) -> None:
        assert await desk.chat("") == 200
        await desk.post("tenants", name="initech")
        assert await desk.chat("") == 401
        assert (await desk.ask("DELETE", "/v1/admin/tenants/initech")).status_code == 200
        refused = await desk.ask("POST", CHAT_PATH, BODY, "")
        assert refused.status_code == 503 and "require_tenants: false" in refused.json()["error"]["message"]
        assert (await desk.ask("GET", "/health", key=OPERATOR)).json()["refuses_all"]
        assert "refuses_all" not in (await desk.ask("GET", "/health", key="")).json()
        await desk.post("tenants", name="initech")
        made = await desk.post("keys", tenant="initech")
        assert await desk.chat(made["key"]) == 200
        assert await desk.chat(make_api_key()[0]) == 401

    running(checkpoint, walk, tenants=[])


def test_a_name_that_is_given_again_opens_nothing_of_before(checkpoint: ReadCheckpoint) -> None:
    """Neither responses, files, batches, usage, budget, cache, requests nor adapters; `restore` takes them over."""

    async def walk(desk: Desk) -> None:
        adapters = desk.several.address.first.adapters

        async def begin(**more: Any) -> tuple[Any, str]:
            made = await desk.post("tenants", name="initech", budget={"tokens": 10**6}, **more)
            assert made["name"] == "initech" and (await desk.get("tenants/initech"))["id"] == made["id"]
            key = await desk.post("keys", tenant="initech")
            assert key["tenant"] == "initech" and await desk.key_id("initech") == key["id"]
            return made["id"], str(key["key"])

        async def ask(path: str, body: Any = None, key: str = OPERATOR) -> Any:
            return (await desk.ask("GET" if body is None else "POST", path, body, key)).json()

        async def told(key: str) -> tuple[int, int, int]:
            usage, rows = await ask("/v1/usage", key=key), await ask("/v1/tenants/initech/requests", key=key)
            return usage["total"]["requests"], usage["budgets"][0]["used"], len(rows["data"])

        async def lists(key: str) -> list[list[str]]:
            """Return the ids of files, batches, message batches and models."""
            paths = "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/models"
            return [[one["id"] for one in (await ask(path, key=key))["data"]] for path in paths]

        async def leave(key: str) -> list[list[str]]:
            form = {"file": ("a.jsonl", (json.dumps(line) + "\n").encode())}
            transport = httpx.ASGITransport(desk.several.application)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", headers={"authorization": f"Bearer {key}"}
            ) as client:
                file = (await client.post("/v1/files", data={"purpose": "batch"}, files=form)).json()
            batch = await ask("/v1/batches", batched | {"input_file_id": file["id"]}, key)
            said = await ask("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": message}]}, key)
            assert [file["object"], batch["object"], said["type"]] == ["file", "batch", "message_batch"]
            return await lists(key)

        async def end(key: str) -> None:
            assert (await desk.ask("DELETE", "/v1/admin/tenants/initech")).status_code == 200
            assert (await desk.ask("GET", "/v1/files", key=key)).status_code == 401

        message = {"model": "m0", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        line = {"custom_id": "a", "method": "POST", "url": CHAT_PATH, "body": BODY}
        batched = {"endpoint": CHAT_PATH, "completion_window": "24h"}
        asked = {"input": "Who are you?", "model": "m0", "max_output_tokens": 16}
        name, key = await begin()
        first = await ask("/v1/responses", asked, key)
        assert name == "initech" and (await ask(f"/v1/responses/{first['id']}", key=key))["id"] == first["id"]
        before, generations = await told(key), desk.several.scripts["m0"].asked
        desk.several.address.journal.add("initech", {"type": "decision", "at_s": 1.0})
        adapters.merge([adapters.next_entry("polite", AdapterSpec("polite", "0" * 16, "/polite"), (name,))])
        left, old_key = await leave(key), key
        assert [len(ids) for ids in left] == [1, 1, 1, 3]
        await end(key)
        name, key = await begin()
        assert name == "initech~2" and await lists(key) == [[], [], [], ["m0", "m1"]]
        for path in (f"/v1/files/{left[0][0]}", f"/v1/files/{left[0][0]}/content", f"/v1/batches/{left[1][0]}",
                     f"/v1/messages/batches/{left[2][0]}", "/v1/models/polite"):  # fmt: skip
            assert (await desk.ask("GET", path, key=key)).status_code == 404, path
        assert (await desk.ask("GET", "/v1/files", key=old_key)).status_code == 401
        assert (await desk.ask("GET", f"/v1/responses/{first['id']}", key=key)).status_code == 404
        go_on = await desk.ask("POST", "/v1/responses", asked | {"previous_response_id": first["id"]}, key)
        assert go_on.status_code == 400 and await told(key) == (0, 0, 0)
        second = await ask("/v1/responses", asked, key)
        assert generations[0].root != generations[1].root and (await told(key))[:2] == before[:2]
        explained = await ask("/v1/cache/explain", asked | {"tenant": "initech"})
        assert explained["tenant"] == "initech~2"
        left = await leave(key)
        await end(key)
        name, key = await begin(restore=True)
        assert name == "initech~2" and (await ask(f"/v1/responses/{second['id']}", key=key))["id"] == second["id"]
        assert await lists(key) == left
        assert (await desk.ask("POST", "/v1/admin/tenants", {"name": "x", "restore": 1})).status_code == 400

    running(checkpoint, walk)
