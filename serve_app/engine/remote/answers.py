"""The parts of any server's answer, checked against what its request may be told.

Nothing is believed that could harm more than its own request: token ids are of the vocabulary, no more of them come
than were asked for, numbers are within the request's own. Owns no connection.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import numpy as np

from serve_app.engine.protocol import EngineRequest, TokenLogprob
from serve_app.engine.remote.reading import EVENT_BYTES, LIES, Untrue, printable

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


class WorkerError(msgspec.Struct):
    """An error in a server's words."""

    message: str | None = None
    code: int | str | None = None


class _Refusal(msgspec.Struct):
    error: WorkerError | str | None = None
    message: str | None = None


_refusal = msgspec.json.Decoder(_Refusal).decode


def failed_part(error: WorkerError | str) -> Part:
    """Return the part that stands for a server's error in the middle of an answer."""
    if isinstance(error, str):
        return Part(error=error or "it told no reason")
    return Part(error=error.message or "it told no reason", status=error.code if isinstance(error.code, int) else 500)


def logprob_of(value: float | None) -> float:
    """Return a log-probability; JSON has none of minus infinity."""
    return -np.inf if value is None else value


def refusal(url: str, status: int, body: bytes) -> Exception:
    """Return the error for a server's refusal. Of its text a client sees the reason alone, without any address."""
    reason = ""
    with suppress(*LIES):
        read = _refusal(body)
        error = read.error.message if isinstance(read.error, WorkerError) else read.error
        reason = error or read.message or ""
    return refused(url, status, reason)


def refused(url: str, status: int, reason: str) -> Exception:
    """Return the error for a server's refusal with a reason, its own words."""
    if status in (400, 413, 422):
        host = urlsplit(url).hostname or url
        said = _ADDRESS.sub("...", printable(reason)).replace(host, "...")
        return ValueError(f"{REFUSED}: {said}" if said else f"{REFUSED} ({status}).")
    why = f"{status}: {printable(reason) or 'no reason told'}"
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
        every = (*part.logprobs, *part.prompt_logprobs)
        if sampling.logprobs is None:
            part.logprobs = ()
        elif len(part.logprobs) != len(part.token_ids):
            raise Untrue(f"it tells {len(part.logprobs)} log-probabilities of {len(part.token_ids)} tokens")
        if any(token >= self._vocab_size for each in every for token, _ in each.top):
            raise Untrue("it tells the log-probability of a token that is not in the vocabulary")
