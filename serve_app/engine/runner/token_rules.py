"""Rules of sampling: what prompt, answer and grammar do to a row's logits before a token is chosen.

Owns their order: bans and biases, repetition, frequency and presence penalty, then the grammar. Everything is computed
from token ids at each step, so a row is the same after a preemption, behind drafts and on another replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray
from serve_app.engine.attention.upload import Array, upload
from serve_app.engine.sampling_params import SamplingParams, TokenLogprob, TokenRules
from serve_app.engine.step import History

Ruled = tuple[int, SamplingParams, History]
"""A row of the logits, and what its rules read."""

_NO_IDS = np.empty(0, dtype=np.int64)


def apply_rules(logits: torch.Tensor, ruled: Sequence[Ruled]) -> dict[int, str]:
    """Change the given rows of ``logits`` [n, vocab], float32, in place, without waiting for the device.

    Returns why rows failed, by row: those are as they were. Where rules and grammar leave no token, the grammar alone
    counts. Source: vLLM's order of logits processors.
    """
    vocab = logits.shape[-1]
    failed: dict[int, str] = {}
    changes: list[tuple[Array, ...]] = []
    masked: list[int] = []
    masks: list[NDArray[np.uint8]] = []
    for row, params, history in ruled:
        mask = None
        if history.matcher is not None:
            try:
                mask = history.matcher.allowed(history.answer)
            except ValueError as error:
                failed[row] = str(error)
                continue
            if mask is None and not history.guessed:
                failed[row] = "the answer so far does not match its grammar"
                continue
        if mask is not None:
            mask = _fitted(mask, vocab)
            masked.append(row)
            masks.append(mask)
        if params.rules is not None:
            ids, *values = _changes(params, params.rules, history, mask, vocab)
            if len(ids):
                changes.append((np.full(len(ids), row, dtype=np.int64), ids, *values))
    if changes:
        columns = [np.concatenate(column) for column in zip(*changes, strict=True)]
        *place, bias, factor, minus = upload(columns, logits.device)
        found = logits[tuple(place)].add_(bias)
        found = torch.where(found > 0, found / factor, found * factor).sub_(minus)
        logits.index_put_(tuple(place), found)
    if masks:
        _apply_masks(logits, masked, np.stack(masks))
    return failed


def _apply_masks(logits: torch.Tensor, rows: Sequence[int], masks: NDArray[np.uint8]) -> None:
    """Forbid in the given rows, in place, what ``masks`` [rows, bytes] do not allow."""
    vocab = logits.shape[-1]
    if logits.device.type == "cpu":
        # Row by row in this thread: that takes less time than waking others, and a seventh of the operations below.
        shared, forbidden = logits.numpy(), np.unpackbits(~masks, axis=1, bitorder="little").view(np.bool_)
        for row, tokens in zip(rows, forbidden, strict=True):
            np.copyto(shared[row], -np.inf, where=tokens[:vocab])
        return
    there, packed = upload((np.array(rows, dtype=np.int64), masks), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    unset = (packed[:, :, None] >> bits).bitwise_and_(1).view(len(rows), -1)[:, :vocab] == 0
    logits.index_copy_(0, there, logits.index_select(0, there).masked_fill_(unset, float("-inf")))


def _fitted(mask: NDArray[np.uint8], vocab: int) -> NDArray[np.uint8]:
    """Return a mask as wide as the logits: ids that the tokenizer does not have are never allowed."""
    width = -(-vocab // 8)
    return mask[:width] if len(mask) >= width else np.pad(mask, (0, width - len(mask)))


def _changes(
    params: SamplingParams, rules: TokenRules, history: History, mask: NDArray[np.uint8] | None, vocab: int
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return what becomes of which ids: a logit plus bias, if above 0 divided by factor, else times it, minus minus."""
    answer = history.answer
    counted = rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0
    touched = np.zeros(vocab, dtype=bool)
    if counted or rules.repetition_penalty != 1.0:
        touched[answer] = True
    if rules.repetition_penalty != 1.0:
        touched[history.prompt] = True
    seen = np.flatnonzero(touched)
    biased = np.array([token for token, _ in rules.logit_bias], dtype=np.int64)
    banned = _banned(params, rules, answer)
    if mask is not None and len(banned):
        left = np.unpackbits(mask, bitorder="little")[:vocab]
        left[banned] = 0
        banned = banned if left.any() else _NO_IDS
    touched[biased] = touched[banned] = True
    ids = np.flatnonzero(touched)
    bias, minus = np.zeros((2, len(ids)), dtype=np.float32)
    factor = np.ones(len(ids), dtype=np.float32)
    bias[np.searchsorted(ids, biased)] = [value for _, value in rules.logit_bias]
    bias[np.searchsorted(ids, banned)] = -np.inf
    if rules.repetition_penalty != 1.0:
        factor[np.searchsorted(ids, seen)] = rules.repetition_penalty
    if counted:
        tokens, counts = np.unique(answer, return_counts=True)
        minus[np.searchsorted(ids, tokens)] = counts * rules.frequency_penalty + rules.presence_penalty
    return ids, bias, factor, minus


def _banned(params: SamplingParams, rules: TokenRules, answer: TokenArray) -> NDArray[np.int64]:
    """Return the ids that must not come next: stop tokens of a short answer, and the ends of bad words."""
    early = params.stop_token_ids if len(answer) < rules.min_tokens else ()
    if not rules.bad_words:
        return np.array(early, dtype=np.int64)
    longest = max(map(len, rules.bad_words))
    recent = tuple(answer[max(0, len(answer) - longest + 1) :].tolist())
    ends = (word[-1] for word in rules.bad_words if recent[max(0, len(recent) - len(word) + 1) :] == word[:-1])
    return np.array(sorted({*early, *ends}), dtype=np.int64)


def raw_logprobs(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the log-softmax of some rows of ``logits`` as they are now, on their device."""
    return torch.log_softmax(logits[list(rows)], dim=-1)


def told_logprobs(
    logprobs: torch.Tensor, tokens: Sequence[int | None], tops: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    """Return what is told of each row's token: a tuple of one, or none where there is no token.

    ``logprobs`` [n, vocab]; ``tops``: how many of the likeliest tokens each row tells.
    """
    chosen = torch.tensor([[token or 0] for token in tokens], device=logprobs.device)
    own = logprobs.gather(1, chosen)[:, 0].tolist()
    best = torch.topk(logprobs, min(max(tops), logprobs.shape[-1]), dim=-1)
    pairs = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [
        () if token is None else (TokenLogprob(value, tuple(likeliest[:top])),)
        for token, value, likeliest, top in zip(tokens, own, pairs, tops, strict=True)
    ]
