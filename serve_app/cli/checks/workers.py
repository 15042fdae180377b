"""What servers that already run say about themselves, before a start and for `warmpath doctor`."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from serve_app.cli.checks.finding import Finding, Look, problem
from serve_app.config.app import AppConfig
from serve_app.config.workers import listed
from serve_app.engine.remote.servers import Unfit, WorkerFacts, check_name, facts_of
from serve_app.tenants import worker_key


def asked(settings: AppConfig) -> dict[str, WorkerFacts | str]:
    """Return by URL what each worker says, or a sentence about one that cannot serve. Raises OSError, ValueError."""
    key = worker_key(settings.worker_key_file)

    async def ask() -> dict[str, WorkerFacts | str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def one(url: str) -> WorkerFacts | str:
                try:
                    return await facts_of(http, url)
                except Unfit as error:
                    return str(error)

            urls = [worker.url for worker in listed(settings.workers)]
            return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))

    answers = asyncio.run(ask())
    names = settings.model_name, settings.model
    if "model" not in settings.model_fields_set:  # it is the first one's
        names = next(((each.model, each.root) for each in answers.values() if isinstance(each, WorkerFacts)), names)
    for url, answer in answers.items():
        if isinstance(answer, WorkerFacts):
            try:
                check_name(url, answer, *names)
            except Unfit as error:
                answers[url] = str(error)
    return answers


def told_by_workers(settings: AppConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that follow from the workers, unless they are given, and sentences about unfit workers.

    Of several models, each one's follow from its own workers. Raises ValueError if none can serve a model.
    """
    if settings.models:
        each = [told_by_workers(one) for one in settings.served().values()]
        entries = [{**entry, **told} for entry, (told, _) in zip(settings.models, each, strict=True)]
        follows = {"models": entries} if entries != settings.models else {}
        return follows, [sentence for _, unfit in each for sentence in unfit]
    if not settings.engine_traits.external:
        return {}, []
    try:
        answers = asked(settings)
    except OSError as error:
        raise ValueError(f"workers: {error}") from None
    unfit = [answer for answer in answers.values() if isinstance(answer, str)]
    facts = [answer for answer in answers.values() if isinstance(answer, WorkerFacts)]
    if not facts:
        raise ValueError("no worker can serve: " + ("; ".join(unfit) or "none is listed"))
    told = {
        "model": facts[0].root,
        "served_model_name": facts[0].model,
        "block_size": facts[0].block_size,
        "max_model_len": min((each.max_model_len for each in facts if each.max_model_len), default=0),
        "replicas": len(answers),
    }
    given = settings.model_fields_set - {"replicas"}
    if "model" in given:
        given |= {"served_model_name"}
    return {name: value for name, value in told.items() if value and name not in given}, unfit


def workers(look: Look) -> Iterator[Finding]:
    """Find what the settings' workers say, and what this engine goes without."""
    settings = look.settings
    if not settings.engine_traits.external or look.place != "here":
        return
    lacks = ", ".join(needing.what for needing in settings.engine_traits.lacks())
    yield Finding("remote", f"goes without {lacks}")
    try:
        answers = asked(settings)
        feeds = {worker.url: worker.events for worker in listed(settings.workers)}
    except (OSError, ValueError) as error:
        yield problem("workers", str(error))
        return
    for url, answer in answers.items():
        if isinstance(answer, str):
            yield problem(url, answer.removeprefix(f"{url} "))
        else:
            blocks = f", blocks of {answer.block_size} tokens" if answer.block_size else ""
            yield Finding(url, f"{answer.called} serves {answer.model}{blocks}")
            if answer.kind != "tensorrt_llm" and not _opens(feeds[url]):
                advice = "start it with --kv-events-config, or name its port: ?events=PORT"
                yield Finding(url, f"nothing listens at {feeds[url]}, so it is routed to by load", advice, "warning")


def _opens(address: str) -> bool:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=2.0).close()
    except OSError:
        return False
    return True
