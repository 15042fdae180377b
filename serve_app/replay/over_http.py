"""Sends a file's requests to any server of OpenAI's API, open loop, with made prompts of its lengths and prefixes.

What the server counts is measured first, with two small requests: the tokens that it adds, and the fields that it
takes. It does not know how requests are read from files, nor what is made of the results (``http_results.py``).
"""

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import numpy as np

from serve_app.replay.client import RequestFailed, TimedAnswer, stream_answer
from serve_app.replay.open_loop import MOST_OPEN, REFUSED, Result, Shot, send
from serve_app.replay.text import MadePrompts, PromptShapes, Words, tokenizer_at, words_of
from serve_app.traffic.workload import Workload

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_AHEAD = 16
"""The number of requests that are made before their time."""

_PROBES = (40, 80)
"""The words of the two small requests."""

_BUSY_TRIES = 10
_BUSY_S = 1.0


class HttpReplayError(ValueError):
    """The file cannot be replayed at this server; says what to change."""


@dataclass(frozen=True, slots=True)
class HttpReplay:
    """How to replay. ``url``: without /v1. ``speed``: divides the file's times.

    ``models``: the served name for each model or adapter of the file, and under "" for all others; without one a name
    that the server lists is kept, and the first that it lists stands for others. ``tokenizer``: a model, directory or
    tokenizer.json, "": the served model's. ``prompts``: what completions send. ``api_keys``: by the tenant's pseudonym
    or its number in the file, from 0; ``api_key``: where there are none. ``limit``: None for all. ``seed``: of the
    prompts; None: others each time, so that nothing of an earlier replay is in the server's cache.
    """

    url: str
    models: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    api: Literal["completions", "chat"] = "completions"
    prompts: Literal["text", "ids"] = "text"
    api_key: str = ""
    api_keys: Mapping[str, str] = field(default_factory=dict)
    speed: float = 1.0
    skip: int = 0
    limit: int | None = None
    timeout_s: float = 600.0
    most_open: int = MOST_OPEN
    seed: int | None = None


@dataclass(slots=True)
class HttpResults:
    """What was measured. ``rows``: the requests of ``workload`` that are sent; a shot's number is a place in it.

    ``notes``: what is not as in the file, in sentences. ``interrupted``: not all were sent.
    """

    workload: Workload
    rows: Sequence[int]
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What two small requests told. ``head``, ``tail``: tokens that the server adds before and after a prompt.

    ``fields``: of a body, beside the usual ones; those with a number have an answer's length.
    """

    head: int = 0
    tail: int = 0
    fields: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def keys_of(values: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return keys with those of the form $NAME from the environment. Raises HttpReplayError for one that is not set."""
    keys = dict(values)
    for tenant, key in keys.items():
        if key.startswith("$"):
            if key[1:] not in environment:
                raise HttpReplayError(f"the key of {tenant!r} is {key}, but there is no such variable")
            keys[tenant] = environment[key[1:]]
    return keys


def read_keys(file: Path) -> dict[str, str]:
    """Read ``api_keys`` from a JSON object in a file. Raises HttpReplayError."""
    try:
        keys = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HttpReplayError(f'{file} is no file of keys, {{"tenant": "key"}}: {error}') from error
    return keys_of(keys)


def models_of(pairs: Sequence[str]) -> dict[str, str]:
    """Return ``models`` of FILE_NAME=SERVED_NAME, or of a SERVED_NAME for all others. Raises HttpReplayError."""
    models: dict[str, str] = {}
    for pair in pairs:
        name, equals, served = pair.rpartition("=")
        if not served or (equals and not name) or name in models:
            raise HttpReplayError(f"--model {pair}: give NAME, or THE_FILES_NAME=NAME, each once")
        models[name] = served
    return models


def keys_by_tenant(tenants: Sequence[str], options: HttpReplay) -> dict[str, str]:
    """Return each tenant's key: its own, or one dealt to it, the same one whatever part of the file is sent."""
    keys = options.api_keys
    dealt = list(keys.values()) or [options.api_key]
    return {
        tenant: keys.get(tenant) or keys.get(str(number)) or dealt[number % len(dealt)]
        for number, tenant in enumerate(tenants)
    }


def shapes_of(workload: Workload, rows: Sequence[int]) -> PromptShapes:
    """Return the prompts of some of a file's requests."""
    chosen = np.asarray(rows, np.int64)
    begins, counts = workload.path_start[:-1][chosen], np.diff(workload.path_start)[chosen]
    starts = np.concatenate(([0], np.cumsum(counts)))
    paths = workload.paths[np.repeat(begins - starts[:-1], counts) + np.arange(starts[-1])]
    return PromptShapes(workload.prompt_tokens[chosen], paths, starts, workload.sizes, workload.block_tokens)


def replay_over_http(
    workload: Workload,
    options: HttpReplay,
    told: Callable[[int, Result | None], None] = lambda sent, result: None,
) -> HttpResults:
    """Send a file's requests, and return what was measured, also after Ctrl-C.

    ``told``: how many were sent, at each sending and with each result. Raises HttpReplayError before anything of the
    file is sent.
    """
    if options.speed <= 0.0:
        raise HttpReplayError("the speed must be above 0; 1 keeps the file's times")
    end = None if options.limit is None else options.skip + options.limit
    chosen = range(len(workload))[options.skip : end]
    rows = [row for row in chosen if workload.prompt_tokens[row]]
    if not rows:
        raise HttpReplayError("the file has no request with a prompt there: look at --skip and --limit")
    found = HttpResults(workload, rows)
    if len(rows) < len(chosen):
        found.notes.append(f"{len(chosen) - len(rows)} requests of the file have no prompt, and were not sent.")
    if workload.refused:
        found.notes.append(f"{workload.refused} requests got no answer when they were recorded, and were not sent.")
    sender = _Sender(found, options, told)
    try:
        asyncio.run(sender.run())
    except KeyboardInterrupt:
        found.interrupted = True
    return found


class _Sender:
    """One replay."""

    def __init__(self, found: HttpResults, options: HttpReplay, told: Callable[[int, Result | None], None]) -> None:
        self._found, self._workload, self._options, self._told = found, found.workload, options, told
        self._shapes = shapes_of(found.workload, found.rows)
        self._keys = keys_by_tenant(found.workload.tenants, options)
        self._url = options.url.rstrip("/").removesuffix("/v1")
        self._seed = secrets.randbits(32) if options.seed is None else options.seed
        self._sent = 0

    async def run(self) -> None:
        """Look at the server, then send everything."""
        options, found = self._options, self._found
        first = self._key(found.rows[0])
        headers = {"authorization": f"Bearer {first}"} if first else {}
        async with httpx.AsyncClient(timeout=options.timeout_s, headers=headers) as client:
            listed = await served_models(client, self._url)
            self._models = list(listed)
            words = await asyncio.to_thread(self._words, listed)
            self._facts = await look_at(client, self._url, options, self._model(found.rows[0]), words, self._seed)
        self._made = MadePrompts(words, self._shapes, head=self._facts.head, tail=self._facts.tail, seed=self._seed)
        found.notes += [*self._facts.notes, *self._warnings(listed)]
        await send(
            self._url, self._shots(), self._take, timeout_s=options.timeout_s, most_open=open_files(options.most_open)
        )

    def _words(self, listed: Mapping[str, Mapping[str, Any]]) -> Words:
        model = self._model(self._found.rows[0])
        root = str(listed.get(model, {}).get("root") or "")
        places = [self._options.tokenizer] if self._options.tokenizer else [model, root]
        reasons = []
        for place in dict.fromkeys(filter(None, places)):
            try:
                return words_of(tokenizer_at(place))
            except (ValueError, OSError) as error:
                reasons.append(str(error))
        raise HttpReplayError(f"no tokenizer: {'; '.join(reasons)}. Name the served model's with --tokenizer")

    def _warnings(self, listed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        rows, workload, notes = self._found.rows, self._workload, []
        prompts = workload.prompt_tokens[rows]
        longest = listed.get(self._model(rows[0]), {}).get("max_model_len")
        if isinstance(longest, int):
            long = int(np.count_nonzero(prompts + workload.output_tokens[rows] > longest))
            if long:
                notes.append(f"{long} requests are longer than the server's context of {longest} tokens.")
        short = int(np.count_nonzero(prompts <= self._facts.head + self._facts.tail))
        if short:
            notes.append(f"{short} prompts are longer than in the file: the server itself adds as many tokens.")
        if self._made.shared_too_far:
            notes.append(
                f"Up to {self._made.shared_too_far} tokens more are shared than in the file: more prompts go on from "
                "one place than the tokenizer has whole words."
            )
        return notes

    def _model(self, row: int) -> str:
        workload, names = self._workload, self._options.models
        adapter = -1 if workload.adapter is None else int(workload.adapter[row])
        own = [workload.adapters[adapter]] if adapter >= 0 else []
        own += [workload.models[workload.model[row]]] if workload.model[row] >= 0 else []
        for name in own:
            if name in names:
                return names[name]
        if "" in names:
            return names[""]
        return next((name for name in own if name in self._models), self._models[0])

    def _tenant(self, row: int) -> str:
        return str(self._workload.tenants[self._workload.tenant[row]])

    def _key(self, row: int) -> str:
        return self._keys[self._tenant(row)]

    async def _shots(self) -> AsyncIterator[Shot]:
        """Yield the requests, of which a few are made ahead in a thread, so that none waits for its making."""
        loop, ahead = asyncio.get_running_loop(), deque[asyncio.Future[Shot]]()
        with ThreadPoolExecutor(1) as maker:
            for number in range(len(self._found.rows)):
                ahead.append(loop.run_in_executor(maker, self._shot, number))
                if len(ahead) > _AHEAD:
                    yield await ahead.popleft()
                    self._tell_sent()
            while ahead:
                yield await ahead.popleft()
                self._tell_sent()

    def _shot(self, number: int) -> Shot:
        row, workload, options = self._found.rows[number], self._workload, self._options
        made = self._made.ids(number) if options.prompts == "ids" else self._made.text(number)
        tokens = max(int(workload.output_tokens[row]), 1)
        body = body_of(self._model(row), made, tokens, options.api, self._facts.fields)
        at_s = float(workload.arrival_s[row] - workload.arrival_s[self._found.rows[0]]) / options.speed
        return Shot(at_s, PATHS[options.api], body, self._tenant(row), self._key(row), number)

    def _tell_sent(self) -> None:
        self._sent += 1
        self._told(self._sent, None)

    def _take(self, result: Result) -> None:
        kept = result.without_texts()
        self._found.results.append(kept)
        self._told(self._sent, kept)


def body_of(
    model: str, prompt: str | list[int], max_tokens: int, api: str, fields: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a greedy request of exactly ``max_tokens``, as far as its ``fields`` can ask for that."""
    given: dict[str, Any] = {"ignore_eos": True, "min_tokens": max_tokens, "add_special_tokens": False}
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": prompt}]} if api == "chat" else {"prompt": prompt}
    return body | {name: given[name] for name in fields}


async def served_models(client: httpx.AsyncClient, url: str) -> dict[str, dict[str, Any]]:
    """Return the models that a server lists, by name. Raises HttpReplayError."""
    try:
        answer = await client.get(f"{url}/v1/models")
        models = {str(model["id"]): model for model in answer.raise_for_status().json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise HttpReplayError(f"{url} does not list its models: {error or type(error).__name__}") from error
    if not models:
        raise HttpReplayError(f"{url} serves no model")
    return models


async def look_at(
    client: httpx.AsyncClient, url: str, options: HttpReplay, model: str, words: Words, seed: int
) -> ServerFacts:
    """Measure what a server adds to prompts, and which fields it takes. Raises HttpReplayError."""
    notes: list[str] = []
    fields = ["min_tokens", "ignore_eos"]
    as_text = options.prompts == "text" or options.api == "chat"
    if as_text and options.api == "completions" and words.tail:
        fields.append("add_special_tokens")  # an end token would stand where another prompt goes on
    shapes = PromptShapes(_PROBES, [], [0] * (len(_PROBES) + 1), [], 1)
    made = MadePrompts(words, shapes, seed=seed ^ 1)
    added = []
    for number, count in enumerate(_PROBES):
        prompt: str | list[int] = made.text(number) if as_text else made.ids(number)
        answer = await _asked(client, url, options.api, model, prompt, fields, notes)
        added.append(answer.prompt_tokens - count if answer.prompt_tokens else None)
    if None in added:
        notes.append("The server does not tell how many tokens it counts: lengths are the tokenizer's.")
        head, tail = (words.head, words.tail) if as_text and "add_special_tokens" not in fields else (0, 0)
        return ServerFacts(head, tail, tuple(fields), tuple(notes))
    extra = added[0]
    assert extra is not None
    if extra != added[1] or extra < 0:
        counts = " and ".join(f"{count + (more or 0)}" for count, more in zip(_PROBES, added, strict=True))
        asked = " and ".join(map(str, _PROBES))
        raise HttpReplayError(
            f"the server counts {counts} tokens where the tokenizer has {asked}: name its own with --tokenizer"
        )
    head, tail = (words.head, words.tail) if extra == words.head + words.tail else (extra, 0)
    if options.api == "chat" and extra:
        notes.append(
            f"The chat template adds {extra} tokens: shared prefixes are shorter than the file's by at most as many."
        )
    elif tail:
        notes.append(f"The server ends each prompt with {tail} special tokens: none is the whole beginning of another.")
    return ServerFacts(head, tail, tuple(fields), tuple(notes))


async def _asked(
    client: httpx.AsyncClient,
    url: str,
    api: str,
    model: str,
    prompt: str | list[int],
    fields: list[str],
    notes: list[str],
) -> TimedAnswer:
    """Return the answer to a small request; ``fields`` that the server refuses leave the list, with a note."""
    busy = 0
    while True:
        body = body_of(model, prompt, 2, api, fields)
        try:
            return await stream_answer(client, url + PATHS[api], body)
        except RequestFailed as error:
            if error.status in (400, 422) and fields:
                dropped = next((name for name in fields if name in str(error)), fields[0])
                fields.remove(dropped)
                notes.append(f"The server refuses {dropped}, so it is not sent.")
            elif error.status in REFUSED and busy < _BUSY_TRIES:
                busy += 1
                await asyncio.sleep(_BUSY_S)
            else:
                ids = "; if it takes no token ids, send text" if isinstance(prompt, list) else ""
                raise HttpReplayError(f"{url} refuses a small request: {error}{ids}") from error
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise HttpReplayError(f"{url} does not answer: {type(error).__name__}: {error}") from error


def open_files(wanted: int) -> int:
    """Return how many connections may be open, at most ``wanted``; raises the process's own limit as far as it may."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else wanted + 256
    if soft < min(wanted + 256, most):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + 256, most), hard))
        soft = min(wanted + 256, most)
    return max(1, min(wanted, soft - 128))
