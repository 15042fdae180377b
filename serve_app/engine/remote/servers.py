"""What kinds of servers take and say over HTTP: facts before any request, and a request's body.

Only documented fields of public APIs are used, so other versions of a server are as good. Facts are a server's own
words: bounded, printable, and 0 or empty where they make no sense. Owns no connection.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
import msgspec
from tokenizers import Tokenizer

from serve_app.engine.protocol import AdapterSpec, EngineRequest, TokenRules
from serve_app.engine.remote.answers import VocabularyId
from serve_app.engine.remote.reading import LIES, PROBE_TIMEOUT, WorkerHttp, decoded, shown
from serve_app.engine.remote.settings import RemoteSettings

T = TypeVar("T")

ServerKind = Literal["vllm", "sglang", "tensorrt_llm"]
KINDS: dict[str, tuple[ServerKind, str]] = {
    "vllm": ("vllm", "vLLM"),
    "sglang": ("sglang", "SGLang"),
    "tensorrt_llm": ("tensorrt_llm", "TensorRT-LLM"),
}
"""By what /v1/models calls their owner."""

MAX_REQUESTS = 1 << 20
MAX_FIGURE = 1 << 31
SAMPLE = "Ein Satz, \N{GREEK SMALL LETTER LAMDA} = 3.14; def f(x):\n\treturn [x] \N{ROCKET}"
"""Text that tokenizers cut differently."""

_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(?<!\w)(\w++)="([^"]*+)"')
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


async def facts_of(http: WorkerHttp, url: str) -> WorkerFacts:
    """Ask a server what it is. Raises Unfit."""
    none = f"{url} is no vLLM, SGLang or TensorRT-LLM server"
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
    if first is None or first.owned_by not in KINDS:
        raise Unfit(f"{none}: its model is owned by {shown(first.owned_by, 40) if first else 'nobody'!r}")
    kind = KINDS[first.owned_by][0]
    said = await _told(http, f"{url}/server_info" if kind == "sglang" else f"{url}/version", _info, _Info())
    if kind == "sglang" and said == _Info():  # its older name
        said = await _told(http, f"{url}/get_server_info", _info, said)
    found = _CACHE_INFO.search(await _text(http, f"{url}/metrics"))
    labels = dict(_LABEL.findall(found[1])) if found else {}
    schemas = (await _told(http, f"{url}/openapi.json", _openapi, _Openapi())).components.schemas
    body_of = schemas.GenerateReqInput if kind == "sglang" else schemas.CompletionRequest
    return WorkerFacts(
        kind,
        shown(str(said.version or ""), 40),
        first.id,
        first.root or str(said.model_path or ""),
        frozenset(one.id for one in served),
        _whole(first.max_model_len or said.context_length),
        _whole(labels.get("block_size") or said.page_size),
        _whole(labels.get("num_gpu_blocks")),
        frozenset(body_of.properties),
    )


async def sample_tokens(http: WorkerHttp, url: str, model: str) -> list[int] | None:
    """Return the server's tokens of ``SAMPLE``, None if it does not tell."""
    body = msgspec.json.encode({"model": model, "prompt": SAMPLE, "add_special_tokens": False})
    try:
        status, told = await http.whole(f"{url}/tokenize", body)
        return (await decoded(_tokenized, told)).tokens if status == 200 else None
    except (*LIES, aiohttp.ClientError, TimeoutError, OSError):
        return None


def check_name(url: str, facts: WorkerFacts, model_name: str, model: str) -> None:
    """Raise Unfit for a server of another model than ``model``, a path or hub id, which is called ``model_name``."""
    names = {model_name, model}
    if not ({facts.model, facts.root} & names or Path(facts.root).name in {Path(name).name for name in names}):
        named = shown(facts.model if facts.root in ("", facts.model) else f"{facts.model} ({facts.root})")
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


async def requests_there(http: WorkerHttp, url: str, within: aiohttp.ClientTimeout) -> tuple[int, int]:
    """Return how many requests of anybody run and wait in a server by its metrics, (0, 0) without any."""
    text = await _text(http, f"{url}/metrics", within)
    return _total(_RUNNING.findall(text)), _total(_WAITING.findall(text))


async def _text(http: WorkerHttp, url: str, within: aiohttp.ClientTimeout = PROBE_TIMEOUT) -> str:
    try:
        status, body = await http.whole(url, within=within)
        return body.decode() if status == 200 else ""
    except (*LIES, aiohttp.ClientError, TimeoutError, OSError):
        return ""


async def _told(http: WorkerHttp, url: str, decode: Callable[[bytes], T], nothing: T) -> T:
    try:
        status, body = await http.whole(url)
        return await decoded(decode, body) if status == 200 else nothing
    except (*LIES, aiohttp.ClientError, TimeoutError, OSError):
        return nothing


def _whole(value: object) -> int:
    """Return a figure, 0 for what can be none."""
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 and int(text) < MAX_FIGURE else 0


def _total(values: Iterable[str]) -> int:
    """Return a sum of numbers of requests; what is no number counts as none."""
    total = 0.0
    for value in values:
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


class _Schemas(msgspec.Struct):
    CompletionRequest: _Body = msgspec.field(default_factory=_Body)
    GenerateReqInput: _Body = msgspec.field(default_factory=_Body)


class _Components(msgspec.Struct):
    schemas: _Schemas = msgspec.field(default_factory=_Schemas)


class _Openapi(msgspec.Struct):
    components: _Components = msgspec.field(default_factory=_Components)


_models = msgspec.json.Decoder(_Models).decode
_tokenized = msgspec.json.Decoder(_Tokenized).decode
_info = msgspec.json.Decoder(_Info).decode
_openapi = msgspec.json.Decoder(_Openapi).decode


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
