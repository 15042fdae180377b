"""One hostile client of each kind, in a nice process: it must not take the processor from the server and the clock.

A client makes its requests, says that it is ready, and goes on until it is told to stop.
"""

import asyncio
import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import Any

import httpx

from benchmarks.common.prompts import WORDS

MAX_BODY_BYTES = 8 << 20
"""The default of the setting ``max_body_bytes``."""
TIMEOUT_S, LEAVES_S, PAUSE_S = 60.0, 5.0, 0.05
_READY_S, _END_S = 60.0, 30.0
_NICENESS = 19
"""Ray's workers have 15."""
SOURCE = "127.0.0.2"
"""The hostile client's address, another than the neighbour's."""
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"

Statuses = Counter[str]
"""Requests by status; 0: the connection was lost, or the client left."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Where a client goes, and as whom ("": without a key)."""

    host: str
    port: int
    api_key: str

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


Posts = Iterator[tuple[str, bytes]]
"""Paths and bodies, without an end."""


def beginnings() -> Posts:
    """Prompts of a megabyte that repeat what rules for agents' clients look for."""
    for number in range(1_000_000):
        for begin in ("Git snapshot at conversation start.", "x-anthropic-billing-header: ", "<system-reminder>"):
            text = f"{number} " + begin * ((1 << 20) // len(begin))
            yield MESSAGES, _json(model="demo", max_tokens=1, system=text, messages=[_user("Hi")])


def references() -> Posts:
    """Schemas with many spellings of one reference, each time another."""
    for number in range(1_000_000):
        name = f"big-one-{number}"
        spelled = [
            "".join(f"%{ord(letter):02x}" if at >> place & 1 else letter for place, letter in enumerate(name))
            for at in range(256)
        ]
        yield (
            CHAT,
            _schema(
                {
                    "type": "object",
                    "properties": {f"r{at}": {"$ref": f"#/$defs/{one}"} for at, one in enumerate(spelled)},
                    "$defs": {
                        name: {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(64)}}
                    },
                }
            ),
        )


def keywords() -> Posts:
    """Schemas that no answer can follow, with much to try before that is known."""
    for number in range(1_000_000):
        properties = {f"p{number}-{at}": {"type": "string", "pattern": f"^(a|b){{{at}}}$"} for at in range(400)}
        yield CHAT, _schema({"type": "object", "properties": properties, "required": list(properties), "minItems": 5})
        yield CHAT, _schema({"allOf": [{"anyOf": [{"const": at}, {"pattern": f"(x{number}+)+"}]} for at in range(300)]})


def grammars() -> Posts:
    """Regular expressions and grammars that explode."""
    for number in range(1_000_000):
        for kind, text in (
            ("regex", f"(({number}|a{{1,500}}){{1,500}}b){{1,500}}"),
            ("regex", "|".join(f"{number}{word}.*" for word in WORDS * 20)),
            ("grammar", "start: " + "(" * 2000 + f'"{number}"' + ")" * 2000),
            ("grammar", "\n".join(f'r{at}: r{at + 1} r{at + 1} | "{number}"' for at in range(2000)) + '\nr2000: "a"'),
        ):
            yield CHAT, _json(**_SMALL, structured_outputs={kind: text})


def big_bodies() -> Posts:
    """Bodies of 8 MB: messages of one letter, one text, numbers, and many unknown fields."""
    paragraph = " ".join(random.Random(0).choices(WORDS, k=20_000))
    shapes = [
        '{"model":"demo","messages":[%s]}' % ",".join(['{"role":"user","content":"a"}'] * 280_000),  # noqa: UP031
        _json(model="demo", messages=[_user((paragraph * 100)[: MAX_BODY_BYTES - 200])]).decode(),
        '{"model":"demo","max_tokens":1,"prompt":[%s]}' % ",".join(["7"] * 4_000_000),  # noqa: UP031
        '{"model":"demo","messages":[{"role":"user","content":"a"}],%s}'  # noqa: UP031
        % ",".join(f'"k{at}":{at}' for at in range(400_000)),
    ]
    for body in cycle([shape.encode() for shape in shapes]):
        yield COMPLETIONS if b'"prompt"' in body[:60] else CHAT, body


def nested() -> Posts:
    """Deep lists and objects in every field."""
    for name in cycle(("messages", "tools", "metadata", "response_format", "tool_choice", "unknown")):
        for begin, end in (("[", "]"), ('{"a":', "}")):
            deep = begin * 200_000 + "1" + end * 200_000
            yield CHAT, f'{{"model":"demo","messages":[{{"role":"user","content":"a"}}],"{name}":{deep}}}'.encode()


def prompts() -> Posts:
    """128 short prompts a request, and prompts as long as the model takes."""
    for number in range(1_000_000):
        texts = [f"{number} {at} {' '.join(random.Random(at).choices(WORDS, k=4))}" for at in range(128)]
        yield COMPLETIONS, _json(model="demo", prompt=texts, max_tokens=16, ignore_eos=True)
        long = " ".join(random.Random(number).choices(WORDS, k=1400))
        yield CHAT, _json(model="demo", messages=[_user(long)], max_tokens=1)


def tools() -> Posts:
    """128 tools with schemas of their own, one of which must be called."""
    for number in range(1_000_000):
        schema = {
            "type": "object",
            "properties": {f"p{at}": {"type": "string", "maxLength": at + 1} for at in range(20)},
        }
        functions = [{"name": f"f{number}_{at}", "parameters": schema} for at in range(128)]
        listed = [{"type": "function", "function": one} for one in functions]
        yield CHAT, _json(**_SMALL, tools=listed, tool_choice="required")


def counts() -> Posts:
    """Counts of tokens, and texts of a million tokens."""
    text = " ".join(random.Random(0).choices(WORDS, k=200_000))
    for number in range(1_000_000):
        yield "/tokenize", _json(model="demo", prompt=f"{number} {text}", return_token_strs=True)
        yield "/detokenize", _json(model="demo", tokens=[number % 500] * 1_000_000)
        yield f"{MESSAGES}/count_tokens", _json(model="demo", messages=[_user(f"{number} {text}")])


def log_probabilities() -> Posts:
    """Everything that can be told of each token, 16 times."""
    for number in range(1_000_000):
        yield CHAT, _json(**_SMALL, n=16, logprobs=True, top_logprobs=20, seed=number, ignore_eos=True)
        text = f"{number} " + " ".join(random.Random(number).choices(WORDS, k=700))
        yield COMPLETIONS, _json(model="demo", prompt=text, max_tokens=1, prompt_logprobs=20, echo=True, logprobs=5)


def stored() -> Posts:
    """Responses to keep, each of half a megabyte."""
    text = " ".join(random.Random(0).choices(WORDS, k=100))
    items = [{"type": "message", "role": "user", "content": text}] * 700
    for number in range(1_000_000):
        yield "/v1/responses", _json(model="demo", input=[*items, _user(str(number))], store=True, truncation="auto")


def message_batches() -> Posts:
    """Batches of thousands of messages that cannot be answered."""
    one = {"params": {"model": "demo", "max_tokens": 0, "messages": [_user("a")]}}
    for number in range(1_000_000):
        yield f"{MESSAGES}/batches", _json(requests=[{**one, "custom_id": f"{number}-{at}"} for at in range(5000)])


def documents() -> Posts:
    """Questions for documents over everything, and unknown paths."""
    for number in range(1_000_000):
        for path in ("/metrics", "/v1/usage", "/v1/cache/events?once=true", "/v1/tenants/stats", "/v1/files", "/docs"):
            yield path, b""
        yield f"/v1/{'a/' * 2000}{number}", b""


def odd_headers() -> Posts:
    """See ``_odd``: sizes and kinds of headers."""
    for number in cycle(range(1000)):
        yield ("/health" if number % 2 else CHAT), (b"" if number % 2 else _json(**_SMALL))


_SMALL: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _schema(schema: dict[str, Any]) -> bytes:
    return _json(**_SMALL, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})


def _odd(number: int) -> dict[str, str]:
    return {
        "authorization": f"Bearer {number}", "x-api-key": "another", "x-session-id": "s" * 300,
        "x-warmpath-session": str(number), **{f"x-{at}": "a" * 30 for at in range(number % 1200)},
    }  # fmt: skip


async def posts(target: Victim, ready: Callable[[], None], statuses: Statuses, of: Callable[[], Posts]) -> None:
    """Four connections send a kind's requests, each again at once; who waits for over five seconds leaves."""
    requests = of()
    first = [next(requests) for _ in range(4)]
    ready()

    async def send(client: httpx.AsyncClient, path: str, body: bytes, number: int) -> None:
        headers = _odd(number) if of is odd_headers else {}
        method = "POST" if body else "GET"
        try:
            answer = await client.request(method, target.url + path, content=body, headers=headers, timeout=LEAVES_S)
            statuses[str(answer.status_code)] += 1
        except httpx.HTTPError:
            statuses["0"] += 1
            await asyncio.sleep(PAUSE_S)

    async def line(begin: tuple[str, bytes], number: int) -> None:
        transport = httpx.AsyncHTTPTransport(local_address=SOURCE)
        headers = {**target.headers, "content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, headers=headers) as client:
            await send(client, *begin, number)
            for path, body in requests:
                number += 4
                await send(client, path, body, number)

    await asyncio.gather(*(line(begin, number) for number, begin in enumerate(first)))


async def batches_of_line_ends(target: Victim, ready: Callable[[], None], statuses: Statuses) -> None:
    """A file of 16 MiB of line ends, and ten batches over each; files of many parts."""
    ready()
    async with httpx.AsyncClient(headers=target.headers, timeout=TIMEOUT_S) as client:
        while True:
            form: dict[str, Any] = {"file": ("in.jsonl", b"\n" * (16 << 20)), "purpose": (None, b"batch")}
            answer = await client.post(f"{target.url}/v1/files", files=form)
            statuses[str(answer.status_code)] += 1
            named = answer.json().get("id", "")
            body = {"input_file_id": named, "endpoint": CHAT, "completion_window": "24h"}
            for _ in range(10):
                answer = await client.post(f"{target.url}/v1/batches", json=body)
                statuses[str(answer.status_code)] += 1
            parts = [(f"x{number}", (f"{number}" * 50, b"a")) for number in range(60)]
            answer = await client.post(f"{target.url}/v1/files", files=parts)
            statuses[str(answer.status_code)] += 1


async def leavers(target: Victim, ready: Callable[[], None], statuses: Statuses) -> None:
    """Bursts of 100 ask for long answers, streamed or whole, one or many; each leaves at a random moment."""
    rng = random.Random(0)
    requests = [_posted(target, CHAT, _long(rng, str(number))) for number in range(500)]
    ready()

    async def leave(request: bytes, after_s: float) -> None:
        with suppress(OSError):
            async with _connected(target) as writer:
                writer.write(request)
                await asyncio.sleep(after_s)
        statuses["0"] += 1

    for first in cycle(range(0, len(requests), 100)):
        burst = requests[first : first + 100]
        await asyncio.gather(*(leave(request, rng.choice((0.03, 0.3, 1.0)) * rng.random()) for request in burst))


async def slow_readers(target: Victim, ready: Callable[[], None], statuses: Statuses) -> None:
    """Clients that ask for long answers, or send half a request, and then do nothing."""
    rng = random.Random(0)
    ready()

    async def stay(request: bytes) -> None:
        with suppress(OSError):
            async with _connected(target) as writer:
                writer.write(request)
                await asyncio.sleep(LEAVES_S)
        statuses["0"] += 1

    while True:
        asked = [_posted(target, CHAT, {**_long(rng, str(at)), "stream": True}) for at in range(50)]
        await asyncio.gather(*(stay(request if at % 2 else request[:90]) for at, request in enumerate(asked)))


async def noise(target: Victim, ready: Callable[[], None], statuses: Statuses) -> None:
    """Bytes that are no requests, and requests with a byte changed."""
    rng = random.Random(0)
    ready()

    async def send() -> None:
        request = bytearray(_posted(target, CHAT, _SMALL))
        for _ in range(rng.randint(1, 4)):
            request[rng.randrange(len(request))] = rng.randrange(256)
        with suppress(OSError):
            async with _connected(target) as writer:
                writer.write(bytes(request) if rng.random() < 0.7 else rng.randbytes(4000))
                await asyncio.sleep(0.1)
        statuses["0"] += 1

    while True:
        await asyncio.gather(*(send() for _ in range(30)))


@asynccontextmanager
async def _connected(target: Victim) -> AsyncIterator[asyncio.StreamWriter]:
    _, writer = await asyncio.open_connection(target.host, target.port, local_addr=(SOURCE, 0))
    try:
        yield writer
    finally:
        writer.transport.abort()


def _long(rng: random.Random, text: str) -> dict[str, Any]:
    messages = [_user(f"{text} {'word ' * rng.choice((5, 50, 500))}")]
    more = {"n": rng.choice((1, 1, 16)), "stream": rng.random() < 0.7}
    return {"model": "demo", "max_tokens": 1000, "ignore_eos": True, "messages": messages, **more}


def _posted(target: Victim, path: str, body: dict[str, Any]) -> bytes:
    """Return a request as it goes over the wire."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {target.host}:{target.port}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in target.headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


HostileClient = Callable[[Victim, Callable[[], None], Statuses], Awaitable[None]]


def _posting(of: Callable[[], Posts]) -> HostileClient:
    return lambda target, ready, statuses: posts(target, ready, statuses, of)


_POSTING: Sequence[Callable[[], Posts]] = (
    beginnings, references, keywords, grammars, big_bodies, nested, prompts, tools, counts, log_probabilities, stored,
    documents, odd_headers,
)  # fmt: skip
ATTACKS: dict[str, HostileClient] = {
    **{of.__name__: _posting(of) for of in _POSTING},
    **{one.__name__: one for one in (leavers, slow_readers, noise)},
    message_batches.__name__: _posting(message_batches),
    batches_of_line_ends.__name__: batches_of_line_ends,
}
"""Every kind of hostile client. Last are those whose work goes on when they have gone, beside the next ones'."""


@asynccontextmanager
async def attack(name: str, target: Victim) -> AsyncIterator[Statuses]:
    """Attack during the block, which fills the statuses. Raises RuntimeError when the attack breaks."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    stop = context.Event()
    process = context.Process(target=_main, args=(name, target, stop, there), daemon=True)
    process.start()
    there.close()

    def receive(timeout_s: float) -> Statuses:
        if not here.poll(timeout_s):
            raise RuntimeError(f"the hostile client's process {process.pid} said nothing for {timeout_s:.0f} s")
        received: Statuses = here.recv()
        return received

    statuses = await asyncio.to_thread(receive, _READY_S)
    try:
        yield statuses
    finally:
        stop.set()
        statuses.update(await asyncio.to_thread(receive, _END_S))
        await asyncio.to_thread(process.join, 5.0)
        if process.is_alive():
            process.kill()
            process.join()
        here.close()


def _main(name: str, target: Victim, stop: Event, out: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    statuses: Statuses = Counter()

    async def run() -> None:
        task = asyncio.ensure_future(ATTACKS[name](target, lambda: out.send(Counter()), statuses))
        await asyncio.wait({task, asyncio.ensure_future(asyncio.to_thread(stop.wait))}, return_when="FIRST_COMPLETED")
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    asyncio.run(run())
    out.send(statuses)
