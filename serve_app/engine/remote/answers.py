"""What kinds of servers answer over HTTP: the parts of an answer, checked against what its request may be told.

Nothing is believed that could harm more than its own request: token ids are of the vocabulary, no more of them come
than were asked for, numbers are within the request's own. Only documented fields are read. Owns no connection.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import numpy as np

from serve_app.engine.protocol import EngineRequest, TokenLogprob
from serve_app.engine.remote.reading import EVENT_BYTES, LIES, Untrue, shown

VocabularyId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]

TOKEN_BYTES, LOGPROB_BYTES, PROMPT_LOGPROB_BYTES = 128, 96, 256
"""What one token and one log-probability may take in an answer."""
PROMPT_TOKEN_BYTES = 16
"""What one of the prompt's tokens may take: vLLM repeats them in its first event."""
MAX_TOKENS_AT_ONCE = 4096
"""Most new tokens of one event: servers send one, or some that were drafted or held back."""

REFUSED = "The model's server refuses this request"
_ADDRESS = re.compile(r"(?<!\w)\w++://\S+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


class WorkerGone(Exception):
    """The worker broke off an answer, or does not take requests: another replica can go on. The message is our own."""


class Busy(Exception):
    """The worker's own queue is full."""


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


class _Error(msgspec.Struct):
    message: str | None = None
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class _Refusal(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode
_refusal = msgspec.json.Decoder(_Refusal).decode
_TOKEN_ID = "token_id:"  # noqa: S105  # a prefix of vLLM's


def openai_part(event: bytes, most: int | None = None) -> Part:
    """Read one event of /v1/completions, or its whole answer. Raises msgspec.DecodeError.

    ``most``: the likeliest tokens to tell, None for all that the server tells.
    """
    chunk = _chunk(event)
    if chunk.error is not None:
        return _failed(chunk.error)
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
            TokenLogprob(_known(value), _ranked(token, top or {})[:most])
            for token, value, top in zip(told.tokens, told.token_logprobs, tops, strict=False)
        )
    return part


def whole_part(request: EngineRequest, body: bytes) -> Part:
    """Read an answer in one piece, with log-probabilities of the prompt's tokens after the first. Raises LIES."""
    sampling, prompt = request.sampling, request.token_ids.tolist()
    part = openai_part(body, None if sampling.logprob_token_ids else sampling.logprobs)
    if part.error:
        return part
    choices, most = _chunk(body).choices, sampling.prompt_logprobs or 0
    told = choices[0].prompt_logprobs or [] if choices else []
    if len(told) != len(prompt):
        raise Untrue(f"it tells {len(told):,} log-probabilities of a prompt of {len(prompt):,} tokens")
    found = []
    for token_id, entry in zip(prompt[1:], told[1:], strict=True):
        entries = {_whole(name): each for name, each in (entry or {}).items()}
        own = entries.get(token_id, _PromptLogprob(-np.inf, 0))
        ordered = sorted(entries.items(), key=lambda item: item[1].rank or 0)[:most]
        found.append(TokenLogprob(own.logprob, tuple((name, each.logprob) for name, each in ordered), own.rank or 0))
    part.prompt_logprobs = tuple(found)
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
        raise Untrue(f"{shown(text, 20)!r} is no token id")
    return int(text)


_SglangLogprob = tuple[float | None, VocabularyId, msgspec.Raw]


class _SglangEnd(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _SglangMeta(msgspec.Struct):
    finish_reason: _SglangEnd | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[_SglangLogprob] | None = None
    output_top_logprobs: list[list[_SglangLogprob] | None] | None = None
    output_token_ids_logprobs: list[list[_SglangLogprob] | None] | None = None


class _SglangEvent(msgspec.Struct):
    output_ids: list[VocabularyId] = []
    meta_info: _SglangMeta = msgspec.field(default_factory=_SglangMeta)
    error: _Error | str | None = None


_sglang = msgspec.json.Decoder(_SglangEvent).decode


def _failed(error: _Error | str) -> Part:
    if isinstance(error, str):
        return Part(error=error or "it told no reason")
    return Part(error=error.message or "it told no reason", status=error.code if isinstance(error.code, int) else 500)


def sglang_part(event: bytes, had: int) -> Part:
    """Read one event of /generate after ``had`` tokens. It tells all tokens so far, or only the new ones."""
    told = _sglang(event)
    if told.error is not None:
        return _failed(told.error)
    meta = told.meta_info
    count = meta.completion_tokens or len(told.output_ids)
    new = max(0, count - had)
    ids = tuple(told.output_ids[len(told.output_ids) - new :]) if new else ()
    end = meta.finish_reason or _SglangEnd()
    if end.type == "abort":
        return Part(error=end.message or "aborted", status=end.status_code or 500)
    part = Part(ids, finish=end.type, cached_tokens=meta.cached_tokens)
    if meta.output_token_logprobs is not None and new:
        own = meta.output_token_logprobs[-new:]
        tops = meta.output_token_ids_logprobs or meta.output_top_logprobs or [None] * len(meta.output_token_logprobs)
        part.logprobs = tuple(
            TokenLogprob(_known(value), tuple((token, _known(each)) for each, token, _ in top or ()))
            for (value, _, _), top in zip(own, tops[-new:], strict=False)
        )
    return part


def _known(logprob: float | None) -> float:
    return -np.inf if logprob is None else logprob


def refusal(url: str, status: int, body: bytes) -> Exception:
    """Return the error for a server's refusal. Of its text a client sees the reason alone, without any address."""
    reason = ""
    with suppress(*LIES):
        told = _refusal(body)
        error = told.error.message if isinstance(told.error, _Error) else told.error
        reason = error or told.message or ""
    return refused(url, status, reason)


def refused(url: str, status: int, reason: str) -> Exception:
    """Return the error for a server's refusal with a reason, its own words."""
    if status in (400, 413, 422):
        host = urlsplit(url).hostname or url
        said = _ADDRESS.sub("...", shown(reason)).replace(host, "...")
        return ValueError(f"{REFUSED}: {said}" if said else f"{REFUSED} ({status}).")
    why = f"{status}: {shown(reason) or 'no reason told'}"
    if status in (429, 503):
        return Busy(f"{url} is full ({why})")
    if 300 <= status < 400:
        return WorkerGone(f"{url} redirects requests elsewhere ({status}), which is not followed")
    return WorkerGone(f"{url} fails ({why})")


def event_bytes(request: EngineRequest, *, had: int, all_tokens: bool) -> int:
    """Return how large an event of an answer may be after ``had`` tokens; ``all_tokens``: it has these again."""
    sampling = request.sampling
    each = TOKEN_BYTES + LOGPROB_BYTES * _logprobs_each(request)
    besides = EVENT_BYTES + PROMPT_TOKEN_BYTES * len(request.token_ids)
    return besides + each * (min(max(1, sampling.max_tokens), MAX_TOKENS_AT_ONCE) + had * all_tokens)


def whole_bytes(request: EngineRequest) -> int:
    """Return how large an answer in one piece may be, with log-probabilities of the prompt."""
    sampling = request.sampling
    each = TOKEN_BYTES + LOGPROB_BYTES * _logprobs_each(request)
    of_prompt = PROMPT_LOGPROB_BYTES * len(request.token_ids) * ((sampling.prompt_logprobs or 0) + 3)
    return EVENT_BYTES + each * max(1, sampling.max_tokens) + of_prompt


def _logprobs_each(request: EngineRequest) -> int:
    sampling = request.sampling
    return 0 if sampling.logprobs is None else 1 + max(sampling.logprobs, len(sampling.logprob_token_ids))


class CheckedAnswer:
    """One answer, part by part. ``ended``: by its server's word, or because it has all that was asked for."""

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        sampling = request.sampling
        self.had = 0
        self.ended = False
        self._request = request
        self._vocab_size = vocab_size
        self._most = max(1, sampling.max_tokens)
        self._stops = frozenset(sampling.stop_token_ids)

    def take(self, part: Part) -> Part:
        """Return a part as far as it may be passed on. Raises Untrue.

        What comes after the end is dropped, and so are a number of cached tokens that the prompt does not have, and
        log-probabilities that nobody asked for. An answer ends at a stop token and at its greatest length, whatever
        its server says.
        """
        cached = part.cached_tokens
        if cached is not None and not 0 <= cached <= len(self._request.token_ids):
            part.cached_tokens = None
        if self.ended:
            return Part(cached_tokens=part.cached_tokens)
        ids = part.token_ids
        if ids and max(ids) >= self._vocab_size:
            raise Untrue(f"token {max(ids)} is not in the vocabulary")
        self._check_logprobs(part)
        end = next((at for at, token in enumerate(ids, 1) if token in self._stops), len(ids))
        if end < len(ids) or (ids and ids[-1] in self._stops):
            part.finish = "stop"
        if end > self._most - self.had:
            end, part.finish = self._most - self.had, "length"
        part.token_ids, part.logprobs = ids[:end], part.logprobs[:end]
        self.had += end
        self.ended = bool(part.finish)
        return part

    def _check_logprobs(self, part: Part) -> None:
        sampling = self._request.sampling
        told = (*part.logprobs, *part.prompt_logprobs)
        if sampling.logprobs is None:
            part.logprobs = ()
        elif len(part.logprobs) != len(part.token_ids):
            raise Untrue(f"it tells {len(part.logprobs)} log-probabilities of {len(part.token_ids)} tokens")
        if any(token >= self._vocab_size for each in told for token, _ in each.top):
            raise Untrue("it tells the log-probability of a token that is not in the vocabulary")
