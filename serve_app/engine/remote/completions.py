"""/v1/completions in the form of vLLM, which other servers have, too: a body, and the parts of its answer."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from serve_app.engine.protocol import AdapterSpec, EngineRequest, TokenLogprob, TokenRules
from serve_app.engine.remote.answers import Part, VocabularyId, WorkerError, failed_part, logprob_of
from serve_app.engine.remote.dialect import Dialect, WorkerFacts, grammar_of, sampling_fields, seed_of
from serve_app.engine.remote.reading import Untrue, printable

_CACHE_INFO = re.compile(r"^(\w+):cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(?<!\w)(\w++)="([^"]*+)"')
_TOKEN_ID = "token_id:"  # noqa: S105  # a prefix of vLLM's


class CompletionsDialect(Dialect):
    """Servers with vLLM's form of OpenAI's API."""

    answers_at = "/v1/completions"
    body_schema = "CompletionRequest"

    def pool_of(self, metrics: str) -> Mapping[str, str]:
        """See ``Dialect``."""
        prefix = self.running_metric.partition(":")[0]
        found = (labels for name, labels in _CACHE_INFO.findall(metrics) if name == prefix)
        return dict(_LABEL.findall(next(found, "")))

    def body(self, request: EngineRequest, facts: WorkerFacts, salt: str, bad_words: list[str]) -> dict[str, Any]:
        """See ``Dialect``."""
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
            **sampling_fields(request, rules, "max_tokens"),
        }
        if not whole:
            body["stream_options"] = {"include_usage": True}
        optional: dict[str, Any] = {
            "seed": seed_of(request),
            "prompt_logprobs": sampling.prompt_logprobs,
            "logprob_token_ids": list(sampling.logprob_token_ids),
            "allowed_token_ids": list(rules.allowed),
            "bad_words": bad_words,
        } | (_grammar(request, facts) if request.grammar else {})
        if sampling.logprob_token_ids:
            body["logprobs"] = len(sampling.logprob_token_ids)
        missing = sorted(name for name, value in optional.items() if value and not facts.takes(name))
        if missing:
            raise ValueError(f"{facts.called} takes no {', '.join(missing)}")
        return body | {name: value for name, value in optional.items() if value or (value == 0 and name != "seed")}

    def part(self, event: bytes, request: EngineRequest, had: int) -> Part:
        """See ``Dialect``."""
        return _part_of(_chunk(event), request)

    def whole(self, request: EngineRequest, body: bytes) -> Part:
        """See ``Dialect``. Its log-probabilities are of the prompt's tokens after the first."""
        sampling, prompt, chunk = request.sampling, request.token_ids.tolist(), _chunk(body)
        part = _part_of(chunk, request)
        if part.error:
            return part
        choices, most = chunk.choices, sampling.prompt_logprobs or 0
        entries = choices[0].prompt_logprobs or [] if choices else []
        if len(entries) != len(prompt):
            raise Untrue(f"it tells {len(entries):,} log-probabilities of a prompt of {len(prompt):,} tokens")
        logprobs = []
        for token_id, entry in zip(prompt[1:], entries[1:], strict=True):
            by_id = {_whole(name): each for name, each in (entry or {}).items()}
            own = by_id.get(token_id, _PromptLogprob(-np.inf, 0))
            ranked = sorted(by_id.items(), key=lambda item: item[1].rank or 0)[:most]
            tops = tuple((name, each.logprob) for name, each in ranked)
            logprobs.append(TokenLogprob(own.logprob, tops, own.rank or 0))
        part.prompt_logprobs = tuple(logprobs)
        return part


def _grammar(request: EngineRequest, facts: WorkerFacts) -> dict[str, Any]:
    """Return the field with a request's grammar, by the name of this version."""
    schema, lark = grammar_of(request)
    if facts.fields and "structured_outputs" not in facts.fields:  # older than vLLM 0.12
        return {"guided_json": schema} if schema is not None else {"guided_grammar": lark}
    return {"structured_outputs": {"json": schema} if schema is not None else {"grammar": lark}}


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: VocabularyId | None = None


class _Choice(msgspec.Struct):
    token_ids: list[VocabularyId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: WorkerError | str | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode


def _part_of(chunk: _Chunk, request: EngineRequest) -> Part:
    if chunk.error is not None:
        return failed_part(chunk.error)
    part = Part()
    if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
        part.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
    if not chunk.choices:
        return part
    choice, sampling = chunk.choices[0], request.sampling
    part.finish = choice.finish_reason or ""
    entries = choice.logprobs
    if choice.token_ids is not None:
        part.token_ids = tuple(choice.token_ids)
    elif entries is not None:
        part.token_ids = tuple(map(_id_of, entries.tokens))
    if entries is not None:
        most = None if sampling.logprob_token_ids else sampling.logprobs  # of the likeliest
        tops = entries.top_logprobs or [None] * len(entries.tokens)
        part.logprobs = tuple(
            TokenLogprob(logprob_of(value), _ranked(token, top or {})[:most])
            for token, value, top in zip(entries.tokens, entries.token_logprobs, tops, strict=False)
        )
    return part


def _ranked(token: str, top: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(((_id_of(name), value) for name, value in top.items()), key=lambda item: -item[1]))


def _id_of(token: str) -> int:
    if not token.startswith(_TOKEN_ID):
        raise Untrue("it tells tokens as text, without their ids")
    return _whole(token.removeprefix(_TOKEN_ID))


def _whole(text: str) -> int:
    """Return a token's id. Raises Untrue for what is none."""
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise Untrue(f"{printable(text, 20)!r} is no token id")
    return int(text)
