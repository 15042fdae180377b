"""Tokens of one choice become text that may be shown, and what is told of them goes with the text that they begin."""

from __future__ import annotations

from collections import deque

from serve_app.api.format import ShownToken, ToldToken
from serve_app.engine.protocol import SamplingParams, TokenLogprob
from serve_app.generation.generation import Tokens
from serve_app.tokenization.detokenizer import Detokenizer, StopChecker


class AnswerReader:
    """Reads one choice. ``stop`` strings end it, with ``include_stop`` as its last part."""

    def __init__(
        self, sampling: SamplingParams, decoder: Detokenizer, stop: tuple[str, ...], *, include_stop: bool = False
    ) -> None:
        self._decoder = decoder
        self._checker = StopChecker(stop, include=include_stop)
        self._min_tokens = sampling.rules.min_tokens if sampling.rules is not None else 0
        # A stop string is looked for token by token: how many come at once is a matter of timing, and usage counts the
        # same ones. So are characters counted where their tokens are told.
        self._one_by_one = bool(stop) or sampling.logprobs is not None
        self._read = self._decoded_chars = self._shown_chars = 0
        self._told: deque[ToldToken] = deque()

    def read(self, tokens: Tokens) -> tuple[str, int, bool]:
        """Return (text that is safe to show, tokens read for it, whether a stop string was found)."""
        if not self._one_by_one:
            return self._decoder.push(tokens.token_ids), len(tokens.token_ids), False
        shown = ""
        for taken, token_id in enumerate(tokens.token_ids, 1):
            if tokens.logprobs:
                self._told.append(self._told_token(token_id, tokens.logprobs[taken - 1]))
            self._read += 1
            decoded = self._decoder.push((token_id,))
            self._decoded_chars += len(decoded)
            text, stopped = self._checker.push(decoded, early=self._read <= self._min_tokens)
            shown += text
            if stopped:
                self._shown_chars += len(shown)
                return shown, taken, True
        self._shown_chars += len(shown)
        return shown, len(tokens.token_ids), False

    def finish(self) -> tuple[str, bool]:
        """Return what was held back, and whether a stop string was found in it; call it once, at the end."""
        rest, stopped = self._checker.push(self._decoder.flush())
        rest += "" if stopped else self._checker.flush()
        self._shown_chars += len(rest)
        return rest, stopped

    @property
    def stop_sequence(self) -> str:
        """The stop string that ended the choice, "" where none did."""
        return self._checker.found

    def told(self, *, ended: bool = False) -> tuple[ToldToken, ...]:
        """Return what is told of tokens that begin within the text so far; ``ended``: of all."""
        found = []
        while self._told and (ended or self._told[0].offset < self._shown_chars):
            found.append(self._told.popleft())
        return tuple(found)

    def _told_token(self, token_id: int, logprob: TokenLogprob) -> ToldToken:
        raw = self._decoder.shown_bytes
        top = tuple(ShownToken(raw(other), value) for other, value in logprob.top)
        return ToldToken(ShownToken(raw(token_id), logprob.logprob), top, self._decoded_chars)
