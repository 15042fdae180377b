"""`warmpath bench`: the commands; `serve_app/cli/bench.py` measures."""

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.console import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Measure a running server: speed, cache, neighbour.")

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
    from serve_app.cli.bench import Server, measure_speed

    measure_speed(Server(url.rstrip("/"), api_key), model, requests, at_once, words, max_tokens)


@app.command()
def cache(
    file: Annotated[Path, typer.Argument(help="chat requests, one JSON object per line; OpenAI's batch files, too")],
    url: ServerUrl = HERE,
    api_key: ApiKey = "",
    model: ServedModel = None,
    at_once: AtOnce = 1,
) -> None:
    """Measure the cache's benefit for your prompts: each one alone, then all of them in the order of the file."""
    from serve_app.cli.bench import Server, measure_cache

    measure_cache(file, Server(url.rstrip("/"), api_key), model, at_once)


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
    from serve_app.cli.bench import Server, measure_neighbour

    server, flooded = Server(url.rstrip("/"), api_key), Server(url.rstrip("/"), flood_api_key)
    measure_neighbour(server, flooded, model, requests, flood_at_once, words, max_tokens)
