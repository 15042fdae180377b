"""Routes for tokens and load: the same prompts as those of answers; and an ingress that stops finishes what it has."""

import asyncio
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from serve_app.config.tenants import TenantConfig
from serve_app.errors import Overloaded, WarmpathError
from serve_app.ingress.drain import Deadline, Drain
from serve_app.ingress.routes.application import make_application
from serve_app.stored.url import open_database
from tests.serve_app.ingress.scripted import BOUNDS, Script, partial_address, scripted
from tests.serve_app.ingress.test_responses import TOOL
from tests.serve_app.tokenization.test_tokenizer import bos_around
from tests.serve_app.tokenization.variants import variant_of
from tests.serve_app.tool_templates.families import WEATHER, family

KEYS = {"acme": "wp-acme", "globex": "wp-globex"}
CUSTOMERS = [TenantConfig(name=name, key_sha256=[sha256(key.encode()).hexdigest()]) for name, key in KEYS.items()]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Rain in Oslo?"}], "tools": [WEATHER]}


@pytest.fixture(scope="module")
def served(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    folder = tmp_path_factory.mktemp("tokens")
    stored = open_database(None, folder / "responses.sqlite", BOUNDS)
    path = family("hermes", demo_model_path, folder / "hermes")
    with scripted(path, customers=CUSTOMERS, backend=stored, place="first") as running:
        yield running


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    served[1].clear()
    served[1].text = "Yes."
    return served[1]


def post(served: tuple[str, Script], path: str, key: str = "wp-acme", **body: Any) -> httpx.Response:
    return httpx.post(f"{served[0]}{path}", json=body, headers={"authorization": f"Bearer {key}"})


def asked(script: Script) -> list[int]:
    ids: list[int] = script.asked[-1].token_ids.tolist()
    return ids


def test_tokens_are_those_of_an_answers_prompt(served: tuple[str, Script], script: Script) -> None:
    """A chat's and a text's, with their names if asked for; a body may leave out the model. docs: api"""
    post(served, "/v1/chat/completions", model="demo", **CHAT)
    told = post(served, "/tokenize", **CHAT, return_token_strs=True).json()
    assert told["tokens"] == asked(script)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 8192)
    names = [script.tokenizer.pretrained.convert_ids_to_tokens(token_id) for token_id in told["tokens"]]
    assert told["token_strs"] == names
    open_end = {"add_generation_prompt": False}
    shorter = post(served, "/tokenize", model="demo", **CHAT, **open_end).json()
    assert told["tokens"][: shorter["count"]] == shorter["tokens"] != told["tokens"]
    assert shorter["token_strs"] is None
    post(served, "/v1/completions", model="demo", prompt="Rain?")
    text = post(served, "/tokenize", model="demo", prompt="Rain?").json()
    assert text["tokens"] == asked(script)
    again = post(served, "/detokenize", tokens=told["tokens"]).json()
    assert again == {"prompt": script.tokenizer.text_of(told["tokens"])}
    assert "Rain in Oslo?" in again["prompt"] and "<|im_start|>" in again["prompt"]


def test_special_tokens_are_added_where_asked(demo_model_path: Path, tmp_path: Path) -> None:
    """A text has them by default, a chat does not: its template writes them."""
    plain: dict[str, Any] = {"model": "demo", "max_tokens": 1}
    chat, text = {**plain, "messages": CHAT["messages"]}, {**plain, "prompt": "Rain?"}
    with scripted(variant_of(demo_model_path, tmp_path / "bos", bos_around)) as served:
        bos, *_, eos = served[1].tokenizer.encode("", b"r" * 16, add_special_tokens=True).token_ids.tolist()
        for path, body, default in (("/v1/completions", text, True), ("/v1/chat/completions", chat, False)):
            found = []
            for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
                post(served, path, **body, **more)
                assert post(served, "/tokenize", **body, **more).json()["tokens"] == asked(served[1])
                found.append(asked(served[1])[:: len(asked(served[1])) - 1] == [bos, eos])
            assert found == [default, True, False]


def test_a_prompt_longer_than_the_context_is_counted(served: tuple[str, Script], script: Script) -> None:
    """Clients count to know what to leave out."""
    words = "rain " * 20_000
    told = post(served, "/tokenize", prompt=words).json()
    assert told.get("count", 0) > 8192, told
    with Anthropic(base_url=served[0], api_key="wp-acme", max_retries=0) as client:
        counted = client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": words}])
    assert counted.input_tokens > 8192


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "messages"), ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {"tokens": [1 << 30]}, 400, "tokens"), ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("/v1/responses/input_tokens", {}, 400, "input"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_named(
    served: tuple[str, Script], path: str, body: dict[str, Any], status: int, param: str
) -> None:
    refused = post(served, path, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


def test_what_is_ignored_is_named(served: tuple[str, Script]) -> None:
    told = post(served, "/tokenize", prompt="x", colour="red")
    assert told.headers["x-warmpath-warning"] == "unknown fields ignored: colour"


def test_the_tokens_of_a_response_are_its_usage(served: tuple[str, Script], script: Script) -> None:
    """With tools, instructions and a stored conversation; nothing is generated or stored."""
    with OpenAI(base_url=f"{served[0]}/v1", api_key="wp-acme", max_retries=0) as client:
        first = client.responses.create(model="demo", input="Rain?")
        fields: Any = {
            "model": "demo", "input": "And then?", "instructions": "Be brief.", "tools": [TOOL],
            "previous_response_id": first.id,
        }  # fmt: skip
        generations = len(script.asked)
        counted = client.responses.input_tokens.count(**fields)
        assert len(script.asked) == generations
        answer = client.responses.create(**fields)
        assert answer.usage is not None
        assert (counted.input_tokens, counted.object) == (answer.usage.input_tokens, "response.input_tokens")
        assert client.responses.input_tokens.count(input="Rain?").input_tokens < counted.input_tokens


def test_load_is_what_runs_and_waits_of_the_callers(served: tuple[str, Script], script: Script) -> None:
    """A tenant does not see others' requests; without anything it is 0."""

    def load(key: str) -> int:
        told = httpx.get(f"{served[0]}/load", headers={"authorization": f"Bearer {key}"})
        found: int = told.json()["server_load"]
        return found

    assert httpx.get(f"{served[0]}/load").status_code == 401
    assert [load(key) for key in KEYS.values()] == [0, 0]
    script.ends = asyncio.Semaphore(0)
    before = len(script.asked)
    running = [Thread(target=post, args=(served, "/v1/completions"), kwargs={"model": "demo", "prompt": "x", "n": 2})]
    for one in running:
        one.start()
    while len(script.asked) < before + 2:
        pass
    assert [load(key) for key in KEYS.values()] == [2, 0]
    script.end(2)
    for one in running:
        one.join()
    assert load("wp-acme") == 0


def deadline(drain: Drain) -> Deadline:
    return Deadline(drain, time.perf_counter() + 600, 600)


async def settled() -> None:
    """Run all tasks that are ready."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("in_time", [True, False])
async def test_answers_that_end_in_time_are_waited_for_and_others_end_with_an_error(in_time: bool) -> None:
    """At the deadline an answer's current wait and its next one end with the error; new requests are refused."""
    drain, release, errors = Drain(), [asyncio.Event(), asyncio.Event()], []
    async with deadline(drain).limit():  # an answer that has ended before is not waited for
        pass

    async def answer(event: asyncio.Event) -> None:
        with drain.answering():
            for _ in range(2):
                try:
                    async with deadline(drain).limit():
                        await event.wait()
                except WarmpathError as error:
                    errors.append(error.code)

    answers = [asyncio.create_task(answer(event)) for event in release]
    await asyncio.sleep(0)
    drain.refuse()
    stop = asyncio.create_task(drain.run(600 if in_time else 0))
    for event in release:
        await settled()
        if in_time:
            assert not stop.done()
            event.set()
    assert await stop == (0 if in_time else 2)
    await asyncio.gather(*answers)
    assert (drain.stopping, drain.over) == (True, not in_time)
    assert errors == ([] if in_time else ["server_stopping"] * 4)
    with pytest.raises(Overloaded) as refused:
        drain.refuse()
    assert (refused.value.code, refused.value.retry_after_s) == ("server_stopping", 5)


@pytest.mark.anyio
async def test_an_answer_counts_until_its_last_byte() -> None:
    """An answer that ends with an exception counts too."""
    drain, begun, sending = Drain(), asyncio.Event(), asyncio.Event()
    application = make_application(
        partial_address(drain=drain, guard=SimpleNamespace(allowed_hosts=None, allowed_origins=()))
    )

    async def send(_: object) -> None:
        begun.set()
        await sending.wait()
        raise OSError("the client is gone")

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/version", "headers": [], "query_string": b""}
    answer = asyncio.create_task(application(scope, receive, send))  # type: ignore[arg-type]
    await begun.wait()
    stop = asyncio.create_task(drain.run(600))
    await settled()
    assert not stop.done()
    sending.set()
    assert await stop == 0
    with pytest.raises(OSError, match="gone"):
        await answer
