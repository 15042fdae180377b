"""What a server says about itself over HTTP before any request, and whether it has this deployment's model.

Facts are a server's own words: bounded, printable, and 0 or empty where they make no sense. Owns no connection.
"""

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, TypeVar

import aiohttp
import msgspec
from tokenizers import Tokenizer

from serve_app.engine.remote import dialects
from serve_app.engine.remote.answers import VocabularyId
from serve_app.engine.remote.dialect import Dialect, WorkerFacts
from serve_app.engine.remote.reading import LIES, PROBE_TIMEOUT, WorkerHttp, decoded, printable
from serve_app.engine.remote.settings import RemoteSettings

T = TypeVar("T")

DIALECTS: dict[str, Dialect] = {
    each.owner: each()
    for module in iter_modules(dialects.__path__, f"{dialects.__name__}.")
    for each in vars(import_module(module.name)).values()
    if isinstance(each, type) and issubclass(each, Dialect) and each.__module__ == module.name
}
"""By what /v1/models calls a model's owner."""

_PRODUCTS = sorted((dialect.product for dialect in DIALECTS.values()), key=len)

MAX_REQUESTS = 1 << 20
MAX_FIGURE = 1 << 31
SAMPLE = "Ein Satz, \N{GREEK SMALL LETTER LAMDA} = 3.14; def f(x):\n\treturn [x] \N{ROCKET}"
"""Text that tokenizers cut differently."""


class Unfit(ValueError):
    """The server cannot be used. The message is one sentence for the operator."""


async def facts_of(http: WorkerHttp, url: str) -> WorkerFacts:
    """Ask a server what it is. Raises Unfit."""
    none = f"{url} is no {', '.join(_PRODUCTS[:-1])} or {_PRODUCTS[-1]} server"
    try:
        status, body = await http.whole(f"{url}/v1/models")
        if status in (401, 403):
            raise Unfit(f"{url} refuses this API key: set WARMPATH_WORKER_KEY, or worker_key_file")
        if status != 200:
            raise Unfit(f"{none}: /v1/models answers {status}")
        served = (await decoded(_models, body)).data
    except LIES:
        raise Unfit(f"{none}: /v1/models has another form") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unfit(f"{url} does not answer ({type(error).__name__})") from None
    first = next((one for one in served if one.parent is None), None)
    if first is None or first.owned_by not in DIALECTS:
        raise Unfit(f"{none}: its model is owned by {printable(first.owned_by, 40) if first else 'nobody'!r}")
    dialect = DIALECTS[first.owned_by]
    info = nothing = _Info()
    for path in dialect.describes_at:
        if info == nothing:
            info = await _read(http, url + path, _info, nothing)
    pool = dialect.pool_of(await _text(http, f"{url}/metrics"))
    fields = partial(_fields, dialect.body_schema)
    return WorkerFacts(
        dialect,
        printable(str(info.version or ""), 40),
        first.id,
        first.root or str(info.model_path or ""),
        frozenset(one.id for one in served),
        _whole(first.max_model_len or info.context_length),
        _whole(pool.get("block_size") or info.page_size),
        _whole(pool.get("num_gpu_blocks")),
        await _read(http, f"{url}/openapi.json", fields, frozenset()),
    )


async def sample_tokens(http: WorkerHttp, url: str, model: str) -> list[int] | None:
    """Return the server's tokens of ``SAMPLE``, None if it does not tell."""
    body = msgspec.json.encode({"model": model, "prompt": SAMPLE, "add_special_tokens": False})
    try:
        status, answer = await http.whole(f"{url}/tokenize", body)
        return (await decoded(_tokenized, answer)).tokens if status == 200 else None
    except (*LIES, aiohttp.ClientError, TimeoutError, OSError):
        return None


def check_name(url: str, facts: WorkerFacts, model_name: str, model: str) -> None:
    """Raise Unfit for a server of another model than ``model``, a path or hub id, which is called ``model_name``."""
    names = {model_name, model}
    if not ({facts.model, facts.root} & names or Path(facts.root).name in {Path(name).name for name in names}):
        named = printable(facts.model if facts.root in ("", facts.model) else f"{facts.model} ({facts.root})")
        raise Unfit(f"{url} serves {named}, not {model_name}: set model, or served_model_name")


async def check_model(http: WorkerHttp, url: str, facts: WorkerFacts, settings: RemoteSettings) -> None:
    """Raise Unfit for a server of another model or tokenizer than this deployment's."""
    check_name(url, facts, settings.model_name, settings.model)
    await check_tokenizer(http, url, facts, settings.model_name, settings.tokenizer)


async def check_tokenizer(http: WorkerHttp, url: str, facts: WorkerFacts, name: str, path: str) -> None:
    """Raise Unfit for a server of another tokenizer than that of the model ``name``, whose tokenizer.json is ``path``.

    Without a path, or a server that tells no tokens, nothing is compared.
    """
    theirs = await sample_tokens(http, url, facts.model) if path else None
    if theirs is None:
        return
    ours = await asyncio.to_thread(tokenizer_of, path)
    if theirs != ours.encode(SAMPLE, add_special_tokens=False).ids:
        raise Unfit(f"{url} has another tokenizer than {name}")


@lru_cache(4)
def tokenizer_of(path: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json."""
    return Tokenizer.from_file(path)


async def requests_there(
    http: WorkerHttp, url: str, dialect: Dialect, within: aiohttp.ClientTimeout
) -> tuple[int, int]:
    """Return how many requests of anybody run and wait in a server by its metrics, (0, 0) without any."""
    text = await _text(http, f"{url}/metrics", within)
    return _total(dialect.running_metric, text), _total(dialect.waiting_metric, text)


async def _text(http: WorkerHttp, url: str, within: aiohttp.ClientTimeout = PROBE_TIMEOUT) -> str:
    try:
        status, body = await http.whole(url, within=within)
        return body.decode() if status == 200 else ""
    except (*LIES, aiohttp.ClientError, TimeoutError, OSError):
        return ""


async def _read(http: WorkerHttp, url: str, decode: Callable[[bytes], T], nothing: T) -> T:
    try:
        status, body = await http.whole(url)
        return await decoded(decode, body) if status == 200 else nothing
    except (*LIES, aiohttp.ClientError, TimeoutError, OSError):
        return nothing


def _whole(value: object) -> int:
    """Return a figure, 0 for what can be none."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 and int(text) < MAX_FIGURE else 0


def _total(metric: str, text: str) -> int:
    """Return a sum of numbers of requests; what is no number counts as none."""
    total = 0.0
    for value in re.findall(rf"^{metric}(?:\{{.*\}})? ([0-9.e+]+)$", text, re.MULTILINE):
        with suppress(ValueError):
            total += float(value)
    return int(min(total, MAX_REQUESTS)) if math.isfinite(total) else 0


_Name = Annotated[str, msgspec.Meta(max_length=4096)]
_Figure = str | int | float | None


class _Model(msgspec.Struct):
    id: _Name
    owned_by: _Name = ""
    root: _Name | None = None
    parent: _Name | None = None
    max_model_len: _Figure = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[VocabularyId]


class _Info(msgspec.Struct):
    version: _Figure = None
    model_path: _Name | None = None
    page_size: _Figure = None
    context_length: _Figure = None


class _Body(msgspec.Struct):
    properties: dict[str, msgspec.Raw] = {}


class _Components(msgspec.Struct):
    schemas: dict[str, msgspec.Raw] = {}


class _Openapi(msgspec.Struct):
    components: _Components = msgspec.field(default_factory=_Components)


_models = msgspec.json.Decoder(_Models).decode
_tokenized = msgspec.json.Decoder(_Tokenized).decode
_info = msgspec.json.Decoder(_Info).decode
_openapi = msgspec.json.Decoder(_Openapi).decode
_body = msgspec.json.Decoder(_Body).decode


def _fields(schema: str, body: bytes) -> frozenset[str]:
    """Return the fields of one schema of /openapi.json."""
    described = _openapi(body).components.schemas.get(schema)
    return frozenset() if described is None else frozenset(_body(described).properties)
