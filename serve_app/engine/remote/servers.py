"""What kinds of servers take and say over HTTP: facts before any request, a request's body, and its answer's events.

Only documented fields of public APIs are used, so other versions of a server are as good. Owns no connection.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from serve_app.engine.protocol import AdapterSpec, EngineRequest, TokenLogprob, TokenRules
from serve_app.engine.remote.settings import RemoteSettings

ServerKind = Literal["vllm", "sglang", "tensorrt_llm"]
KINDS: dict[str, tuple[ServerKind, str]] = {
    "vllm": ("vllm", "vLLM"),
    "sglang": ("sglang", "SGLang"),
    "tensorrt_llm": ("tensorrt_llm", "TensorRT-LLM"),
}
"""By what /v1/models calls their owner."""

MAX_EVENT_BYTES = 64 << 20
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
SAMPLE = "Ein Satz, \N{GREEK SMALL LETTER LAMDA} = 3.14; def f(x):\n\treturn [x] \N{ROCKET}"
"""Text that tokenizers cut differently."""

_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_RUNNING = re.compile(r"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)
_WAITING = re.compile(r"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


class Unfit(ValueError):
    """The server cannot be used. The message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a server says about itself, 0 or empty where it says nothing.

    ``model``: its name in requests; ``root``: the path or hub id that the server was started with; ``models``: all
    names, adapters' too. ``fields``: of a request's body.
    """

    kind: ServerKind
    version: str
    model: str
    root: str
    models: frozenset[str]
    max_model_len: int
    block_size: int
    num_blocks: int
    fields: frozenset[str]

    @property
    def called(self) -> str:
        """The server's product and version."""
        return f"{KINDS[self.kind][1]} {self.version}".strip()


async def facts_of(http: aiohttp.ClientSession, url: str) -> WorkerFacts:
    """Ask a server what it is. Raises Unfit."""
    none = f"{url} is no vLLM, SGLang or TensorRT-LLM server"
    try:
        async with http.get(f"{url}/v1/models", timeout=PROBE_TIMEOUT) as answer:
            if answer.status in (401, 403):
                raise Unfit(f"{url} refuses this API key: set WARMPATH_WORKER_KEY, or worker_key_file")
            if answer.status != 200:
                raise Unfit(f"{none}: /v1/models answers {answer.status}")
            served = msgspec.json.decode(await answer.read(), type=_Models).data
    except msgspec.DecodeError:
        raise Unfit(f"{none}: /v1/models has another form") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unfit(f"{url} does not answer ({type(error).__name__})") from None
    first = next((one for one in served if one.parent is None), None)
    if first is None or first.owned_by not in KINDS:
        raise Unfit(f"{none}: its model is owned by {first.owned_by if first else 'nobody'!r}")
    kind = KINDS[first.owned_by][0]
    told = await _json(http, f"{url}/server_info") if kind == "sglang" else await _json(http, f"{url}/version")
    if kind == "sglang" and not told:  # its older name
        told = await _json(http, f"{url}/get_server_info")
    labels = (
        dict(_LABEL.findall(found[1])) if (found := _CACHE_INFO.search(await _text(http, f"{url}/metrics"))) else {}
    )
    schemas = (await _json(http, f"{url}/openapi.json")).get("components", {}).get("schemas", {})
    body = schemas.get("GenerateReqInput" if kind == "sglang" else "CompletionRequest", {})
    return WorkerFacts(
        kind,
        str(told.get("version") or ""),
        first.id,
        first.root or str(told.get("model_path") or ""),
        frozenset(one.id for one in served),
        first.max_model_len or _whole(told.get("context_length")),
        _whole(labels.get("block_size") or told.get("page_size")),
        _whole(labels.get("num_gpu_blocks")),
        frozenset(body.get("properties", ())),
    )


async def sample_tokens(http: aiohttp.ClientSession, url: str, model: str) -> list[int] | None:
    """Return the server's tokens of ``SAMPLE``, None if it does not tell."""
    body = {"model": model, "prompt": SAMPLE, "add_special_tokens": False}
    try:
        async with http.post(f"{url}/tokenize", json=body, timeout=PROBE_TIMEOUT) as answer:
            told = msgspec.json.decode(await answer.read(), type=_Tokenized).tokens if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None
    return told


def check_name(url: str, facts: WorkerFacts, model_name: str, model: str) -> None:
    """Raise Unfit for a server of another model than ``model``, a path or hub id, which is called ``model_name``."""
    names = {model_name, model}
    if not ({facts.model, facts.root} & names or Path(facts.root).name in {Path(name).name for name in names}):
        named = facts.model if facts.root in ("", facts.model) else f"{facts.model} ({facts.root})"
        raise Unfit(f"{url} serves {named}, not {model_name}: set model, or served_model_name")


async def check_model(http: aiohttp.ClientSession, url: str, facts: WorkerFacts, settings: RemoteSettings) -> None:
    """Raise Unfit for a server of another model or tokenizer than this deployment's."""
    check_name(url, facts, settings.model_name, settings.model)
    await check_tokenizer(http, url, facts, settings.model_name, settings.tokenizer)


async def check_tokenizer(http: aiohttp.ClientSession, url: str, facts: WorkerFacts, name: str, path: str) -> None:
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


async def events_of(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events but the last, [DONE]."""
    rest = b""
    async for data in stream.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                yield event
        if len(rest) > MAX_EVENT_BYTES:
            raise msgspec.DecodeError("an event has no end")


async def requests_there(http: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Return how many requests of anybody run and wait in a server by its metrics, (0, 0) without any."""
    text = await _text(http, f"{url}/metrics")
    running, waiting = (sum(float(value) for value in each.findall(text)) for each in (_RUNNING, _WAITING))
    return int(running), int(waiting)


async def _text(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(url, timeout=PROBE_TIMEOUT) as answer:
            return await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return ""


async def _json(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(await _text(http, url) or "{}")
    except msgspec.DecodeError:
        return {}
    return told if isinstance(told, dict) else {}


def _whole(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 0


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


@dataclass(slots=True)
class Part:
    """One event of an answer. ``finish``: the server's word for its end. ``cached_tokens``: None if untold."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: str = ""
    cached_tokens: int | None = None
    error: str = ""
    status: int = 500


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode
_TOKEN_ID = "token_id:"  # noqa: S105  # a prefix of vLLM's


def openai_body(request: EngineRequest, facts: WorkerFacts, salt: str, bad_words: list[str]) -> dict[str, Any]:
    """Return the body for /v1/completions of vLLM or TensorRT-LLM. ``bad_words``: those of several tokens, as text.

    Raises ValueError for a rule that the server does not have.
    """
    sampling, rules = request.sampling, request.sampling.rules or TokenRules()
    whole = sampling.prompt_logprobs is not None  # servers stream no log-probabilities of prompts
    body: dict[str, Any] = {
        "model": AdapterSpec.of_key(request.scope.lora, "").name if request.scope.lora else facts.model,
        "prompt": request.token_ids.tolist(),
        "cache_salt": salt,
        "stream": not whole,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": sampling.logprobs,
        "min_tokens": max(0, rules.min_tokens - request.resumed_tokens),
        **_common(request, rules, "max_tokens"),
    }
    if not whole:
        body["stream_options"] = {"include_usage": True}
    if facts.kind == "tensorrt_llm":
        body["detokenize"] = False
    optional: dict[str, Any] = {
        "seed": _signed(sampling.seed) if sampling.seeded or request.grammar else None,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logprob_token_ids": list(sampling.logprob_token_ids),
        "allowed_token_ids": list(rules.allowed),
        "bad_words": bad_words,
    } | (structured(request, facts) if request.grammar else {})
    if sampling.logprob_token_ids:
        body["logprobs"] = len(sampling.logprob_token_ids)
    missing = sorted(name for name, value in optional.items() if value and not _takes(facts, name))
    if missing:
        raise ValueError(f"{facts.called} takes no {', '.join(missing)}")
    body |= {name: value for name, value in optional.items() if value or (value == 0 and name != "seed")}
    if facts.kind == "tensorrt_llm" and facts.fields:  # it refuses fields that it does not know
        return {name: value for name, value in body.items() if name in facts.fields}
    return body


def structured(request: EngineRequest, facts: WorkerFacts) -> dict[str, Any]:
    """Return the field with a request's grammar, by the name of this version."""
    (grammar,) = msgspec.json.decode(request.grammar)["grammars"]
    schema, lark = grammar.get("json_schema"), grammar.get("lark_grammar")
    if facts.kind == "sglang":
        return {"json_schema": msgspec.json.encode(schema).decode()} if schema is not None else {"ebnf": lark}
    if facts.fields and "structured_outputs" not in facts.fields:  # older than vLLM 0.12
        return {"guided_json": schema} if schema is not None else {"guided_grammar": lark}
    return {"structured_outputs": {"json": schema} if schema is not None else {"grammar": lark}}


def openai_part(event: bytes, most: int | None = None) -> Part:
    """Read one event of /v1/completions, or its whole answer. Raises msgspec.DecodeError.

    ``most``: the likeliest tokens to tell, None for all that the server tells.
    """
    chunk = _chunk(event)
    if chunk.error is not None:
        code = chunk.error.code
        return Part(error=chunk.error.message or "it told no reason", status=code if isinstance(code, int) else 500)
    part = Part()
    if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
        part.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
    if not chunk.choices:
        return part
    choice = chunk.choices[0]
    part.finish = choice.finish_reason or ""
    told = choice.logprobs
    if choice.token_ids is not None:
        part.token_ids = tuple(choice.token_ids)
    elif told is not None:
        part.token_ids = tuple(map(_id_of, told.tokens))
    if told is not None:
        tops = told.top_logprobs or [None] * len(told.tokens)
        part.logprobs = tuple(
            TokenLogprob(-np.inf if value is None else value, _ranked(token, top or {})[:most])
            for token, value, top in zip(told.tokens, told.token_logprobs, tops, strict=False)
        )
    return part


def prompt_logprobs(event: bytes, prompt: list[int], most: int) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of a prompt's tokens after the first, in a whole answer."""
    told = _chunk(event).choices[0].prompt_logprobs or []
    found = []
    for token_id, entry in zip(prompt[1:], told[1:], strict=False):
        entries = {int(name): each for name, each in (entry or {}).items()}
        own = entries.get(token_id, _PromptLogprob(-np.inf, 0))
        ordered = sorted(entries.items(), key=lambda item: item[1].rank or 0)[:most]
        found.append(TokenLogprob(own.logprob, tuple((name, each.logprob) for name, each in ordered), own.rank or 0))
    return tuple(found)


def _ranked(token: str, top: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(((_id_of(name), value) for name, value in top.items()), key=lambda item: -item[1]))


def _id_of(token: str) -> int:
    if not token.startswith(_TOKEN_ID):
        raise msgspec.DecodeError("tokens are told as text, without their ids")
    return int(token.removeprefix(_TOKEN_ID))


def _common(request: EngineRequest, rules: TokenRules, most: str) -> dict[str, Any]:
    sampling = request.sampling
    biases = dict(rules.logit_bias) | {word[0]: -100.0 for word in rules.bad_words if len(word) == 1}
    return {
        most: max(sampling.max_tokens, 1),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": rules.presence_penalty,
        "frequency_penalty": rules.frequency_penalty,
        "repetition_penalty": rules.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        **({"logit_bias": {str(token): value for token, value in biases.items()}} if biases else {}),
    }


def _takes(facts: WorkerFacts, name: str) -> bool:
    return not facts.fields or name in facts.fields


def _signed(seed: int) -> int:
    """Return a seed's lowest 63 bits: servers take no negative or larger ones."""
    return seed & ((1 << 63) - 1)


class _SglangMeta(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None
    output_token_ids_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None


class _SglangEvent(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _SglangMeta = msgspec.field(default_factory=_SglangMeta)
    error: _Error | None = None


_sglang = msgspec.json.Decoder(_SglangEvent).decode


def sglang_body(request: EngineRequest, facts: WorkerFacts, salt: str, bad_words: list[str]) -> dict[str, Any]:
    """Return the body for SGLang's /generate. Raises ValueError for what it does not have."""
    sampling, rules = request.sampling, request.sampling.rules or TokenRules()
    refused = {
        "allowed_token_ids": rules.allowed,
        "bad_words of several tokens": bad_words,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    if missing := [name for name, value in refused.items() if value]:
        raise ValueError(f"{facts.called} takes no {', '.join(missing)}")
    params = _common(request, rules, "max_new_tokens")
    params["min_new_tokens"] = max(0, rules.min_tokens - request.resumed_tokens)
    params["skip_special_tokens"] = False
    params["no_stop_trim"] = True
    if sampling.seeded or request.grammar:
        params["sampling_seed"] = _signed(sampling.seed)
    if request.grammar:
        params |= structured(request, facts)
    body: dict[str, Any] = {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "cache_salt": salt,
        "stream": True,
    }
    if request.scope.lora:
        body["lora_path"] = AdapterSpec.of_key(request.scope.lora, "").name
    if sampling.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
        if sampling.logprob_token_ids:
            body["token_ids_logprob"] = list(sampling.logprob_token_ids)
    return body


def sglang_part(event: bytes, had: int) -> Part:
    """Read one event of /generate after ``had`` tokens. It tells all tokens so far, or only the new ones."""
    told = _sglang(event)
    if told.error is not None:
        code = told.error.code
        return Part(error=told.error.message or "it told no reason", status=code if isinstance(code, int) else 500)
    meta = told.meta_info
    count = meta.completion_tokens or len(told.output_ids)
    new = max(0, count - had)
    ids = tuple(told.output_ids[len(told.output_ids) - new :]) if new else ()
    finish = str((meta.finish_reason or {}).get("type") or "")
    if finish == "abort":
        why = meta.finish_reason or {}
        return Part(error=str(why.get("message") or "aborted"), status=int(why.get("status_code") or 500))
    part = Part(ids, finish=finish, cached_tokens=meta.cached_tokens)
    if meta.output_token_logprobs is not None and new:
        own = meta.output_token_logprobs[-new:]
        tops = meta.output_token_ids_logprobs or meta.output_top_logprobs or [None] * len(meta.output_token_logprobs)
        part.logprobs = tuple(
            TokenLogprob(-np.inf if value is None else value, tuple((one[1], one[0] or 0.0) for one in top or ()))
            for (value, _, _), top in zip(own, tops[-new:], strict=False)
        )
    return part
