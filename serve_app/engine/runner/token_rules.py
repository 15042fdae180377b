"""Rules of sampling: prompt, answer and grammar change a row's logits before a token is chosen.

Order: bans and biases; repetition, frequency and presence penalty; the grammar. All depend on token ids alone.
"""

from collections.abc import Sequence, Set

import numpy as np
import torch
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray, common_tokens
from serve_app.engine.protocol import TokenMatcher
from serve_app.engine.runner.sampling import to_device
from serve_app.engine.sampling_params import SamplingParams, TokenLogprob, TokenRules
from serve_app.engine.step import History

Ruled = tuple[int, SamplingParams, History]
"""A row of the logits, with the input of its rules."""


def apply_rules(logits: torch.Tensor, ruled: Sequence[Ruled]) -> dict[int, str]:
    """Change the given rows of ``logits`` [n, vocab], float32, in place.

    Returns why a row's grammar failed, for each such row, which stays unchanged. Where rules and grammar leave no
    token, the grammar alone counts. Source: vLLM's order of logits processors.
    """
    failed: dict[int, str] = {}
    for row, params, history in ruled:
        allowed = None
        if history.matcher is not None:
            try:
                mask = _grammar_mask(history.matcher, history)
            except ValueError as error:
                failed[row] = str(error)
                continue
            allowed = None if mask is None else _allowed(mask, logits.shape[-1])
        if params.rules is not None:
            kept = history.kept
            if kept.rules is None:
                kept.rules = RowRules(params, params.rules, history.prompt, logits.device)
            allowed = kept.rules.apply(logits[row], history.answer, allowed)
        if allowed is not None:
            logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))
    return failed


def answer_mask(history: History, params: SamplingParams, vocab_size: int) -> NDArray[np.uint8]:
    """Return one bit per token id, lowest first: the tokens that grammar and rules leave; there is either.

    Of the rules only bans count. Raises ValueError, with the reason as a clause, if the grammar leaves none.
    """
    if params.rules is None:
        assert history.matcher is not None
        mask = _grammar_mask(history.matcher, history)
        assert mask is not None, "only a guess may fail to match"
        return mask
    row = torch.zeros(1, vocab_size)
    if failed := apply_rules(row, [(0, params, history)]):
        raise ValueError(failed[0])
    return np.packbits(torch.isfinite(row[0]).numpy(), bitorder="little")


def _grammar_mask(matcher: TokenMatcher, history: History) -> NDArray[np.uint8] | None:
    """Return the tokens that a grammar allows next, None after a wrong guess. Raises ValueError if it allows none."""
    mask = matcher.allowed(history.answer)
    if mask is not None and mask.any():
        return mask
    if history.guessed:
        return None
    raise ValueError("the answer so far does not match it" if mask is None else "nothing can follow the answer so far")


def _allowed(mask: NDArray[np.uint8], vocab: int) -> NDArray[np.bool_]:
    """Return a mask as wide as the logits: ids beyond the tokenizer's are never allowed."""
    bits = np.unpackbits(mask, bitorder="little")[:vocab].view(np.bool_)
    return np.pad(bits, (0, vocab - len(bits)))


class RowRules:
    """The rules of one request, with what they need of its tokens: a step reads only what is new in the answer.

    ``device``: of the logits. Answers may come in any order.
    """

    def __init__(self, params: SamplingParams, rules: TokenRules, prompt: TokenArray, device: torch.device) -> None:
        self._rules = rules
        biases = dict(rules.logit_bias)
        self._biased = to_device(list(biases), torch.int64, device)
        self._biases = to_device(list(biases.values()), torch.float32, device)
        always = {word[-1] for word in rules.bad_words if len(word) == 1}
        self._banned = _Banned(always, device)
        self._banned_at_first = _Banned(always | set(params.stop_token_ids), device)
        self._only: NDArray[np.bool_] | None = None  # made with the first row, which has the width
        self._bad_ends: dict[tuple[int, ...], set[int]] = {}
        for word in rules.bad_words:
            if len(word) > 1:
                self._bad_ends.setdefault(word[:-1], set()).add(word[-1])
        self._bad_lengths = sorted({len(start) for start in self._bad_ends})
        self._read: TokenArray = prompt[:0]
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}  # of the answer's tokens, by their first appearance
        self._counted = rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0
        self._answered = _Growing(torch.int64, device)
        self._minus = _Growing(torch.float32, device)
        self._penalized = rules.repetition_penalty != 1.0
        self._seen = _Growing(torch.int64, device)  # the prompt's tokens, then the answer's: some are there twice
        self._seen.extend(np.unique(prompt).tolist() if self._penalized else [])
        self._prompted = len(self._seen.values)

    def apply(
        self, row: torch.Tensor, answer: TokenArray, allowed: NDArray[np.bool_] | None
    ) -> NDArray[np.bool_] | None:
        """Apply the rules to a row of logits in place, one after another; return which tokens are still allowed."""
        if self._rules.allowed:
            if self._only is None:
                self._only = np.zeros(len(row), dtype=np.bool_)
                self._only[list(self._rules.allowed)] = True
            both = self._only if allowed is None else self._only & allowed
            allowed = both if both.any() else allowed
        if self._counted or self._penalized:
            self._read_on(answer)
        if len(self._biased):
            row[self._biased] += self._biases
        banned = self._banned_at_first if len(answer) < self._rules.min_tokens else self._banned
        ends = self._bad_ends_after(answer)
        if not ends <= banned.tokens:
            banned = _Banned(banned.tokens | ends, row.device)
        if banned.tokens and (allowed is None or allowed.sum() > allowed[banned.ids].sum()):
            row[banned.on_device] = float("-inf")
        if self._penalized:
            seen, penalty = self._seen.values, self._rules.repetition_penalty
            logits = row[seen]
            row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
        if self._counted:
            row[self._answered.values] -= self._minus.values
        return allowed

    def _bad_ends_after(self, answer: TokenArray) -> set[int]:
        """Return the ends of bad words of several tokens that the answer has begun."""
        ends: set[int] = set()
        recent = tuple(answer[-self._bad_lengths[-1] :].tolist()) if self._bad_lengths else ()
        for length in self._bad_lengths:
            if length <= len(recent):
                ends |= self._bad_ends.get(recent[-length:], set())
        return ends

    def _read_on(self, answer: TokenArray) -> None:
        """Count the answer's tokens: those after the part that it shares with the last one."""
        same, kept = common_tokens(self._read, answer), len(self._places)
        changed = [*reversed(self._read[same:].tolist())]
        for token in changed:
            self._counts[token] -= 1
            if not self._counts[token]:  # of the tokens left, it was the last to appear
                del self._counts[token], self._places[token]
        kept = min(kept, len(self._places))
        added = answer[same:].tolist()
        for token in added:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._places.setdefault(token, len(self._places))
        self._read = answer.copy()
        new = sorted({token for token in added if self._places[token] >= kept}, key=self._places.__getitem__)
        if self._counted:
            self._answered.extend(new, kept)
            self._minus.extend([self._penalty(token) for token in new], kept)
            again = [token for token in {*changed, *added} if self._places.get(token, kept) < kept]
            self._minus.put([self._places[token] for token in again], [self._penalty(token) for token in again])
        if self._penalized:
            self._seen.extend(new, self._prompted + kept)

    def _penalty(self, token: int) -> float:
        return self._counts[token] * self._rules.frequency_penalty + self._rules.presence_penalty


class _Banned:
    """Token ids that must not come next."""

    def __init__(self, tokens: Set[int], device: torch.device) -> None:
        self.tokens = tokens
        self.ids = sorted(tokens)
        self.on_device = to_device(self.ids, torch.int64, device)


class _Growing:
    """Numbers [n] on a device; what is new is added at the end, in room that doubles."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._room = torch.empty(0, dtype=dtype, device=device)
        self.values = self._room

    def extend(self, values: Sequence[float], start: int = 0) -> None:
        """Put values at ``start``, at most the length, and end there."""
        end = start + len(values)
        if end > len(self._room):
            room = self._room.new_empty(2 * end)
            room[:start] = self._room[:start]
            self._room = room
        self._put(slice(start, end), values)
        self.values = self._room[:end]

    def put(self, places: Sequence[int], values: Sequence[float]) -> None:
        """Replace values."""
        self._put(to_device(places, torch.int64, self._room.device), values)

    def _put(self, where: slice | torch.Tensor, values: Sequence[float]) -> None:
        if values:
            self._room[where] = to_device(values, self._room.dtype, self._room.device)


def token_logprobs(
    logprobs: torch.Tensor, tokens: Sequence[int | None], tops: Sequence[int | Sequence[int]], *, ranked: bool = False
) -> list[TokenLogprob | None]:
    """Return the log-probabilities of each row's token; ``logprobs`` [n, vocab].

    ``tops``: of each row, the number of likeliest tokens beside it, or the ids of the tokens to report behind it.
    """
    chosen = torch.tensor([[token or 0] for token in tokens], device=logprobs.device)
    values = logprobs.gather(1, chosen)
    ranks = (logprobs >= values).sum(dim=-1).tolist() if ranked else [0] * len(tokens)
    own = values[:, 0].tolist()
    most = max((top for top in tops if isinstance(top, int)), default=0)
    best = torch.topk(logprobs, min(most, logprobs.shape[-1]), dim=-1)
    pairs = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    for row, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        if not isinstance(top, int) and token is not None:
            others = [other for other in top if other != token]
            pairs[row] = [(token, own[row]), *zip(others, logprobs[row, others].tolist(), strict=True)]
    return [
        None if token is None else TokenLogprob(value, tuple(listed[:top] if isinstance(top, int) else listed), rank)
        for token, value, listed, top, rank in zip(tokens, own, pairs, tops, ranks, strict=True)
    ]
