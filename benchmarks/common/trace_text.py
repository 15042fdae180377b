"""A trace's block ids as requests with the same common prefixes: an id becomes a run of words of one token each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

from benchmarks.common.server import new_tenants
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest
from serve_app.replay.open_loop import Shot
from serve_app.replay.text import tokenizer_at, words_of

COMPLETIONS = "/v1/completions"


class TraceText:
    """Converts each id to text of ``tokens_per_id`` tokens, at most the trace's 512."""

    def __init__(self, model_path: Path, tokens_per_id: int = TRACE_BLOCK_TOKENS) -> None:
        """Raises ValueError if the tokenizer has too few whole words, or an id would have under two tokens."""
        if not 2 <= tokens_per_id <= TRACE_BLOCK_TOKENS:
            raise ValueError(f"tokens_per_id must be from 2 to {TRACE_BLOCK_TOKENS}, not {tokens_per_id}")
        self.tokens_per_id = tokens_per_id
        self._words = whole_words(model_path)
        self.piece = lru_cache(maxsize=1 << 16)(self._piece)

    def prompt_tokens(self, request: TraceRequest) -> int:
        """Return the shrunk length of the prompt."""
        full = (len(request.hash_ids) - 1) * self.tokens_per_id
        return max(full + 1, request.prompt_tokens * self.tokens_per_id // TRACE_BLOCK_TOKENS)

    def output_tokens(self, request: TraceRequest) -> int:
        """Return the shrunk length of the answer, at least 1."""
        return max(1, round(request.output_tokens * self.tokens_per_id / TRACE_BLOCK_TOKENS))

    def prompt(self, request: TraceRequest) -> str:
        """Return the prompt, of exactly ``prompt_tokens`` tokens."""
        last = self.prompt_tokens(request) - (len(request.hash_ids) - 1) * self.tokens_per_id
        pieces = [self.piece(hash_id) for hash_id in request.hash_ids]
        pieces[-1] = pieces[-1][:last]
        return "".join(word for piece in pieces for word in piece)

    def _piece(self, hash_id: int) -> tuple[str, ...]:
        # The id, in digits of the vocabulary, comes first, so that all ids have different words.
        digits: list[str] = []
        rest = hash_id
        while rest or not digits:
            rest, digit = divmod(rest, len(self._words))
            digits.append(self._words[digit])
        rng = Random(hash_id)
        return (*digits, *rng.choices(self._words, k=self.tokens_per_id))[: self.tokens_per_id]


@lru_cache(maxsize=4)
def whole_words(model_path: Path) -> tuple[str, ...]:
    """Return words with a leading space that are one token in any order. Raises ValueError if there are too few."""
    words = words_of(tokenizer_at(str(model_path)))
    if not words.spaced:
        raise ValueError(f"the tokenizer of {model_path} begins no text with a space")
    return tuple(f" {word}" for word in words.texts)


def trace_shots(
    trace: Sequence[TraceRequest], text: TraceText, model: str, speed: float, keys: Mapping[str, str]
) -> list[Shot]:
    """Return a trace's shots, with text as prompts. ``speed``: divides the times, before they shrink as the tokens do.

    ``keys``: by tenant; requests without one are dealt to all, a whole conversation to the same one.
    """
    shrink = TRACE_BLOCK_TOKENS / text.tokens_per_id
    named = list(keys) or ["default"]
    firsts = {request.hash_ids[:1] for request in trace}
    opening = 1 if len(firsts) > 1 else 2  # all prompts of the published trace have the same first block
    shots = []
    for request in trace:
        tenant = request.tenant or named[hash(request.hash_ids[:opening]) % len(named)]
        output_tokens = text.output_tokens(request)
        body = {"model": model, "prompt": text.prompt(request), "max_tokens": output_tokens, "temperature": 0}
        at_s = (request.arrival_s - trace[0].arrival_s) / speed / shrink
        shots.append(Shot(at_s, COMPLETIONS, body, tenant, keys.get(tenant, "")))
    return shots


def with_tenants(shots: Sequence[Shot]) -> tuple[list[Shot], list[str]]:
    """Return the shots with their tenants' keys, and the flags for an instance with these tenants."""
    names = sorted({shot.tenant for shot in shots})
    if names == ["default"]:
        return list(shots), []
    keys, tenants = new_tenants(names)
    return [replace(shot, api_key=keys[shot.tenant]) for shot in shots], [f"--set=tenants={json.dumps(tenants)}"]
