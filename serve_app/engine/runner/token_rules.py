"""Rules of sampling: prompt, answer and grammar change a row's logits before a token is chosen.

Order: bans and biases; repetition, frequency and presence penalty; the grammar. All depend on token ids alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from router.protocol.block_hash import TokenArray
from serve_app.engine.sampling_params import SamplingParams, TokenLogprob, TokenRules
from serve_app.engine.step import History

Ruled = tuple[int, SamplingParams, History]
"""A row of the logits, with the input of its rules."""


def apply_rules(logits: torch.Tensor, ruled: Sequence[Ruled]) -> dict[int, str]:
    """Change the given rows of ``logits`` [n, vocab], float32, in place.

    Returns the error of each failed row, which stays unchanged. Where rules and grammar leave no token, the grammar
    alone counts. Source: vLLM's order of logits processors.
    """
    failed: dict[int, str] = {}
    for row, params, history in ruled:
        allowed = None
        if history.matcher is not None:
            try:
                mask = history.matcher.allowed(history.answer)
            except ValueError as error:
                failed[row] = str(error)
                continue
            if mask is not None:
                allowed = _allowed(mask, logits.shape[-1])
            elif not history.guessed:
                failed[row] = "the answer so far does not match its grammar"
                continue
        if params.rules is not None:
            _apply_rules(logits[row], params, params.rules, history, allowed)
        if allowed is not None:
            logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))
    return failed


def _allowed(mask: NDArray[np.uint8], vocab: int) -> NDArray[np.bool_]:
    """Return a mask as wide as the logits: ids beyond the tokenizer's are never allowed."""
    bits = np.unpackbits(mask, bitorder="little")[:vocab].view(np.bool_)
    return np.pad(bits, (0, vocab - len(bits)))


def _apply_rules(
    row: torch.Tensor, params: SamplingParams, rules: TokenRules, history: History, allowed: NDArray[np.bool_] | None
) -> None:
    """Apply the rules to one row of logits in place, one after another."""

    def there(values: Sequence[float] | NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(values, device=row.device)

    answer = history.answer
    if rules.logit_bias:
        ids, biases = zip(*rules.logit_bias, strict=True)
        row[there(ids)] += there(np.array(biases, dtype=np.float32))
    banned = _banned(params, rules, answer)
    if banned and (allowed is None or allowed.sum() > allowed[banned].sum()):
        row[there(banned)] = float("-inf")
    if rules.repetition_penalty != 1.0:
        seen = there(np.union1d(history.prompt, answer))
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / rules.repetition_penalty, row[seen] * rules.repetition_penalty
        )
    if rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0:
        tokens, counts = np.unique(answer, return_counts=True)
        minus = counts * rules.frequency_penalty + rules.presence_penalty
        row[there(tokens)] -= there(minus.astype(np.float32))


def _banned(params: SamplingParams, rules: TokenRules, answer: TokenArray) -> list[int]:
    """Return the ids that must not come next: stop tokens in a short answer, and the ends of bad words."""
    banned = set(params.stop_token_ids) if len(answer) < rules.min_tokens else set()
    longest = max(map(len, rules.bad_words), default=1)
    recent = tuple(answer[max(0, len(answer) - longest + 1) :].tolist())
    for word in rules.bad_words:
        if recent[max(0, len(recent) - len(word) + 1) :] == word[:-1]:
            banned.add(word[-1])
    return sorted(banned)


def token_logprobs(
    logprobs: torch.Tensor, tokens: Sequence[int | None], tops: Sequence[int]
) -> list[TokenLogprob | None]:
    """Return the log-probabilities of each row's token; ``logprobs`` [n, vocab]; ``tops``: numbers of likeliest."""
    chosen = torch.tensor([[token or 0] for token in tokens], device=logprobs.device)
    own = logprobs.gather(1, chosen)[:, 0].tolist()
    best = torch.topk(logprobs, min(max(tops), logprobs.shape[-1]), dim=-1)
    pairs = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [
        None if token is None else TokenLogprob(value, tuple(likeliest[:top]))
        for token, value, likeliest, top in zip(tokens, own, pairs, tops, strict=True)
    ]
