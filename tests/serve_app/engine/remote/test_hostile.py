"""A worker that lies, floods, redirects or breaks off harms its own request alone; its words stay with operators."""

import asyncio
import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.block_hash import PrefixScope
from serve_app.engine.protocol import AdapterSpec, EngineOutput, to_wire
from serve_app.engine.remote import asking
from serve_app.engine.remote import engine as remote
from serve_app.engine.remote import seat as seat_module
from serve_app.engine.remote.answers import REFUSED
from tests.harness.eventually import eventually
from tests.harness.worker_double import Handler, Here, Lie, doubles
from tests.serve_app.engine.remote.test_remote import PROMPT, VOCAB, Outputs, Seat, answer_to, seated
from tests.serve_app.engine.tiny import request

SECRET = "SECRET http://10.1.2.3:8000/inner"  # noqa: S105
MARK = 7
"""The first token of prompts that are answered by a lie."""
LIED_TO = np.concatenate([np.array([MARK], np.int32), PROMPT])
MOST_SENT = 24 << 20
"""Most bytes of an endless answer that leave a worker: what is read of it, and what the system's sockets hold."""
FLOOD = 96 << 20


class Kept(Outputs):
    """Also all outputs as they travel to ingresses."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[EngineOutput] = []

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        to_wire(list(outputs))
        self.sent += outputs
        super().__call__(outputs)


def ask(seat: Seat, name: str = "a", ids: Any = LIED_TO, most: int = 8, **more: Any) -> Kept:
    out = Kept()
    timeout_s = more.pop("timeout_s", float("inf"))
    seat.submit(structs.replace(request(name, ids, most, **more), timeout_s=timeout_s), out)
    out.wait([name])
    return out


def told(out: Kept, name: str = "a") -> tuple[str, str]:
    return out.kinds[name], out.errors[name]


BROKEN_OFF = ("unavailable", remote.BROKEN_OFF)


def lie_to(server: Here, lie: Lie) -> None:
    """Let a server lie to marked requests alone."""

    async def chosen(asked: web.Request, honest: Handler) -> web.StreamResponse:
        body = await asked.json()
        marked = (body.get("prompt") or body.get("input_ids"))[0] == MARK
        return await (lie(asked, honest) if marked else honest(asked))

    server.lies["/v1/completions"] = server.lies["/generate"] = chosen


def answers(status: int, body: bytes = b"", **headers: str) -> Lie:
    async def lie(_: web.Request, __: Handler) -> web.StreamResponse:
        return web.Response(
            status=status, body=body, headers={name.replace("_", "-"): v for name, v in headers.items()}
        )

    return lie


def streams(*pieces: bytes) -> Lie:
    """Answer with these bytes, and break off."""

    async def lie(asked: web.Request, _: Handler) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(asked)
        for piece in pieces:
            await answer.write(piece)
        return answer

    return lie


class Flood:
    """An answer without an end. ``sent``: bytes that left so far."""

    def __init__(self, first: bytes = b"", piece: bytes = b"x" * 65536, status: int = 200) -> None:
        self.sent = 0
        self._first, self._piece, self._status = first, piece, status

    async def __call__(self, asked: web.Request, _: Handler) -> web.StreamResponse:
        answer = web.StreamResponse(status=self._status, headers={"Content-Type": "text/event-stream"})
        try:
            await answer.prepare(asked)
            await answer.write(self._first)
            while self.sent < FLOOD:
                await answer.write(self._piece)
                self.sent += len(self._piece)
        except (ConnectionError, aiohttp.ClientError):
            pass
        return answer


def event(*ids: Any, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": [*ids], "finish_reason": finish, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """No server is late for the replica's looks, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seat_module, "MISSED", 10_000)
        yield


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Here, Seat]]:
    """A server that can lie, and a replica before it."""
    with doubles(1) as (server,), seated(server.entry) as seat:
        seat.fit()
        yield server, seat


@pytest.fixture
def server(pair: tuple[Here, Seat]) -> Iterator[Here]:
    yield pair[0]
    pair[0].lies.clear()


@pytest.fixture
def seat(pair: tuple[Here, Seat]) -> Iterator[Seat]:
    seat = pair[1]
    yield seat
    honest = ask(seat, "honest", PROMPT)
    assert (honest.tokens["honest"], seat.load().out) == (answer_to(PROMPT.tolist(), 8), "")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_prompts_salts_and_keys_go_nowhere_else(status: int) -> None:
    """Each path that is asked redirects to another host, which would answer."""
    with doubles(2, key="k") as (server, trap):
        for path in ("/metrics", "/health", "/version", "/openapi.json", "/tokenize"):
            server.lies[path] = answers(status, location=f"{trap.url}{path}")
        with seated(server.entry, key="k") as seat:
            seat.fit()
            for path in ("/v1/completions", "/v1/load_lora_adapter"):
                server.lies[path] = answers(status, location=f"{trap.url}{path}")
            assert told(ask(seat)) == BROKEN_OFF
            seat.adapters.load(AdapterSpec("poet", "1", "/weights"))
            refused = ask(seat, "b", scope=PrefixScope("tiny", "poet@1"))
            assert told(refused, "b") == ("invalid", f"The model's server does not load the adapter poet ({status}).")
        server.lies["/v1/models"] = answers(status, location=f"{trap.url}/v1/models")
        with seated(server.entry, key="k") as seat:
            eventually(lambda: seat.load().out.endswith(f"/v1/models answers {status}"))
        assert trap.asked == []


def test_cookies_of_a_worker_are_neither_kept_nor_sent() -> None:
    with doubles(1, cookie="session=of-another-tenant") as (server,), seated(server.entry) as seat:
        seat.fit()
        assert ask(seat, "a", PROMPT).finish["a"] == ask(seat, "b", PROMPT).finish["b"] == "length"
        assert httpx.get(f"{server.url}/health").cookies["session"] == "of-another-tenant"
        assert len(server.asked) > 6
        assert not [path for path, headers, _ in server.asked if "Cookie" in headers]


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (500, SECRET.encode(), "unavailable", remote.BROKEN_OFF),
        (502, b"<html>" + SECRET.encode(), "unavailable", remote.BROKEN_OFF),
        (401, SECRET.encode(), "unavailable", remote.BROKEN_OFF),
        (404, b'{"error": {"message": "SECRET"}}', "unavailable", remote.BROKEN_OFF),
        (204, b"", "unavailable", remote.BROKEN_OFF),
        (429, SECRET.encode(), "queue_full", remote.FULL),
        (400, SECRET.encode(), "invalid", f"{REFUSED} (400)."),
        (422, b'{"detail": "SECRET"}', "invalid", f"{REFUSED} (422)."),
        (400, b'{"error": {"message": ["SECRET"]}}', "invalid", f"{REFUSED} (400)."),
        (400, b"[" * 200_000, "invalid", f"{REFUSED} (400)."),
        (400, b'{"error": {"message": "too long", "code": 400}}', "invalid", f"{REFUSED}: too long"),
        (400, b'{"object": "error", "message": "too long"}', "invalid", f"{REFUSED}: too long"),
        (
            400,
            b'{"error": "ask http://10.1.2.3/x, 10.1.2.3:80\\u001b[2J or 127.0.0.1 again"}',
            "invalid",
            f"{REFUSED}: ask ... ... [2J or ... again",
        ),
        (400, json.dumps({"error": "x" * 9999}).encode(), "invalid", f"{REFUSED}: {'x' * 297}..."),
    ],
)
def test_of_a_refusal_the_client_sees_our_sentence_and_at_most_a_known_fields_reason(
    server: Here, seat: Seat, status: int, body: bytes, kind: str, message: str
) -> None:
    lie_to(server, answers(status, body))
    assert told(ask(seat)) == (kind, message)
    if status != 204:
        error = json.dumps({"error": {"message": SECRET, "code": status}}).encode()
        lie_to(server, streams(event(20), b"data: " + error + b"\n\n"))
        assert ask(seat, "b").kinds["b"] == kind


@pytest.mark.parametrize(
    "flood",
    [
        Flood(),
        Flood(b"data: "),
        Flood(b'data: {"choices": [{"text": "'),
        Flood(piece=b": keep-alive\n\n" * 4096),
        Flood(piece=b"\n" * 65536),
        Flood(piece=b'data: {"choices": []}\n\n' * 2048),
        Flood(piece=event() * 1024),
        Flood(piece=b"data: {}\n" * 4096, first=event(20)),
        Flood(status=400),
        Flood(status=500, piece=b'{"error":' * 4096),
    ],
)
def test_an_endless_answer_ends_one_request_and_little_of_it_is_read(server: Here, seat: Seat, flood: Flood) -> None:
    lie_to(server, flood)
    out = ask(seat)
    assert out.finish["a"] == "error"
    assert out.tokens["a"] in ([], [20])
    assert "x" * 20 not in out.errors["a"]
    assert flood.sent < MOST_SENT


def test_endless_facts_are_read_up_to_a_bound_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_module, "LOOK_S", 0.02)
    with doubles(1) as (server,):
        floods = {path: Flood() for path in ("/metrics", "/version", "/openapi.json", "/tokenize", "/health")}
        server.lies |= floods
        with seated(server.entry, tokenizer="never read") as seat:
            seat.fit()
            assert ask(seat, "a", PROMPT).tokens["a"] == answer_to(PROMPT.tolist(), 8)
            eventually(lambda: all(flood.sent for flood in floods.values()))
        looks = sum(path == "/metrics" for path, *_ in server.asked)
        assert floods["/metrics"].sent < looks * MOST_SENT
        assert max(floods[path].sent for path in floods if path not in ("/metrics", "/health")) < MOST_SENT
        server.lies["/v1/models"] = flood = Flood(b'{"data": [{"id": "')
        with seated(server.entry) as seat:
            eventually(lambda: seat.load().out.endswith("/v1/models has another form"))
        assert flood.sent < 2 * MOST_SENT


def test_a_compressed_answer_is_none(server: Here, seat: Seat) -> None:
    """Some bytes of it could stand for gigabytes."""
    bomb = gzip.compress(b"x" * (16 << 20))
    for status, said in ((200, BROKEN_OFF), (400, ("invalid", f"{REFUSED} (400)."))):
        lie_to(server, answers(status, bomb, Content_Encoding="gzip"))
        assert told(ask(seat)) == said
    assert all(headers["Accept-Encoding"] == "identity" for _, headers, _ in server.asked)


@pytest.mark.parametrize(
    "token", [-1, VOCAB, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(10**30), 1.5, "20", None, [20], True]
)
def test_a_token_that_is_none_ends_one_request(server: Here, seat: Seat, token: Any) -> None:
    lie_to(server, streams(event(20), event(token), event(21, finish="length")))
    out = ask(seat)
    assert told(out) == BROKEN_OFF
    assert out.tokens["a"] == [20]


@pytest.mark.parametrize("at_once", [1, 3, 5000])
def test_no_more_tokens_are_passed_on_and_counted_than_were_asked_for(server: Here, seat: Seat, at_once: int) -> None:
    before = seat._meters.generation_tokens
    lie_to(server, streams(*[event(*[20] * at_once)] * (5000 // at_once)))
    out = ask(seat)
    assert (out.tokens["a"], out.finish["a"]) == ([20] * 8, "length")
    assert seat._meters.generation_tokens - before == 8


def test_an_answer_ends_at_its_stop_token_and_nothing_follows_its_end(server: Here, seat: Seat) -> None:
    for lie in (
        streams(event(20, 21, 22), event(23)),
        streams(event(20), event(21), event(22)),
        streams(event(20), event(21, finish="stop"), event(22), event(23, finish="length")),
    ):
        lie_to(server, lie)
        out = ask(seat, stop_token_ids=(21,))
        assert (out.tokens["a"], out.finish["a"]) == ([20], "stop")
    lie_to(server, streams(event(20, finish="length"), event(22), b"data: junk\n\n"))
    assert ask(seat).tokens["a"] == [20]


@pytest.mark.parametrize("cached", [-1_000_000, -1, 102, 1 << 40, 10**30])
def test_cached_tokens_that_the_prompt_does_not_have_are_not_told(server: Here, seat: Seat, cached: int) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
    ids = np.concatenate([LIED_TO[:1], np.arange(100, dtype=np.int32) + abs(cached) % 97 + 20])
    lie_to(server, streams(event(20, finish="length"), b"data: " + json.dumps(usage).encode() + b"\n\n"))
    assert ask(seat, ids=ids).cached["a"] == 0


def test_an_end_that_only_the_server_knows_is_an_error(server: Here, seat: Seat) -> None:
    for finish in ("abort", "cancelled", SECRET * 1000):
        lie_to(server, streams(event(20, finish=finish)))
        assert told(ask(seat)) == BROKEN_OFF
    lie_to(server, streams(event(20)))
    assert told(ask(seat)) == BROKEN_OFF


def test_a_whole_answer_waits_only_a_moment_for_its_usage(
    server: Here, seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def silent(asked: web.Request, _: Handler) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(asked)
        await answer.write(event(20, finish="length"))
        await ended.wait()
        return answer

    monkeypatch.setattr(asking, "END_S", 0.05)
    lie_to(server, silent)
    assert ask(seat).finish["a"] == "length"
    assert server.double is not None
    server._loop.call_soon_threadsafe(ended.set)


def test_log_probabilities_are_of_the_answers_tokens(server: Here, seat: Seat) -> None:
    def logprobs(*tokens: str, top: Any = None) -> dict[str, Any]:
        return {"tokens": [*tokens], "token_logprobs": [-0.5] * len(tokens), "top_logprobs": top}

    for wrong in (
        {},
        {"logprobs": logprobs()},
        {"logprobs": logprobs("token_id:20", "token_id:21")},
        {"logprobs": logprobs("token_id:20", top=[{f"token_id:{VOCAB}": -0.5}])},
        {"logprobs": logprobs("token_id:20", top=[{"token_id:x": -0.5}])},
        {"logprobs": logprobs("token_id:20", top=[{f"token_id:{10**30}": -0.5}])},
        {"logprobs": logprobs("token_id:20", top=[{"twenty": -0.5}])},
    ):
        lie_to(server, streams(event(20, finish="length", **wrong)))
        assert told(ask(seat, logprobs=1)) == BROKEN_OFF
    lie_to(server, streams(event(20, finish="length", logprobs=logprobs(*["token_id:20"] * 9))))
    assert ask(seat).logprobs["a"] == [], "nobody asked for any"
    for prompt in (None, [], [None] * 100, [None, *[{"x": {"logprob": -1.0}}] * 100]):
        lie_to(server, answers(200, event(20, finish="length", prompt_logprobs=prompt)[6:]))
        assert told(ask(seat, prompt_logprobs=1)) == BROKEN_OFF
    lie_to(server, answers(200, b'{"choices": []}'))
    assert told(ask(seat, prompt_logprobs=1)) == BROKEN_OFF


def test_figures_that_are_none_count_as_untold_and_names_are_short() -> None:
    junk = "9" * 5000
    card = {"id": "demo", "owned_by": "vllm", "root": "demo", "max_model_len": -5}
    with doubles(1) as (server,):
        server.lies["/v1/models"] = answers(200, json.dumps({"data": [card]}).encode())
        server.lies["/version"] = answers(200, json.dumps({"version": "\x1b[2J" + SECRET * 100}).encode())
        server.lies["/openapi.json"] = answers(200, b'{"components": [{"schemas": 1}]}')
        figures = "\n".join(
            (
                f'vllm:cache_config_info{{block_size="{junk}",num_gpu_blocks="{10**12}",{"a" * 200_000}}} 1.0',
                "vllm:num_requests_running 1.2.3.4",
                "vllm:num_requests_running 1e999",
                "vllm:num_requests_waiting 5e9",
            )
        )
        server.lies["/metrics"] = answers(200, figures.encode())
        with seated(server.entry) as seat:
            seat.fit()
            assert seat.told("server").startswith("vLLM [2J")
            assert len(seat.told("server")) < 60
            assert ask(seat, "a", PROMPT).tokens["a"] == answer_to(PROMPT.tolist(), 8)
            eventually(lambda: seat.load().waiting_sequences == 1 << 20)
            assert seat.load().running_sequences == 0
        card["owned_by"] = SECRET * 50
        server.lies["/v1/models"] = answers(200, json.dumps({"data": [card]}).encode())
        with seated(server.entry) as seat:
            eventually(lambda: "its model is owned by" in seat.load().out)
            assert len(seat.load().out) < 200


JUNK = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, VOCAB, 1 << 31, 1 << 63, 10**30, -(10**30), 1.5, "", SECRET, "stop", "length", [], {}]
    ),
    st.lists(st.sampled_from([20, -1, 1 << 64, None, SECRET, [SECRET]]), max_size=12),
    st.dictionaries(
        st.sampled_from(["message", "code", "type", "error", "x"]), st.sampled_from([SECRET, 400, 500, None])
    ),
)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        inner = [*tree.items()]
    elif isinstance(tree, list):
        inner = [*enumerate(tree)]
    return [path, *(leaf for key, value in inner for leaf in leaves(value, (*path, key)))]


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


def honest_events(kind: str, ids: Sequence[int], most: int, cached: int) -> list[Any]:
    tokens, events = answer_to(ids, most), list[Any]()
    for at, token in enumerate(tokens):
        finish = "length" if at == most - 1 else None
        if kind == "sglang":
            meta = {"completion_tokens": at + 1, "cached_tokens": cached, "finish_reason": finish and {"type": finish}}
            events.append({"text": "", "output_ids": tokens[: at + 1], "meta_info": meta})
        else:
            events.append({"choices": [{"index": 0, "text": "", "token_ids": [token], "finish_reason": finish}]})
    if kind != "sglang":
        events.append({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}})
    return events


@st.composite
def lies(draw: st.DrawFn, kind: str) -> tuple[int, list[bytes]]:
    """Return an answer's status and its pieces: an honest one with some fields, events or bytes changed."""
    events = honest_events(kind, LIED_TO.tolist(), 8, 0)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(events) - 1))
        events[at] = changed(events[at], draw(st.sampled_from(leaves(events[at]))), draw(JUNK))
    for _ in range(draw(st.integers(0, 2))):  # cut out, twice, or elsewhere
        at, to = draw(st.integers(0, len(events) - 1)), draw(st.integers(0, len(events)))
        events.insert(to, events[at])
        if draw(st.booleans()):
            del events[at]
    data = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    if draw(st.integers(0, 3)) == 0:
        cut = draw(st.integers(0, len(data)))
        wrong = st.sampled_from([b"", b"\xff\x00", b"\n", b"data: ", b"[" * 9000, b'data: {"error": "SECRET"}\n\n'])
        data = data[:cut] + draw(wrong) + draw(st.sampled_from([b"", data[cut:]]))
    status = draw(st.sampled_from([200] * 9 + [100, 201, 204, 302, 400, 404, 429, 500, 599]))
    piece = draw(st.sampled_from([1 << 20, 100, 7]))
    return status, [data[at : at + piece] for at in range(0, len(data), piece)]


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, tuple[Here, Seat]]]:
    with ExitStack() as stack:
        found = {}
        for kind in ("vllm", "sglang"):
            (server,) = stack.enter_context(doubles(1, kind=kind))
            found[kind] = server, stack.enter_context(seated(server.entry))
            found[kind][1].fit()
        yield found


def test_a_body_behind_an_answer_that_has_none_ends_no_neighbour(pairs: dict[str, tuple[Here, Seat]]) -> None:
    """The bytes behind a 204 are read as the next answer of its connection: that of a look at its health, maybe."""
    server, seat = pairs["vllm"]

    async def lie(asked: web.Request, _: Handler) -> web.StreamResponse:
        answer = web.StreamResponse(status=204)
        await answer.prepare(asked)
        assert asked.transport is not None
        asked.transport.write(b"data: nonsense\n\n" * 20)  # type: ignore[attr-defined]
        return answer

    lie_to(server, lie)
    for number in range(20):
        seat.fit()
        out, names = Kept(), (f"lied {number}", f"neighbour {number}")
        seat.submit(request(names[0], LIED_TO, 8), out)
        seat.submit(request(names[1], PROMPT, 8), out)
        out.wait(names)
        assert out.tokens[names[1]] == answer_to(PROMPT.tolist(), 8), out.errors


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["vllm", "sglang"]))
def test_whatever_a_worker_answers_nothing_of_another_request_is_touched(
    pairs: dict[str, tuple[Here, Seat]], data: st.DataObject, kind: str
) -> None:
    """One request gets a lie while two others get honest answers of the same server, in the same replica."""
    server, seat = pairs[kind]
    seat.fit()  # on a busy machine it may have been late to say how it is
    status, pieces = data.draw(lies(kind))

    async def lie(asked: web.Request, _: Handler) -> web.StreamResponse:
        answer = web.StreamResponse(status=status if status != 100 else 200, headers={"Set-Cookie": "a=b"})
        await answer.prepare(asked)
        for piece in pieces:
            await answer.write(piece)
        return answer

    lie_to(server, lie)
    out, names = Kept(), ("before", "lied", "after")
    prompts = {"before": PROMPT, "lied": LIED_TO, "after": PROMPT + 1}
    for name in names:
        seat.submit(request(name, prompts[name], 8), out)
    out.wait(names)
    for name in ("before", "after"):
        assert out.tokens[name] == answer_to(prompts[name].tolist(), 8)
        assert (out.finish[name], out.kinds[name], out.cached[name] in (0, 96)) == ("length", "", True)
    assert len(out.tokens["lied"]) <= 8
    assert all(0 <= token < VOCAB for token in out.tokens["lied"])
    assert 0 <= out.cached.get("lied", 0) <= len(LIED_TO)
    assert out.finish["lied"] in ("length", "stop", "error")
    message = out.errors["lied"]
    ours = (
        "",
        remote.BROKEN_OFF,
        remote.FULL,
        f"{REFUSED} ({status}).",
        f"{REFUSED}: SECRET ...",
        f"{REFUSED}: SECRET",
    )
    assert message in (*ours, f"{REFUSED}: it told no reason", f"{REFUSED} (400).")
    assert not seat._load.live
    assert seat.load().out == ""
    assert not any("Cookie" in headers for _, headers, _ in server.asked)
    server.asked.clear()
