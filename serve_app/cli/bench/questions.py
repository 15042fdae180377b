"""`warmpath bench`: measure a running server's speed, its cache's benefit, and its behaviour beside a flood."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import httpx
import typer
from rich.table import Table

from serve_app.cli.bench.client import RequestFailed, TimedAnswer, chat_body, stream_chat
from serve_app.cli.bench.load import Body, Server, answers, row, texts
from serve_app.cli.console import console, fail

app = typer.Typer(no_args_is_help=True, help="Measure a running server: speed, cache, neighbour.")

ServerUrl = Annotated[str, typer.Option(envvar="WARMPATH_URL", help="the server's URL, without /v1")]
ApiKey = Annotated[str, typer.Option(envvar="WARMPATH_API_KEY", help="a tenant's key, if the server needs one")]
ServedModel = Annotated[str | None, typer.Option(help="default: the first one that the server lists")]
Requests = Annotated[int, typer.Option(min=1, help="requests in each row")]
AtOnce = Annotated[int, typer.Option(min=1, help="concurrent requests")]
PromptWords = Annotated[int, typer.Option(min=1, help="words in each prompt")]
MaxTokens = Annotated[int, typer.Option(min=1, help="tokens in each answer")]
HERE = "http://127.0.0.1:8000"


@app.command()
def speed(
    url: ServerUrl = HERE,
    api_key: ApiKey = "",
    model: ServedModel = None,
    requests: Requests = 16,
    at_once: AtOnce = 4,
    words: PromptWords = 500,
    max_tokens: MaxTokens = 64,
) -> None:
    """Measure the server's speed: new prompts, then the same ones again."""
    server = Server(url.rstrip("/"), api_key)
    name = model or server.model()
    bodies = [chat_body(name, max_tokens, "Sum this up.", text) for text in texts(requests, words, 0)]
    _show(asyncio.run(_in_turn(server, at_once, {"new prompts": bodies, "the same again": bodies})))


@app.command()
def cache(
    file: Annotated[Path, typer.Argument(help="chat requests, one JSON object per line; OpenAI's batch files, too")],
    url: ServerUrl = HERE,
    api_key: ApiKey = "",
    model: ServedModel = None,
    at_once: AtOnce = 1,
) -> None:
    """Measure the cache's benefit for your prompts: each one alone, then all of them in the order of the file."""
    server = Server(url.rstrip("/"), api_key)
    name = model or server.model()
    try:
        bodies = [_chat(line, name) for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        fail(f"{file}: {error}")
    if not bodies:
        fail(f"{file} holds no requests")
    apart = [body | {"cache_salt": uuid4().hex} for body in bodies]
    shared = uuid4().hex
    together = [body | {"cache_salt": shared} for body in bodies]
    _show(asyncio.run(_in_turn(server, at_once, {"without the cache": apart, "with the cache": together})))


@app.command()
def neighbour(
    flood_api_key: Annotated[
        str, typer.Option(envvar="WARMPATH_FLOOD_API_KEY", help="the key of a second tenant, which floods")
    ],
    url: ServerUrl = HERE,
    api_key: ApiKey = "",
    model: ServedModel = None,
    requests: Requests = 30,
    flood_at_once: Annotated[int, typer.Option(min=1, help="the flood's concurrent requests")] = 64,
    words: PromptWords = 500,
    max_tokens: MaxTokens = 16,
) -> None:
    """Measure a tenant's requests beside another tenant that floods the server."""
    if api_key == flood_api_key:
        fail("a neighbour is another tenant: give its key with --flood-api-key, and yours with --api-key")
    server, flooded = Server(url.rstrip("/"), api_key), Server(url.rstrip("/"), flood_api_key)
    name = model or server.model()
    [system] = texts(1, words, 0)
    bodies = [chat_body(name, max_tokens, f"Question {number}.", system) for number in range(requests)]

    def new() -> Body:
        return chat_body(name, 1, "Sum this up.", *texts(1, words, 1))

    async def flood(client: httpx.AsyncClient, begun: asyncio.Event) -> None:
        while True:
            with suppress(RequestFailed, httpx.HTTPError):  # the server may refuse a flood
                await stream_chat(client, flooded.url, new())
            begun.set()

    async def both() -> list[tuple[str, list[TimedAnswer]]]:
        for each, body in ((server, bodies[0]), (flooded, new())):
            await answers(each, [body], 1, "warm-up")
        rows, begun = await _in_turn(server, 1, {"alone": bodies}), asyncio.Event()
        async with flooded.client() as client:
            flooding = [asyncio.create_task(flood(client, begun)) for _ in range(flood_at_once)]
            try:
                await begun.wait()
                return rows + await _in_turn(server, 1, {"beside a flood": bodies})
            finally:
                for task in flooding:
                    task.cancel()

    _show(asyncio.run(both()))


async def _in_turn(server: Server, at_once: int, sets: Mapping[str, list[Body]]) -> list[tuple[str, list[TimedAnswer]]]:
    return [(told, await answers(server, bodies, at_once, told)) for told, bodies in sets.items()]


def _chat(line: str, model: str) -> Body:
    request = json.loads(line)
    body = request.get("body", request) if isinstance(request, dict) else None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("each line is a chat request with messages, or has one as its body")
    return body | {"model": model, "temperature": 0, "max_tokens": body.get("max_tokens") or 32}


def _show(rows: list[tuple[str, list[TimedAnswer]]]) -> None:
    table = Table("", "requests", "TTFT p50", "TTFT p90", "tokens/s of an answer", "prompt from the cache")
    for name, found in rows:
        table.add_row(*row(name, found))
    console.print(table)
