"""What servers that already run say about themselves, before a start and for `warmpath doctor`."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.checks.finding import Finding, Look, problem
from serve_app.config.app import AppConfig
from serve_app.config.workers import listed
from serve_app.engine.remote.dialect import WorkerFacts
from serve_app.engine.remote.reading import WorkerHttp
from serve_app.engine.remote.servers import Unfit, check_name, check_tokenizer, facts_of
from serve_app.tenants import worker_key


def answers_of_workers(settings: AppConfig, tokenizer: str = "") -> dict[str, WorkerFacts | str]:
    """Return by URL what each worker says, or a sentence about one that cannot serve. Raises OSError, ValueError.

    ``tokenizer``: the path of the model's tokenizer.json, "" while it is not known.
    """
    key = worker_key(settings.worker_key_file)

    async def ask() -> dict[str, WorkerFacts | str]:
        async with aclosing(WorkerHttp(key)) as http:

            async def one(url: str) -> WorkerFacts | str:
                try:
                    return await facts_of(http, url)
                except Unfit as error:
                    return str(error)

            urls = [worker.url for worker in listed(settings.workers)]
            answers = dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))
            names = settings.model_name, settings.model
            facts = {url: answer for url, answer in answers.items() if isinstance(answer, WorkerFacts)}
            if "model" not in settings.model_fields_set:  # it is the first one's
                names = next(((each.model, each.root) for each in facts.values()), names)
            for url, each in facts.items():
                try:
                    check_name(url, each, *names)
                    await check_tokenizer(http, url, each, names[0], tokenizer)
                except Unfit as error:
                    answers[url] = str(error)
            return answers

    return asyncio.run(ask())


def settings_by_workers(settings: AppConfig) -> dict[str, Any]:
    """Return the settings that follow from the workers, unless they are given.

    Of several models, each one's follow from its own workers. Raises ValueError if none can serve a model.
    """
    if settings.models:
        each = map(settings_by_workers, settings.served().values())
        entries = [{**entry, **facts_of} for entry, facts_of in zip(settings.models, each, strict=True)]
        return {"models": entries} if entries != settings.models else {}
    if not settings.engine_traits.external:
        return {}
    try:
        answers = answers_of_workers(settings)
    except OSError as error:
        raise ValueError(f"workers: {error}") from None
    facts = [answer for answer in answers.values() if isinstance(answer, WorkerFacts)]
    if not facts:
        raise ValueError("no worker can serve: " + ("; ".join(map(str, answers.values())) or "none is listed"))
    facts_of = {
        "model": facts[0].root,
        "served_model_name": facts[0].model,
        "block_size": facts[0].block_size,
        "max_model_len": min((each.max_model_len for each in facts if each.max_model_len), default=0),
        "replicas": len(answers),
    }
    given = settings.model_fields_set - {"replicas"}
    if "model" in given:
        given |= {"served_model_name"}
    return {name: value for name, value in facts_of.items() if value and name not in given}


def workers(look: Look) -> Iterator[Finding]:
    """Find what the settings' workers say, and what this engine goes without."""
    settings = look.settings
    if not settings.engine_traits.external or look.place == "elsewhere":
        return
    lacks = ", ".join(needing.what for needing in settings.engine_traits.lacks())
    yield Finding("remote", f"goes without {lacks}")
    model = resolve_model(settings.model) if look.place == "start" else Path(settings.model)
    tokenizer = model / "tokenizer.json"
    try:
        answers = answers_of_workers(settings, str(tokenizer) if tokenizer.is_file() else "")
        feeds = {worker.url: worker.events for worker in listed(settings.workers)}
    except (OSError, ValueError) as error:
        yield problem("workers", str(error))
        return
    size = settings.block_size if "block_size" in settings.model_fields_set else 0
    for url, answer in answers.items():
        if isinstance(answer, str):
            yield problem(url, answer.removeprefix(f"{url} "))
            continue
        blocks = f", blocks of {answer.block_size} tokens" if answer.block_size else ""
        yield Finding(url, f"{answer.called} serves {answer.model}{blocks}")
        size = size or answer.block_size  # the first one's
        if answer.dialect.blind:
            continue
        if size and answer.block_size % size:
            other = f"its blocks have {answer.block_size} tokens and the routers' {size}, so it is routed to by load"
            yield Finding(url, other, "set block_size", "warning")
        elif not _opens(feeds[url]):
            advice = "start it with --kv-events-config, or name its port: ?events=PORT"
            yield Finding(url, f"nothing listens at {feeds[url]}, so it is routed to by load", advice, "warning")


def _opens(address: str) -> bool:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=2.0).close()
    except OSError:
        return False
    return True
