"""A replay over HTTP: the server counts the file's tokens and finds the file's shared prefixes; nothing is lost."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.infer.run import InThisProcess
from serve_app.ingress.address import Address
from serve_app.ingress.assembly import make_address
from serve_app.ingress.client_headers import ClientHeaders
from serve_app.ingress.routes.application import make_application
from serve_app.replay.client import TimedAnswer
from serve_app.replay.http_results import HttpProgress, http_figures, http_table
from serve_app.replay.open_loop import Result, Shot
from serve_app.replay.over_http import (
    HttpReplay,
    HttpReplayError,
    HttpResults,
    keys_by_tenant,
    keys_of,
    models_of,
    open_files,
    read_keys,
    replay_over_http,
)
from serve_app.replica.engine_factory import make_engine
from serve_app.tenants import make_api_key
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.record import VERSION, Header, TrafficRequest
from serve_app.traffic.workload import Workload
from tests.serve_app.ingress.scripted import Loopback, cancelling
from tests.serve_app.replay.tokenizers import KINDS, checkpoint_with

BLOCK = 16
"""Of the server's cache, and of the file's ids."""

TIMEOUT_S = 60.0
Replayed = Callable[..., HttpResults]


@contextmanager
def engine_server(checkpoint: Path, **given: Any) -> Iterator[str]:
    """Serve a checkpoint's tokenizer with a real engine and cache, and simulated steps that take no time."""
    config = AppConfig(
        model=str(checkpoint), served_model_name="poet", engine="simulated", num_blocks=512, max_model_len=2048,
        simulated_prefill_tokens_per_s=1e9, simulated_decode_step_s=1e-6, **given,
    )  # fmt: skip
    info = load_checkpoint_info(checkpoint)
    engine = make_engine(config, info, lambda _: None)
    addresses: list[Address] = []

    async def application() -> ClientHeaders:
        outside = InThisProcess(info, engine, config)
        await outside.start()
        addresses.append(await make_address(config, outside))
        return ClientHeaders(cancelling(make_application(addresses[0])))

    try:
        with Loopback(application) as running:
            yield running.url
            running.call(addresses[0].traffic_log.close)
    finally:
        engine.stop()


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Yield a server's URL and its tokenizer."""
    folder = checkpoint_with(KINDS[request.param](), demo_model_path, tmp_path_factory.mktemp("served") / "model")
    with engine_server(folder) as url:
        yield url, str(folder)


@pytest.fixture(scope="module")
def demo(demo_model_path: Path) -> Iterator[str]:
    with engine_server(demo_model_path) as url:
        yield url


def recorded(*prompts: tuple[list[int], int], **more: Any) -> list[TrafficRequest]:
    """Return requests by the ids of their blocks and the tokens beyond them; a negative number: less of the last.

    An id here stands for one block; the files' ids stand for whole beginnings.
    """
    return [
        TrafficRequest(
            timestamp=float(at),
            input_length=len(ids) * BLOCK + beyond,
            output_length=3,
            hash_ids=[hash(tuple(ids[: end + 1])) & (1 << 62) - 1 for end in range(len(ids))],
            **more,
        )
        for at, (ids, beyond) in enumerate(prompts)
    ]


def read(requests: Sequence[TrafficRequest], folder: Path) -> Workload:
    """Write a file of these requests, and read it."""
    header = Header(warmpath_traffic=VERSION, recording="r", started_s=1.0, block_tokens=BLOCK)
    path = folder / "traffic.jsonl"
    path.write_bytes(msgspec.json.Encoder().encode_lines([header, *requests]))
    return read_traffic([path])


@pytest.fixture
def replayed(tmp_path: Path) -> Replayed:
    """Replay requests, one after the other, in their order."""

    def replay(requests: Sequence[TrafficRequest], url: str, told: Any = None, **given: Any) -> HttpResults:
        options = HttpReplay(url, timeout_s=TIMEOUT_S, **{"most_open": 1, **given})
        found = replay_over_http(read(requests, tmp_path), options, told or (lambda sent, result: None))
        found.results.sort(key=lambda result: result.shot.number)
        return found

    return replay


def expected_cached(requests: Sequence[TrafficRequest]) -> list[int]:
    """Return what a cache of whole blocks finds of each prompt, which itself is never found to its last token."""
    seen: set[tuple[int, ...]] = set()
    cached = []
    for request in requests:
        whole = request.hash_ids[: request.input_length // BLOCK]
        hit = max((end for end in range(len(whole) + 1) if not end or tuple(whole[:end]) in seen), default=0)
        cached.append(min(hit, (request.input_length - 1) // BLOCK) * BLOCK)
        seen |= {tuple(whole[:end]) for end in range(1, len(whole) + 1)}
    return cached


@pytest.mark.parametrize("prompts", ["text", "ids"])
def test_the_server_counts_the_files_tokens_and_finds_its_prefixes(
    served: tuple[str, str], prompts: str, replayed: Replayed
) -> None:
    """Exactly, whatever the tokenizer adds: lengths, shared whole blocks, and no block that is not shared."""
    url, tokenizer = served
    requests = recorded(
        ([1, 2, 3], 5), ([1, 2, 3], 5), ([1, 2, 4], 0), ([1, 2], 0), ([1, 2], 9), ([1, 5, 6, 7], -7),
        ([1, 5, 6, 7], -7), ([8], 0), ([8], 1), ([], 30), ([], 30), ([9, 10], 0),
        ([9, 10, 11, 12, 13], 15), ([9, 10, 11, 12, 13, 14], 2),
    )  # fmt: skip
    found = replayed(requests, url, tokenizer=tokenizer, prompts=prompts)
    assert found.notes == []
    assert [result.reason for result in found.results] == [""] * len(requests)
    answers = [result.answer for result in found.results if result.answer]
    assert [answer.prompt_tokens for answer in answers] == [request.input_length for request in requests]
    assert [answer.cached_tokens for answer in answers] == expected_cached(requests)
    assert {answer.completion_tokens for answer in answers} == {3}
    figures = http_figures(found)
    assert figures["other_prompt_tokens"] == {"answers": 0, "most": 0}
    assert figures["answered"] == figures["requests"] == len(requests)
    again = replayed(requests, url, tokenizer=tokenizer, prompts=prompts)
    assert [result.answer.cached_tokens for result in again.results if result.answer] == expected_cached(requests)


def test_a_recorded_server_is_replayed_as_it_was(demo_model_path: Path, tmp_path: Path) -> None:
    """Real texts, recorded without them: another server counts the same tokens, and finds as many in its cache."""
    path = tmp_path / "recorded.jsonl"
    systems = ["You are a pirate. " * 20, "You are a poet. " * 30]
    asked = [(systems[0], "Who?"), (systems[1], "Who are you?"), (systems[0], "Where? " * 9), (systems[0], "Who?")]
    with engine_server(demo_model_path, traffic_log={"path": str(path)}) as url:
        for system, question in asked:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            body = {"model": "poet", "messages": messages, "max_tokens": 4, "ignore_eos": True}
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
    workload = read_traffic([path])
    assert len(workload) == len(asked) and workload.cached_tokens[-1] > 64
    with engine_server(demo_model_path) as url:
        found = replay_over_http(workload, HttpReplay(url, tokenizer=str(demo_model_path), most_open=1))
    assert found.notes == []
    answers = {result.shot.number: result.answer for result in found.results}
    for number, answer in answers.items():
        assert answer is not None
        assert answer.prompt_tokens == workload.prompt_tokens[number]
        assert answer.cached_tokens == workload.cached_tokens[number]
        assert answer.completion_tokens == workload.output_tokens[number] == 4
    figures = http_figures(found)
    assert figures["hit_rate"] == figures["recorded"]["hit_rate"] > 0.2


def test_a_chat_is_as_long_as_in_the_file(demo: str, demo_model_path: Path, replayed: Replayed) -> None:
    """The template's tokens are counted; how much shorter shared prefixes may be is said."""
    requests = recorded(([1, 2, 3], 5), ([1, 2, 4], 0), ([1, 2, 3], 5))
    found = replayed(requests, demo, tokenizer=str(demo_model_path), api="chat")
    answers = [result.answer for result in found.results if result.answer]
    assert [answer.prompt_tokens for answer in answers] == [request.input_length for request in requests]
    [note] = found.notes
    overhead = int(note.split(" adds ")[1].split()[0])
    assert overhead > 0
    for answer, whole in zip(answers, expected_cached(requests), strict=True):
        assert whole - overhead - BLOCK < answer.cached_tokens <= whole


def test_answers_have_the_files_lengths(demo: str, demo_model_path: Path, replayed: Replayed) -> None:
    """Without an early end: of several answers, one with its part of the tokens; an unknown number of tokens is one."""
    requests = recorded(([1], 4), ([2], 4), ([3], 4))
    requests[0].output_length, requests[0].choices, requests[1].output_length = 21, 3, 0
    found = replayed(requests, demo, tokenizer=str(demo_model_path))
    assert [result.answer.completion_tokens for result in found.results if result.answer] == [7, 1, 3]


def test_tenants_have_their_keys(demo_model_path: Path, replayed: Replayed) -> None:
    """By pseudonym, by number, or dealt; what a tenant's prompts leave in the cache is not found with another's key."""
    keys = {name: make_api_key() for name in ("acme", "zeta")}
    tenants = [TenantConfig(name=name, key_sha256=[digest]) for name, (_, digest) in keys.items()]
    requests = [
        *recorded(([1, 2], 3), tenant="t-a"),
        *recorded(([1, 2], 3), tenant="t-b"),
        *recorded(([1, 2], 3), tenant="t-a"),
    ]
    sent = {"t-a": keys["acme"][0], "1": keys["zeta"][0]}
    with engine_server(demo_model_path, tenants=tenants) as url:
        found = replayed(requests, url, tokenizer=str(demo_model_path), api_keys=sent)
        with pytest.raises(HttpReplayError, match=r"does not list its models: .*401"):
            replayed(requests, url, tokenizer=str(demo_model_path))
    assert [result.answer.cached_tokens for result in found.results if result.answer] == [0, 0, 32]
    figures = http_figures(found)
    assert {tenant: row["requests"] for tenant, row in figures["tenants"].items()} == {"t-a": 2, "t-b": 1}


def test_keys_are_dealt_alike_whatever_part_is_sent() -> None:
    """Tenants without a key of their own get one by their number in the whole file; $NAME is read from outside."""
    tenants = [f"t{number}" for number in range(5)]
    options = HttpReplay("http://any", api_keys={"a": "ka", "t1": "kb", "3": "kc"})
    assert keys_by_tenant(tenants, options) == {"t0": "ka", "t1": "kb", "t2": "kc", "t3": "kc", "t4": "kb"}
    assert set(keys_by_tenant(tenants, HttpReplay("http://any", api_key="one")).values()) == {"one"}
    assert keys_of({"a": "$ACME", "b": "plain"}, {"ACME": "secret"}) == {"a": "secret", "b": "plain"}
    with pytest.raises(HttpReplayError, match=r"the key of 'a' is \$ACME"):
        keys_of({"a": "$ACME"}, {})


def test_flags_become_keys_and_models(tmp_path: Path) -> None:
    """Files that are no keys and names that say nothing are refused with a sentence."""
    file = tmp_path / "keys.json"
    file.write_text('{"acme": "key"}')
    assert read_keys(file) == {"acme": "key"}
    for text in ("[]", '{"acme": 1}', "{", "\ud800".encode("utf-8", "surrogatepass")):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(HttpReplayError, match=r"keys\.json is no file of keys"):
            read_keys(file)
    with pytest.raises(HttpReplayError, match="no file of keys"):
        read_keys(tmp_path / "none")
    assert models_of(["all", "base=served", "a=b=c"]) == {"": "all", "base": "served", "a=b": "c"}
    for pairs in (["="], ["a="], ["=b"], ["a", "b"], ["a=b", "a=c"], [""]):
        with pytest.raises(HttpReplayError, match="each once"):
            models_of(pairs)


def test_a_bar_shows_what_became_of_the_requests() -> None:
    """On the console that it is given: sent, answered, failed, and the latest's lateness."""
    out = StringIO()
    with HttpProgress(3, Console(file=out, force_terminal=True, width=120)) as told:
        shot = Shot(0.0, "/", {})
        for sent, result in ((1, None), (1, Result(shot, 0.0, TimedAnswer(0.1, 0.2, "", 1, 0, 1))), (2, None)):
            told(sent, result)
        told(2, Result(shot, 1.5, None, 500, "no"))
    assert "2/3 sent, 1 answered, 1 failed" in out.getvalue()
    assert "1.5 s late" in out.getvalue()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Other:
    """Another server: it counts words, refuses ``refused`` fields, and answers as ``answers`` says."""

    def __init__(self, refused: Sequence[str] = (), added: int = 0, usage: bool = True, status: int = 200) -> None:
        self.refused, self.added, self.usage, self.status = refused, added, usage, status
        self.bodies: list[dict[str, Any]] = []

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        for name in self.refused:
            if name in body:
                return JSONResponse({"error": {"message": f"extra fields are not permitted: {name}"}}, 400)
        if len(self.bodies) > 2 + len(self.refused) and self.status != 200:
            return JSONResponse({"error": {"message": f"no room for {len(self.bodies)}"}}, self.status)
        if not isinstance(body["prompt"], str):
            return JSONResponse({"error": {"message": "prompt must be a string"}}, 400)
        words = len(body["prompt"].split())

        async def stream() -> Any:
            yield event(choices=[{"text": "one", "finish_reason": "length"}])
            if self.usage:
                yield event(
                    choices=[], usage={"prompt_tokens": words + self.added, "completion_tokens": body["max_tokens"]}
                )
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "served", "max_model_len": 60}, {"id": "pirate"}]})

    @contextmanager
    def running(self) -> Iterator[str]:
        routes = [Route("/v1/completions", self.completions, methods=["POST"]), Route("/v1/models", self.models)]
        with Loopback(lambda: Starlette(routes=routes)) as running:
            yield running.url


def test_fields_that_a_server_refuses_are_not_sent(demo_model_path: Path, replayed: Replayed) -> None:
    """They are dropped in the first small request, and that is said; so is a server without usage."""
    other = Other(["ignore_eos", "min_tokens"], usage=False)
    with other.running() as url:
        found = replayed(recorded(([1], 4)), url, tokenizer=str(demo_model_path))
    assert not {"ignore_eos", "min_tokens"} & set(other.bodies[-1])
    assert (other.bodies[-1]["max_tokens"], other.bodies[-1]["temperature"]) == (3, 0)
    said = " ".join(found.notes)
    assert "refuses ignore_eos" in said and "refuses min_tokens" in said and "does not tell how many tokens" in said
    assert http_figures(found)["hit_rate"] == "unknown"


def test_what_a_server_adds_unknown_to_the_tokenizer_is_subtracted(demo_model_path: Path, replayed: Replayed) -> None:
    """It takes the place of words, as far as there are more of them; longer prompts than the context are told."""
    with Other(added=3).running() as url:
        found = replayed(recorded(([1], 4), ([], 2), ([1, 2, 3, 4], 0)), url, tokenizer=str(demo_model_path))
    assert [result.answer.prompt_tokens for result in found.results if result.answer] == [20, 4, 64]
    assert found.notes == [
        "1 requests are longer than the server's context of 60 tokens.",
        "1 prompts are longer than in the file: the server itself adds as many tokens.",
    ]
    assert http_figures(found)["other_prompt_tokens"] == {"answers": 1, "most": 2}


def test_models_and_adapters_are_mapped(demo_model_path: Path, replayed: Replayed) -> None:
    """By name, to a default, or kept where the server lists them; else its first model answers."""
    requests = [
        *recorded(([1], 0), model="base"), *recorded(([1], 0), model="base", adapter="pirate"),
        *recorded(([1], 0), model="base", adapter="poet"),
    ]  # fmt: skip
    for models, expected in (
        ({}, ["served", "pirate", "served"]),
        ({"": "all"}, ["all"] * 3),
        ({"poet": "pirate", "base": "served"}, ["served", "served", "pirate"]),
    ):
        other = Other()
        with other.running() as url:
            replayed(requests, url, tokenizer=str(demo_model_path), models=models)
        assert [body["model"] for body in other.bodies[2:]] == expected


def test_failures_are_counted_with_their_reasons(demo_model_path: Path, replayed: Replayed) -> None:
    """Refusals and failures apart; nothing raises once the file's requests are sent."""
    for status, kind in ((429, "refused"), (503, "refused"), (500, "failed"), (400, "failed")):
        with Other(status=status).running() as url:
            found = replayed(recorded(([1], 0), ([2], 0)), url, tokenizer=str(demo_model_path))
        figures = http_figures(found)
        assert (figures["answered"], figures[kind]) == (0, 2)
        [(reason, count)] = figures["reasons"].items()
        assert reason.startswith(f"HTTP {status}: ") and "no room for N" in reason and count == 2
        assert "seconds" not in figures


def test_a_file_or_a_server_that_does_not_fit_is_refused_first(
    demo_model_path: Path, tmp_path: Path, replayed: Replayed
) -> None:
    """One clear sentence each, before any request of the file is sent."""
    requests, good = recorded(([1], 4)), str(demo_model_path)
    with pytest.raises(HttpReplayError, match="does not list its models"):
        replayed(requests, "http://127.0.0.1:9", tokenizer=good)
    with pytest.raises(HttpReplayError, match="no request with a prompt"):
        replayed(requests, "http://127.0.0.1:9", skip=1)
    with pytest.raises(HttpReplayError, match="speed must be above 0"):
        replayed(requests, "http://127.0.0.1:9", speed=0.0)
    other = Other(status=500)
    with other.running() as url:
        with pytest.raises(HttpReplayError, match=r"no tokenizer: .*--tokenizer"):
            replayed(requests, url)
        with pytest.raises(HttpReplayError, match=r"no tokenizer: .*nowhere"):
            replayed(requests, url, tokenizer=str(tmp_path / "nowhere"))
    with Other(added=-30).running() as url, pytest.raises(HttpReplayError, match=r"counts 10 and 50 .* has 40 and 80"):
        replayed(requests, url, tokenizer=good)
    other = Other(["prompt"])
    with other.running() as url, pytest.raises(HttpReplayError, match="refuses a small request: HTTP 400"):
        replayed(requests, url, tokenizer=good)
    with Other().running() as url, pytest.raises(HttpReplayError, match="takes no token ids, send text"):
        replayed(requests, url, tokenizer=good, prompts="ids")


def test_a_part_of_the_file_is_sent_at_a_speed(demo_model_path: Path, replayed: Replayed) -> None:
    """Times count from the first request sent, and only --speed changes them; what has no prompt is left out."""
    requests = recorded(*[([number], 1) for number in range(8)])
    for number, request in enumerate(requests):
        request.timestamp = 1000.0 + 4.0 * number
    requests[3].input_length, requests[3].hash_ids, requests[7].status = 0, [], 429
    with Other().running() as url:
        found = replayed(requests, url, tokenizer=str(demo_model_path), skip=2, limit=4, speed=2.0)
    assert [result.shot.at_s for result in found.results] == pytest.approx([0.0, 0.004, 0.006])
    assert list(found.rows) == [2, 4, 5]
    assert found.notes[:2] == [
        "1 requests of the file have no prompt, and were not sent.",
        "1 requests got no answer when they were recorded, and were not sent.",
    ]


def test_after_an_interrupt_there_are_the_results_so_far(demo_model_path: Path, replayed: Replayed) -> None:
    """Ctrl-C ends the replay with what was measured; progress tells of each sending and each result."""
    seen: list[tuple[int, Result | None]] = []

    def told(sent: int, result: Result | None) -> None:
        seen.append((sent, result))
        if sum(one is not None for _, one in seen) == 2:
            signal.raise_signal(signal.SIGINT)

    requests = recorded(*[([number], 1) for number in range(2)])
    requests += recorded(([9], 1))
    requests[-1].timestamp = 1e9  # days later
    with Other().running() as url:
        found = replayed(requests, url, told=told, tokenizer=str(demo_model_path))
    assert found.interrupted
    assert [result.shot.number for result in found.results] == [0, 1]
    assert max(sent for sent, _ in seen) == 2
    figures = http_figures(found)
    assert figures["interrupted"] and figures["requests"] == 2 and figures["recorded"]["requests"] == 3
    assert all(result.shot.body == {} and result.answer and not result.answer.text for result in found.results)


def test_figures_stand_beside_the_files(tmp_path: Path) -> None:
    """What the file recorded of the same requests, by tenant, too; a table for a terminal."""
    requests = [
        TrafficRequest(
            timestamp=0.0,
            input_length=100,
            output_length=11,
            tenant="a",
            cached_tokens=50,
            ttft_ms=100.0,
            duration_ms=1100.0,
        ),
        TrafficRequest(
            timestamp=0.0,
            input_length=300,
            output_length=1,
            tenant="b",
            cached_tokens=0,
            ttft_ms=300.0,
            duration_ms=300.0,
        ),
        TrafficRequest(timestamp=0.0, input_length=10, tenant="b", status=429, end="router"),
        TrafficRequest(timestamp=0.0, input_length=10, tenant="b", status=500),
    ]
    workload = read(requests, tmp_path)
    found = HttpResults(workload, range(len(workload)))
    row = http_figures(found)["recorded"]
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (2, 400, 12)
    assert (row["hit_rate"], row["ttft_mean_s"], row["tpot_mean_s"]) == (0.125, pytest.approx(0.2), pytest.approx(0.1))
    figures = http_figures(found)
    assert figures["tenants"]["b"]["recorded"]["requests"] == 1
    assert "tpot_mean_s" not in figures["tenants"]["b"]["recorded"]
    assert figures["notes"] == []
    found.results = [Result(Shot(0.0, "/", {}, "a"), 1.5, TimedAnswer(0.25, 0.5, "", 100, 60, 11))]
    figures = http_figures(found)
    assert figures["tenants"]["a"]["hit_rate"] == 0.6 and figures["tenants"]["b"]["requests"] == 0
    assert (figures["ttft_mean_s"], figures["seconds"]) == (1.75, 2.0)
    [late] = figures["notes"]
    assert late.startswith("Requests were sent up to 1.5 s late")
    table = http_table(figures)
    assert table.row_count == 16 + 2
    assert [column.header for column in table.columns] == ["", "replayed", "recorded"]


def test_connections_stay_within_the_processs_limit() -> None:
    assert open_files(10) == 10
    assert 1 <= open_files(1 << 30) < 1 << 30
