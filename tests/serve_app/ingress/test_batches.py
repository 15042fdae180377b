"""Files and batches over a real socket with the real clients; the model's text is scripted."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from serve_app.batch import batch_run
from serve_app.batch import files as files_module
from serve_app.batch.batch_file import APIS
from serve_app.batch.batches import Batches, StoredBatch
from serve_app.batch.files import Files
from serve_app.config.tenants import TenantConfig
from serve_app.errors import LimitReason, RateLimited
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.ingress.batches import BatchDesk, ModelGate
from serve_app.stored.objects import StoredObjects
from serve_app.stored.url import open_database
from serve_app.tenants import Tenant
from tests.serve_app.ingress.scripted import BOUNDS, PATIENCE_S, Script, scripted

KEYS = {"acme": "wp-acme", "globex": "wp-globex"}
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ENDED = ("completed", "failed", "expired", "cancelled")


def customers() -> list[TenantConfig]:
    return [TenantConfig(name=name, key_sha256=[sha256(key.encode()).hexdigest()]) for name, key in KEYS.items()]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored") / "responses.sqlite"


@pytest.fixture(scope="module")
def served(demo_model_path: Path, database: Path) -> Iterator[tuple[str, Script]]:
    backend = open_database(None, database, BOUNDS)
    with scripted(demo_model_path, customers=customers(), backend=backend, place="first") as running:
        yield running


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    served[1].clear()
    served[1].text = "It rains."
    return served[1]


@pytest.fixture(scope="module")
def clients(served: tuple[str, Script]) -> dict[str, OpenAI]:
    return {name: OpenAI(base_url=f"{served[0]}/v1", api_key=key, max_retries=0) for name, key in KEYS.items()}


@pytest.fixture
def client(clients: dict[str, OpenAI]) -> OpenAI:
    return clients["acme"]


@pytest.fixture(scope="module")
def claude(served: tuple[str, Script]) -> Anthropic:
    return Anthropic(base_url=served[0], api_key=KEYS["acme"], max_retries=0)


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    body = {"model": "demo", "max_tokens": 9, "messages": HI} | body if url == CHAT else {"model": "demo"} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def begin(client: OpenAI, *lines: str, url: Any = CHAT, encoding: str = "utf-8", **fields: Any) -> openai.types.Batch:
    """Upload lines and start a batch of them."""
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode(encoding)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **fields)


def until(client: OpenAI, batch: openai.types.Batch, *statuses: str) -> openai.types.Batch:
    deadline_s = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch.id)).status not in (statuses or ENDED):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.02)
    return batch


def lines_of(client: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a result file by custom_id, each once; none of no file."""
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_batch_answers_its_lines_as_their_api_would(client: OpenAI, script: Script) -> None:
    """In any order of running; what fails is in a file of its own, with the API's error. docs: batch"""
    batch = begin(
        client,
        *(line(f"c{number}") for number in range(20)),
        line("unknown model", model="none"),
        line("no message", messages=[]),
        line("streamed", stream=True, stream_options={"include_usage": True}, verbose=1),
        "",
        metadata={"night": "1"},
    )
    assert (batch.status, batch.object, batch.request_counts and batch.request_counts.total) == (
        "validating",
        "batch",
        0,
    )
    batch = until(client, batch)
    assert batch.status == "completed" and batch.metadata == {"night": "1"} and batch.errors is None
    assert batch.request_counts is not None and batch.usage is not None
    assert batch.request_counts.to_dict() == {"total": 23, "completed": 21, "failed": 2}
    out, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert [*out] == [*(f"c{number}" for number in range(20)), "streamed"]
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in out.values()} == {"It rains."}
    assert {one["response"]["status_code"] for one in out.values()} == {200}
    assert out["streamed"]["response"]["warning"] == "unknown fields ignored: verbose"
    assert {name: one["response"]["status_code"] for name, one in bad.items()} == {
        "unknown model": 404,
        "no message": 400,
    }
    assert bad["unknown model"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert len({one["id"] for one in (*out.values(), *bad.values())}) == 23
    assert {generation.order for generation in script.asked[-21:]} == {2**32}, "as flex"
    assert batch.usage.output_tokens == sum(
        one["response"]["body"]["usage"]["completion_tokens"] for one in out.values()
    )
    assert batch.usage.input_tokens_details.cached_tokens == 21 * 16


@pytest.mark.parametrize(
    ("url", "body", "read"),
    [
        (COMPLETION, {"prompt": "Hi", "max_tokens": 9}, lambda body: body["choices"][0]["text"]),
        (RESPONSE, {"input": "Hi"}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
def test_completions_and_responses_too(
    client: OpenAI, script: Script, url: str, body: dict[str, Any], read: Callable[[Any], str]
) -> None:
    """A byte order mark is no part of the first line; a response of a batch is stored as any other."""
    batch = until(client, begin(client, line("a", url, **body), line("b", url, **body), url=url, encoding="utf-8-sig"))
    out = lines_of(client, batch.output_file_id)
    assert [*out] == ["a", "b"] and batch.model == "demo"
    assert read(out["a"]["response"]["body"]) == "It rains."
    if url == RESPONSE:
        assert client.responses.retrieve(out["b"]["response"]["body"]["id"]).output_text == "It rains."


def test_all_calls_of_openais_client(served: tuple[str, Script], client: OpenAI, script: Script) -> None:
    """Files: created from bytes, paths and streams, listed by page and purpose, read and deleted; batches listed."""
    made = [client.files.create(file=(f"{at}.txt", b"x" * at), purpose="user_data") for at in (1, 300_000, 0)]
    assert client.files.wait_for_processing(made[0].id).status == "processed"
    assert [client.files.content(file.id).read() for file in made] == [b"x", b"x" * 300_000, b""]
    with pytest.warns(DeprecationWarning):
        assert client.files.retrieve_content(made[0].id) == "x"
    assert client.files.retrieve(made[1].id) == made[1]
    listed = client.files.list(purpose="user_data", limit=2)
    assert [file.id for file in listed.data] == [made[2].id, made[1].id] and listed.has_more
    assert [file.id for file in listed] == [file.id for file in reversed(made)], "with the next page"
    assert [file.id for file in client.files.list(purpose="user_data", order="asc")] == [file.id for file in made]
    expiring = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert expiring.expires_at == expiring.created_at + 3600
    for file in made:
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            client.files.retrieve(file.id)
    batches = [until(client, begin(client, line("a"))) for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [batches[2].id, batches[1].id] and page.has_more
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == [batch.id for batch in reversed(batches)]
    with pytest.raises(openai.ConflictError, match="completed cannot be cancelled"):
        client.batches.cancel(batches[0].id)

    async def others() -> None:
        async with AsyncOpenAI(base_url=client.base_url, api_key=KEYS["acme"], max_retries=0) as made:
            file = await made.files.create(file=("a.jsonl", line("a").encode()), purpose="batch")
            batch = await made.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            assert (await made.batches.retrieve(batch.id)).id == batch.id
            assert (await made.files.content(file.id)).text == line("a")
            assert batch.id in {one.id async for one in made.batches.list(limit=1)}
            assert file.id in {one.id async for one in made.files.list(purpose="batch")}
            with suppress(openai.ConflictError):  # it may have ended
                await made.batches.cancel(batch.id)

    asyncio.run(others())


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        ([line("a"), "{", line("b")], [("invalid_json_line", 2)]),
        ([line("a"), line("b"), line("a")], [("duplicate_custom_id", 3)]),
        (['{"custom_id": "a"}'], [("invalid_request", 1)]),
        ([line("a"), line("b", COMPLETION, prompt="x")], [("mismatched_url", 2)]),
        ([line("a").replace("POST", "GET"), "[]"], [("invalid_request", 1), ("invalid_json_line", 2)]),
        (["", " "], [("empty_file", None)]),
    ],
)
def test_a_file_that_cannot_be_run_fails_whole(
    client: OpenAI, script: Script, lines: list[str], errors: list[tuple[str, int | None]]
) -> None:
    """The errors name their lines, and nothing is asked for."""
    before = len(script.asked)
    batch = until(client, begin(client, *lines))
    assert batch.status == "failed" and batch.output_file_id is batch.error_file_id is None
    assert batch.errors is not None and batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == errors
    assert all(error.message for error in batch.errors.data)
    assert len(script.asked) == before


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "forever"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(client: OpenAI, script: Script, fields: dict[str, Any], param: str) -> None:
    file = client.files.create(file=("a.jsonl", line("a").encode()), purpose="batch")
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields})
    assert refused.value.param == param
    text = client.files.create(file=("a.txt", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="upload it as batch"):
        client.batches.create(input_file_id=text.id, endpoint=CHAT, completion_window="24h")


def test_a_tenant_sees_only_its_own(clients: dict[str, OpenAI], claude: Anthropic, script: Script) -> None:
    """Another's file and batch do not exist, and its id starts none. docs: isolation"""
    acme, globex = clients["acme"], clients["globex"]
    batch = until(acme, begin(acme, line("a")))
    messages = claude.messages.batches.create(requests=[message("a")])
    assert batch.output_file_id is not None
    asks: list[Callable[[], Any]] = [
        lambda: globex.files.retrieve(batch.input_file_id),
        lambda: globex.files.content(batch.output_file_id or ""),
        lambda: globex.files.delete(batch.input_file_id),
        lambda: globex.batches.retrieve(batch.id),
        lambda: globex.batches.cancel(batch.id),
        lambda: acme.batches.retrieve(messages.id),
        lambda: globex.batches.retrieve(messages.id),
    ]
    for ask in asks:
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError, match="There is no file"):
        globex.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert [*globex.files.list()] == [] and [*globex.batches.list()] == []
    other = Anthropic(base_url=claude.base_url, api_key=KEYS["globex"], max_retries=0)
    assert [*other.messages.batches.list()] == []
    for call in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            call(messages.id)
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=acme.base_url, api_key="wrong", max_retries=0).files.list()


def test_a_cancelled_batch_keeps_what_was_answered(client: OpenAI, script: Script) -> None:
    """The others are in the error file, and the input cannot be deleted before the end."""
    script.ends = asyncio.Semaphore(0)
    before = len(script.asked)
    batch = begin(client, *(line(f"c{number}") for number in range(30)))
    wait(lambda: len(script.asked) >= before + 4)
    script.end(3)
    wait(lambda: len(script.asked) >= before + 7)
    assert (until(client, batch, "in_progress").request_counts or batch).to_dict()["total"] == 30
    with pytest.raises(openai.ConflictError, match="still reads this file"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = until(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 30, "completed": 3, "failed": 0}
    out, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert (len(out), len(bad)) == (3, 27) and len({**out, **bad}) == 30
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    assert client.files.delete(batch.input_file_id).deleted
    wait(lambda: script.cancelled > 0)


def test_a_batch_expires_with_what_was_answered(client: OpenAI, script: Script, database: Path) -> None:
    script.ends = asyncio.Semaphore(0)
    before = len(script.asked)
    batch = begin(client, *(line(f"c{number}") for number in range(8)))
    wait(lambda: len(script.asked) >= before + 4)
    script.end(2)
    wait(lambda: len(script.asked) >= before + 6)

    def expire(batch: StoredBatch) -> bool:
        batch.expires_at = time.time()
        return True

    async def change() -> None:
        objects = StoredObjects(open_database(None, database, BOUNDS), b"s" * 32, FairWorkers(Shares({})), BOUNDS)
        assert await Batches(objects, Files(objects)).change("acme", batch.id, expire)

    asyncio.run(change())
    batch = until(client, batch)
    assert batch.status == "expired" and batch.expired_at
    out, bad = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert (len(out), len(bad)) == (2, 6)
    assert {(one["response"], one["error"]["code"]) for one in bad.values()} == {(None, "batch_expired")}


def test_lines_start_only_where_nobody_waits(client: OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests fill most places: however often the batch looks, it waits, and begins once they are free."""
    looks: list[bool] = []
    look = FrontDoor.is_quiet

    def is_quiet(door: FrontDoor, tenant: str, asking: int) -> bool:
        looks.append(look(door, tenant, asking))
        return looks[-1]

    monkeypatch.setattr(FrontDoor, "is_quiet", is_quiet)
    script.ends = asyncio.Semaphore(0)
    before = len(script.asked)
    with ThreadPoolExecutor(7) as threads:
        asks = [threads.submit(client.chat.completions.create, model="demo", messages=HI) for _ in range(7)]
        try:
            wait(lambda: len(script.asked) == before + 7)
            batch = begin(client, *(line(f"c{number}") for number in range(6)))
            until(client, batch, "in_progress")
            wait(lambda: len(looks) >= 10)
            assert not any(looks)
            assert len(script.asked) == before + 7
        finally:
            script.end(7)
        assert {ask.result().choices[0].message.content for ask in asks} == {"It rains."}
    wait(lambda: len(script.asked) > before + 7)
    script.end(6)
    assert until(client, batch).status == "completed"


def test_lines_for_an_alias_wait_for_its_model_alone(tmp_path: Path) -> None:
    """One model is busy. Lines for the other one, by any of its names, start; those of nobody wait for both."""
    objects = StoredObjects(open_database(None, tmp_path / "db", BOUNDS), b"s" * 32, FairWorkers(Shares({})), BOUNDS)

    def gate(name: str, places: int) -> ModelGate:
        door = FrontDoor(Shares({}), places=lambda: places, max_waiting=8, max_bytes=1 << 20)
        return ModelGate(lambda asked: asked == name, door, lambda: 1, lambda: 1 - places)

    desk = BatchDesk(objects, "ingress", dict, lambda: [gate("busy", 0), gate("free", 1)], lambda: {"gpt-4o": "free"})
    told = {name: desk._quiet("acme", name) for name in ("busy", "free", "gpt-4o", "none")}
    assert told == {"busy": False, "free": True, "gpt-4o": True, "none": False}


def test_sizes_are_bounded(client: OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file, of all that a tenant has, of its open batches, and of a batch's lines."""
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(openai.APIStatusError, match="A file may have 1 MiB") as refused:
        client.files.create(file=b"x" * (3 << 19), purpose="batch")
    assert refused.value.status_code == 413
    taken = [file.id for file in client.files.list()]
    monkeypatch.setattr(batch_run, "MAX_LINES", 3)
    batch = until(client, begin(client, *(line(f"c{number}") for number in range(4))))
    assert (
        batch.errors is not None and batch.errors.data is not None and batch.errors.data[0].code == "too_many_requests"
    )
    monkeypatch.setattr("serve_app.batch.batches.MAX_OPEN", 0)
    with pytest.raises(openai.BadRequestError, match="batches in progress"):
        begin(client, line("a"))
    monkeypatch.undo()
    monkeypatch.setattr(StoredObjects, "max_bytes", 4096)
    with pytest.raises(openai.APIStatusError) as full:
        client.files.create(file=b"x" * 5000, purpose="batch")
    assert (full.value.status_code, full.value.code) == (413, "storage_limit_exceeded")
    assert len([*client.files.list()]) == len(taken) + 2, "nothing of a refused file stays"


@pytest.mark.parametrize("first", ["file", "purpose"])
def test_forms_of_other_clients(served: tuple[str, Script], script: Script, first: str) -> None:
    """curl sends fields in any order; a body that is no form, or half of one, is told what to send."""
    headers = {"authorization": f"Bearer {KEYS['acme']}"}
    parts = {
        "file": 'Content-Disposition: form-data; name="file"; filename="ä b.jsonl"\r\nX: y\r\n\r\n\r\n--x\n',
        "purpose": 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        "expiry": 'content-disposition: form-data; name="expires_after[seconds]"\r\n\r\n7200',
    }
    order = sorted(parts, key=lambda name: name != first)
    body = "".join(f"--xyz\r\n{parts[name]}\r\n" for name in order) + "--xyz--\r\n"
    form = {"content-type": 'multipart/form-data; boundary="xyz"', **headers}
    with httpx.Client(base_url=served[0]) as http:
        file = http.post("/v1/files", headers=form, content=body.encode()).raise_for_status().json()
        assert (file["filename"], file["bytes"], file["expires_at"] - file["created_at"]) == ("ä b.jsonl", 6, 7200)
        assert http.get(f"/v1/files/{file['id']}/content", headers=headers).content == b"\r\n--x\n"
        for wrong, content, said in (
            (form, body.encode()[:-20], "ends before"),
            (headers, b"{}", "multipart/form-data"),
            (form, b"--xyz--", "no file"),
            (form, body.replace("batch", "fun").encode(), "purpose must be one of"),
        ):
            refused = http.post("/v1/files", headers=wrong, content=content)
            assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text


def message(custom_id: str, **fields: Any) -> Any:
    return {"custom_id": custom_id, "params": {"model": "demo", "max_tokens": 9, "messages": HI, **fields}}


def ended(claude: Anthropic, batch: Any) -> Any:
    wait(lambda: claude.messages.batches.retrieve(batch.id).processing_status == "ended")
    return claude.messages.batches.retrieve(batch.id)


def test_all_calls_of_anthropics_client(claude: Anthropic, script: Script) -> None:
    """Created, retrieved, listed by page both ways, results read, deleted. docs: batch"""
    made = [claude.messages.batches.create(requests=[message("a"), message("b", messages=[])]) for _ in range(3)]
    assert (made[0].processing_status, made[0].request_counts.processing, made[0].results_url) == (
        "in_progress",
        2,
        None,
    )
    for batch in made:
        batch = ended(claude, batch)
        counts = batch.request_counts
        assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 1, 1, 0, 0)
        results = {one.custom_id: one.result for one in claude.messages.batches.results(batch.id)}
        assert results["a"].type == "succeeded" and results["a"].message.content[0].text == "It rains."
        assert results["b"].type == "errored" and results["b"].error.error.type == "invalid_request_error"
    ids = [batch.id for batch in reversed(made)]
    assert [batch.id for batch in claude.messages.batches.list(limit=2)][:3] == ids
    page = claude.messages.batches.list(limit=1, before_id=ids[2])
    assert [batch.id for batch in page.data] == [ids[1]] and page.has_more
    assert claude.messages.batches.delete(ids[0]).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(ids[0])
    with pytest.raises(anthropic.BadRequestError, match="has ended"):
        claude.messages.batches.cancel(ids[1])

    (asked,) = claude.messages.batches.list(after_id=ids[1], limit=1).data
    assert asked.id == ids[2]

    async def others() -> None:
        async with AsyncAnthropic(base_url=claude.base_url, api_key=KEYS["acme"], max_retries=0) as other:
            async for one in await other.messages.batches.results(ids[1]):
                assert one.custom_id in "ab"

    asyncio.run(others())


def test_all_calls_of_anthropics_client_for_files(claude: Anthropic, client: OpenAI, script: Script) -> None:
    """Uploaded, described, listed by page and by id, read and deleted; OpenAI's client sees the same files."""
    before = len([*claude.beta.files.list()])
    made = [claude.beta.files.upload(file=(f"{at}.txt", b"x" * at)) for at in (1, 2, 3)]
    assert [(one.type, one.filename, one.mime_type, one.size_bytes) for one in made[:1]] == [
        ("file", "1.txt", "text/plain", 1)
    ]
    assert claude.beta.files.retrieve_metadata(made[1].id) == made[1]
    assert claude.beta.files.download(made[2].id).read() == b"xxx"
    listed = claude.beta.files.list(limit=2)
    assert [one.id for one in listed.data] == [made[2].id, made[1].id]
    assert [one.id for one in listed][:3] == [one.id for one in reversed(made)], "with the next pages"
    assert [one.id for one in claude.beta.files.list(ids=[made[0].id, "file-none"])] == [made[0].id]
    short = claude.beta.files.upload(file=b"x", expires_in_seconds=3600)
    assert short.expires_at is not None and (short.expires_at - short.created_at).total_seconds() == 3600
    assert client.files.retrieve(made[0].id).purpose == "user_data"
    for one in (*made, short):
        assert claude.beta.files.delete(one.id).type == "file_deleted"
    assert len([*claude.beta.files.list()]) == before
    with pytest.raises(anthropic.NotFoundError, match="There is no file") as missing:
        claude.beta.files.retrieve_metadata(made[0].id)
    assert missing.value.type == "not_found_error"


def test_lists_go_on_after_what_was_deleted(claude: Anthropic, client: OpenAI, script: Script) -> None:
    """The loop that deletes all it sees meets each once, in every list of both APIs."""
    files = [client.files.create(file=b"x", purpose="evals").id for _ in range(7)]
    seen = [(one.id, client.files.delete(one.id).deleted) for one in client.files.list(purpose="evals", limit=2)]
    assert seen == [(name, True) for name in reversed(files)]
    files = [client.files.create(file=b"x", purpose="evals").id for _ in range(7)]
    seen = [
        (one.id, client.files.delete(one.id).deleted)
        for one in client.files.list(purpose="evals", limit=3, order="asc")
    ]
    assert seen == [(name, True) for name in files]
    uploads = [claude.beta.files.upload(file=b"x").id for _ in range(5)]
    mine = {"purpose": "user_data"}
    found = [one.id for one in claude.beta.files.list(limit=2, extra_query=mine) if claude.beta.files.delete(one.id)]
    assert found[:5] == uploads[::-1] and not [*claude.beta.files.list(extra_query=mine)]
    made = [claude.messages.batches.create(requests=[message("a")]) for _ in range(5)]
    for batch in made:
        ended(claude, batch)
    gone = []
    for one in claude.messages.batches.list(limit=2):
        claude.messages.batches.delete(ended(claude, one).id)
        gone.append(one.id)
    assert gone[:5] == [batch.id for batch in reversed(made)] and not [*claude.messages.batches.list()]
    batches = [until(client, begin(client, line("a"))).id for _ in range(2)]
    assert [one.id for one in client.batches.list(limit=1)][:2] == batches[::-1]


def test_uploads_at_once_take_no_more_than_their_room(
    client: OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch, database: Path
) -> None:
    """One of six that would each fit alone arrives, and nothing of the others stays."""
    client.files.list()

    async def taken() -> int:
        objects = StoredObjects(open_database(None, database, BOUNDS), b"s" * 32, FairWorkers(Shares({})), BOUNDS)
        return await objects.taken("acme")

    before, size = asyncio.run(taken()), 3 << 20
    monkeypatch.setattr(StoredObjects, "max_bytes", before + (5 << 20))
    monkeypatch.setattr(files_module, "CHUNK_BYTES", 64 << 10)

    def upload(seed: int) -> str:
        try:
            return client.files.create(file=Random(seed).randbytes(size), purpose="evals").id
        except openai.APIStatusError as refused:
            assert (refused.status_code, refused.code) == (413, "storage_limit_exceeded")
            return ""

    with ThreadPoolExecutor(6) as threads:
        (arrived,) = filter(None, threads.map(upload, range(6)))
    assert before + size <= asyncio.run(taken()) <= before + size + (64 << 10)
    assert client.files.delete(arrived).deleted
    assert asyncio.run(taken()) <= before


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSE, "/v1/messages"])
@pytest.mark.parametrize("limit", ["budget", "tokens_per_minute", "max_queued_requests"])
def test_a_refusal_by_a_tenants_own_limit_is_known_in_each_apis_shape(limit: str, path: str, tmp_path: Path) -> None:
    """It would refuse each of the tenant's lines; one by a full server would not."""
    objects = StoredObjects(open_database(None, tmp_path / "db", BOUNDS), b"s" * 32, FairWorkers(Shares({})), BOUNDS)
    desk = BatchDesk(objects, "ingress", lambda: {"acme": Tenant("acme")}, list, dict)
    error = RateLimited("no", retry_after_s=70.0, reason=LimitReason("ingress", limit))
    answer = APIS[path][1]().error(error, "req")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429, "headers": [(b"retry-after", b"70")]})
        await send({"type": "http.response.body", "body": msgspec.json.encode(answer.body)})

    desk._application = application
    said = asyncio.run(desk._ask("acme", path, b"{}", "req", True))
    assert (said.status, said.retry_after_s, said.own_limit) == (429, 70.0, limit != "max_queued_requests")


def test_a_cancelled_message_batch_says_which_were_not_asked_for(claude: Anthropic, script: Script) -> None:
    script.ends = asyncio.Semaphore(0)
    before = len(script.asked)
    batch = claude.messages.batches.create(requests=[message(f"m{number}") for number in range(10)])
    wait(lambda: len(script.asked) >= before + 4)
    for call in (claude.messages.batches.delete, claude.messages.batches.results):
        with pytest.raises(anthropic.AnthropicError):
            call(batch.id)
    script.end(1)
    wait(lambda: len(script.asked) >= before + 5)
    assert claude.messages.batches.cancel(batch.id).processing_status == "canceling"
    batch = ended(claude, batch)
    assert (batch.request_counts.succeeded, batch.request_counts.canceled) == (1, 9) and batch.cancel_initiated_at
    kinds = [one.result.type for one in claude.messages.batches.results(batch.id)]
    assert (len(kinds), kinds.count("canceled")) == (10, 9)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "requests must be a list"),
        ([message("a"), message("a")], r"requests\[1\].custom_id is that of an earlier request"),
        ([message("a b")], r"requests\[0\].custom_id must be"),
        ([{"custom_id": "a"}], r"requests\[0\].params is missing"),
    ],
)
def test_a_message_batch_that_cannot_be_is_refused(
    claude: Anthropic, script: Script, requests: list[Any], said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.batches.create(requests=requests)


def test_anthropics_beta_client_too(served: tuple[str, Script], claude: Anthropic, script: Script) -> None:
    """Its paths have a query. Behind a proxy with the certificate the results have the address that was asked."""
    batch = claude.beta.messages.batches.create(requests=[message("a")])
    wait(lambda: claude.beta.messages.batches.retrieve(batch.id).processing_status == "ended")
    assert [one.result.type for one in claude.beta.messages.batches.results(batch.id)] == ["succeeded"]
    assert batch.id in {one.id for one in claude.beta.messages.batches.list(limit=1)}
    with pytest.raises(anthropic.BadRequestError, match="has ended"):
        claude.beta.messages.batches.cancel(batch.id)
    headers = {"x-api-key": KEYS["acme"], "x-forwarded-proto": "https", "host": "models.example"}
    shown = httpx.get(f"{served[0]}/v1/messages/batches/{batch.id}?beta=true", headers=headers).json()
    assert shown["results_url"] == f"https://models.example/v1/messages/batches/{batch.id}/results"
    assert claude.beta.messages.batches.delete(batch.id).id == batch.id


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/files?limit=0", 400, "limit"),
        ("/v1/files?limit=x", 400, "limit"),
        ("/v1/files?after=file-none", 400, "after"),
        ("/v1/files?order=up", 400, "order"),
        ("/v1/files/file-none", 404, "file_id"),
        ("/v1/files/file-none/content", 404, "file_id"),
        ("/v1/batches?limit=-1", 400, "limit"),
        ("/v1/batches/batch_none", 404, "batch_id"),
        ("/v1/batches?after=", 400, "after"),
    ],
)
def test_wrong_questions_have_openais_errors(served: tuple[str, Script], path: str, status: int, param: str) -> None:
    headers = {"authorization": f"Bearer {KEYS['acme']}"}
    answer = httpx.get(served[0] + path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert answer.json()["error"].keys() >= {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
