"""Conversations by ``previous_response_id`` over a real socket with the real client; the model's text is scripted."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response

from serve_app.config.tenants import TenantConfig
from serve_app.stored.database import Database
from serve_app.stored.url import open_database
from tests.serve_app.ingress.scripted import BOUNDS, Script, scripted
from tests.serve_app.ingress.test_responses import CALL, TOOL
from tests.serve_app.tool_templates.families import family

KEYS = {"acme": "wp-acme", "globex": "wp-globex"}
CUSTOMERS = [TenantConfig(name=name, key_sha256=[sha256(key.encode()).hexdigest()]) for name, key in KEYS.items()]
MAX_BODY_BYTES = 16 << 10


@pytest.fixture(scope="module")
def model_path(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family("hermes", demo_model_path, tmp_path_factory.mktemp("family") / "hermes")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored") / "responses.sqlite"


@pytest.fixture(scope="module")
def backend(file: Path) -> Database:
    return open_database(None, file, BOUNDS)


@pytest.fixture(scope="module")
def served(model_path: Path, backend: Database) -> Iterator[tuple[str, Script]]:
    options: dict[str, Any] = {"customers": CUSTOMERS, "backend": backend, "max_body_bytes": MAX_BODY_BYTES}
    with scripted(model_path, **options, place="first") as running:
        yield running


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    served[1].clear()
    served[1].text = "It rains."
    return served[1]


@pytest.fixture(scope="module")
def clients(served: tuple[str, Script]) -> Iterator[dict[str, OpenAI]]:
    made = {name: OpenAI(base_url=f"{served[0]}/v1", api_key=key, max_retries=0) for name, key in KEYS.items()}
    yield made
    for client in made.values():
        client.close()


def create(client: OpenAI, streamed: bool, text: Any, **fields: Any) -> Response:
    asked = {"model": "demo", "input": text, **fields}
    if not streamed:
        return client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    response: Response = last.response
    return response


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_as_if_it_had_been_sent_whole(
    clients: dict[str, OpenAI], script: Script, streamed: bool
) -> None:
    """The prompt is the same, so the KV is the same; instructions are not carried over. (docs: api)"""
    client = clients["acme"]
    first = create(client, streamed, "Rain?", instructions="Be brief.", metadata={"a": "b"})
    assert (first.model_extra or {}).get("store", getattr(first, "store", None)) is True
    script.text = "Till noon."
    second = create(client, streamed, [{"role": "user", "content": "How long?"}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    chained = script.prompt()
    assert "Be brief." not in chained
    create(client, streamed, "And then?", previous_response_id=second.id, instructions="Rhyme.")
    longer = script.prompt()
    said = [("user", "Rain?"), ("assistant", "It rains."), ("user", "How long?")]
    items: list[Any] = [{"role": role, "content": text} for role, text in said]
    create(client, streamed, items, store=False)
    assert script.prompt() == chained
    items += [{"role": "assistant", "content": "Till noon."}, {"role": "user", "content": "And then?"}]
    create(client, streamed, items, instructions="Rhyme.")
    assert script.prompt() == longer


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stored_response_equals_the_answer(clients: dict[str, OpenAI], script: Script, streamed: bool) -> None:
    """It is retrieved whole, its input listed in pages, and gone once deleted; later responses still continue."""
    client = clients["acme"]
    first = create(client, streamed, "Rain?", metadata={"a": "b"}, temperature=0.5)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = create(client, streamed, "How long?", previous_response_id=first.id)
    assert client.responses.delete(first.id) is None
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=first.id):
            gone(first.id)
    third = create(client, streamed, "Why?", previous_response_id=second.id)
    listed = client.responses.input_items.list(third.id, limit=2, order="asc")
    items = list(listed)  # the client requests more pages
    assert [(item.role, item.content[0].type, item.content[0].text) for item in items] == [
        ("user", "input_text", "Rain?"), ("assistant", "output_text", "It rains."),
        ("user", "input_text", "How long?"), ("assistant", "output_text", "It rains."), ("user", "input_text", "Why?"),
    ]  # fmt: skip
    assert len({item.id for item in items}) == 5
    for item in items:
        type(item).model_validate(item.to_dict(mode="json"), strict=True)
    assert [item.id for item in client.responses.input_items.list(third.id)] == [item.id for item in reversed(items)]
    after = client.responses.input_items.list(third.id, after=items[1].id, order="asc")
    assert [item.id for item in after] == [item.id for item in items[2:]]


def test_calls_and_their_results_go_on(clients: dict[str, OpenAI], script: Script) -> None:
    """An agent sends a call's result by call_id alone; log-probabilities are not carried along."""
    client = clients["acme"]
    script.text = "Let me look. " + CALL
    first = client.responses.create(model="demo", input="Rain in Oslo?", tools=[TOOL])
    call = first.output[1]
    assert call.type == "function_call"
    script.text = "No."
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry", "junk": [1, 2]}]
    second = client.responses.create(model="demo", input=result, tools=[TOOL], previous_response_id=first.id)
    assert "Oslo" in script.prompt() and "Let me look." in script.prompt() and "dry" in script.prompt()
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message", "message", "function_call", "function_call_output"]
    assert "junk" not in json.dumps([item.to_dict(mode="json") for item in items])


def test_a_call_in_a_namespace_goes_on_with_it(clients: dict[str, OpenAI], script: Script) -> None:
    """With Codex's tools, the prompt equals that of the whole conversation, regardless of the call's author."""
    client = clients["acme"]
    tools: Any = [{"type": "namespace", "name": "sky", "description": "Weather", "tools": [TOOL]}]
    script.text = CALL.replace("get_weather", "sky.get_weather")
    first = client.responses.create(model="demo", input="Rain in Oslo?", tools=tools)
    call = first.output[0].to_dict(mode="json")
    assert (call["namespace"], call["name"]) == ("sky", "get_weather")
    result: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}
    script.text = "No."
    second = client.responses.create(model="demo", input=[result], tools=tools, previous_response_id=first.id)
    chained = script.prompt()
    sent: Any = [{"role": "user", "content": "Rain in Oslo?"}, call, result]
    whole = client.responses.create(model="demo", input=sent, tools=tools)
    assert script.prompt() == chained
    for answered in (second, whole):
        listed = [item.to_dict(mode="json") for item in client.responses.input_items.list(answered.id, order="asc")]
        assert [item.get("namespace") for item in listed] == [None, "sky", None]
        client.responses.create(model="demo", input="Why?", tools=tools, previous_response_id=answered.id)
        assert "sky.get_weather" in script.prompt()


def test_a_stored_response_comes_as_events_too(clients: dict[str, OpenAI], script: Script) -> None:
    """They are those of the answer, with each text in one delta; the last one comes for any ``starting_after``."""
    client = clients["acme"]
    script.text = "<think>Hm.</think>Let me look. " + CALL
    for length in (False, True):
        script.reason = "length" if length else "stop"
        sent = list(client.responses.create(model="demo", input="Rain?", tools=[TOOL], stream=True))
        last: Any = sent[-1]
        again = list(client.responses.retrieve(last.response.id, stream=True))
        kinds = [event.type for event in sent]
        assert [event.type for event in again] == [
            k for i, k in enumerate(kinds) if "delta" not in k or kinds[i - 1] != k
        ]
        assert [event.sequence_number for event in again] == list(range(len(again)))
        for kind in {event.type for event in again if "delta" not in event.type}:
            of = [
                [{**event.to_dict(), "sequence_number": 0} for event in events if event.type == kind]
                for events in (sent, again)
            ]
            assert of[0] == of[1]
        for after in (0, len(again) - 2, len(again) - 1, len(sent)):
            rest = list(client.responses.retrieve(last.response.id, stream=True, starting_after=after))
            assert rest == (again[after + 1 :] or again[-1:])


def test_references_to_items_of_an_answer_are_these_items(clients: dict[str, OpenAI], script: Script) -> None:
    """Vercel's AI SDK sends them where responses are stored. Other tenants' items and unknown ones do not exist."""
    client = clients["acme"]
    script.text = "Let me look. " + CALL
    first = client.responses.create(model="demo", input="Rain in Oslo?", tools=[TOOL])
    call: Any = first.output[1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    script.text = "No."
    chained = client.responses.create(model="demo", input=[result], tools=[TOOL], previous_response_id=first.id)
    prompt = script.prompt()
    asked: Any = {"role": "user", "content": "Rain in Oslo?"}
    references: Any = [{"type": "item_reference", "id": first.output[0].id}, {"id": call.id}]
    second = client.responses.create(model="demo", input=[asked, *references, result], tools=[TOOL])
    assert script.prompt() == prompt
    listed = [
        [item.type for item in client.responses.input_items.list(answered.id, order="asc")]
        for answered in (chained, second)
    ]
    assert listed[0] == listed[1] == ["message", "message", "function_call", "function_call_output"]
    for other, reference in ((clients["globex"], references[0]), (client, {"type": "item_reference", "id": "msg_1"})):
        with pytest.raises(openai.BadRequestError, match="in no stored response; send the item itself"):
            other.responses.create(model="demo", input=[asked, reference])
    with pytest.raises(openai.APIStatusError) as large:
        client.responses.create(model="demo", input=[asked, *references[:1] * 100])
    assert large.value.status_code == 413


def test_unknown_fields_are_not_stored(clients: dict[str, OpenAI], script: Script) -> None:
    """Of each item only the fields of its own kind are read, regardless of the others' names and types."""
    items: Any = [
        {"role": "user", "content": "Rain?", "output": [1], "arguments": {}},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "content": ["x"]},
        {"type": "function_call_output", "call_id": "c", "output": "dry", "content": [1], "role": 7},
    ]
    client = clients["acme"]
    first = client.responses.create(model="demo", input=items, tools=[TOOL])
    listed = client.responses.input_items.list(first.id, order="asc")
    kept = [{*item.to_dict(mode="json")} - {"id", "type", "status"} for item in listed]
    assert kept == [{"role", "content"}, {"call_id", "name", "arguments"}, {"call_id", "output"}]


def test_a_call_that_was_cut_off_does_not_go_on(clients: dict[str, OpenAI], script: Script) -> None:
    client = clients["acme"]
    script.text, script.reason = "Let me look. " + CALL[: CALL.index("Oslo")], "length"
    first = client.responses.create(model="demo", input="Rain in Oslo?", tools=[TOOL])
    assert (first.status, first.output[-1].status) == ("incomplete", "incomplete")
    assert first.output[-1].to_dict()["arguments"] == '{"city": "'
    *_, last = client.responses.create(model="demo", input="Rain in Oslo?", tools=[TOOL], stream=True)
    assert [item.to_dict().get("arguments") for item in last.response.output] == [None, '{"city": "']
    assert last.response.output[-1].status == "incomplete"
    script.clear()
    script.text = "Yes."
    second = client.responses.create(model="demo", input="Well?", previous_response_id=first.id)
    assert second.output_text == "Yes."


def test_nothing_is_stored_where_the_request_says_so(clients: dict[str, OpenAI], script: Script) -> None:
    client = clients["acme"]
    raw = client.responses.with_raw_response.create(model="demo", input="Rain?", store=False)
    assert json.loads(raw.content)["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(json.loads(raw.content)["id"])


def test_errors_name_the_remedy(clients: dict[str, OpenAI], served: tuple[str, Script], script: Script) -> None:
    client = clients["acme"]
    first = client.responses.create(model="demo", input="x" * 10_000)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.APIStatusError) as large:
        client.responses.create(model="demo", input="y" * 10_000, previous_response_id=first.id)
    assert (large.value.status_code, large.value.param) == (413, "previous_response_id")
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]"):
        client.responses.create(model="demo", input=[{"role": "x"}], previous_response_id=first.id)  # type: ignore[list-item,misc]
    with pytest.raises(openai.BadRequestError, match="store must be"):
        client.responses.create(model="demo", input="x", extra_body={"store": "yes"})
    for query in ("stream=perhaps", "starting_after=-1"):
        with pytest.raises(openai.BadRequestError, match=query.partition("=")[0]):
            client.responses.retrieve(first.id, extra_query=dict([query.split("=")]))
    for query, named in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=msg", "after")):
        url = f"{served[0]}/v1/responses/{first.id}/input_items?{query}"
        answer = httpx.get(url, headers={"authorization": f"Bearer {KEYS['acme']}"}, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


@pytest.fixture(scope="module")
def owned(clients: dict[str, OpenAI], served: tuple[str, Script]) -> str:
    """A response of acme's."""
    served[1].text = "It rains."
    return clients["acme"].responses.create(model="demo", input="A secret of acme's").id


@pytest.fixture(scope="module")
def http(served: tuple[str, Script]) -> Iterator[httpx.Client]:
    """Another tenant."""
    headers = {"authorization": f"Bearer {KEYS['globex']}"}
    with httpx.Client(base_url=served[0], headers=headers, trust_env=False) as made:
        yield made


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_tenant_sees_that_another_has_a_response(data: st.DataObject, http: httpx.Client, owned: str) -> None:
    """Another tenant's id, ids near it and any others get the same answer, on every route. (docs: isolation)"""
    near = st.sampled_from([owned, owned.upper(), owned[:-1], f"{owned}0", f"{owned}%00", f"acme%00{owned}"])
    response_id = data.draw(near | st.from_regex(r"resp_[0-9a-f]{32}", fullmatch=True))
    unknown = "resp_" + "0" * 32

    def answers(of: str) -> list[tuple[int, str]]:
        url, body = "/v1/responses", {"model": "demo", "input": "x", "previous_response_id": of}
        asked = [http.get(f"{url}/{of}"), http.get(f"{url}/{of}?stream=true"), http.get(f"{url}/{of}/input_items")]
        asked += [http.delete(f"{url}/{of}"), http.post(url, json=body)]
        return [(one.status_code, one.json()["error"]["code"]) for one in asked]

    assert answers(response_id) == answers(unknown) == [(404, "not_found")] * 4 + [(400, "previous_response_not_found")]


def test_a_key_is_needed(served: tuple[str, Script], owned: str, clients: dict[str, OpenAI]) -> None:
    """This holds on every route, and no attempt by others changes the response."""
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        answer = httpx.request(method, f"{served[0]}/v1/responses/{owned}{path}", trust_env=False)
        assert answer.status_code == 401
    assert clients["acme"].responses.retrieve(owned).id == owned


def test_a_response_that_cannot_be_stored_is_not_acknowledged(
    clients: dict[str, OpenAI], script: Script, backend: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole: a 503; streamed: an error in place of the end; with ``store: false`` the usual answer."""

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(backend, "insert", full)
    client = clients["acme"]
    with pytest.raises(openai.InternalServerError) as whole:
        client.responses.create(model="demo", input="x")
    assert (whole.value.status_code, whole.value.code) == (503, "response_store_unavailable")
    with pytest.raises(openai.APIError, match="store: false"):
        list(client.responses.create(model="demo", input="x", stream=True))
    asked = {"model": "demo", "input": "x", "stream": True}
    raw = httpx.post(f"{client.base_url}responses", json=asked, headers=client.auth_headers, trust_env=False).text
    events = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["code"] == "response_store_unavailable"
    assert client.responses.create(model="demo", input="x", store=False).output_text == "It rains."


def test_without_a_store_nothing_refers_to_an_earlier_response(model_path: Path) -> None:
    with scripted(model_path) as (url, script), OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        script.text = "It rains."
        first = client.responses.create(model="demo", input="Rain?")
        assert first.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="nothing is stored"):
            client.responses.create(model="demo", input="x", previous_response_id=first.id)
        for gone in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                gone(first.id)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_name_of_a_request_in_events_and_logs_opens_no_response(
    clients: dict[str, OpenAI], script: Script, streamed: bool
) -> None:
    """Events are shown to watchers, and a response's id gives its text. It leads to the request's name, not back."""
    answered = create(clients["acme"], streamed, "Rain?")
    (shown,) = {one.request_id.partition(".")[0] for one in script.asked[-1:]}
    for guess in (shown, f"resp_{shown}", script.asked[-1].request_id, f"resp_{script.asked[-1].request_id}"):
        for open_it in (clients["acme"].responses.retrieve, clients["acme"].responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                open_it(guess)
    assert shown not in answered.to_json()
    assert shown == sha256(answered.id.removeprefix("resp_").encode()).hexdigest()[:32]
