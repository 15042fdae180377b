"""From logits to tokens: greedy, temperature, top-k, top-p, batched.

Owns the random numbers: the one for position p depends on (seed, p) alone, never on the batch, so a request that
is sent again with the tokens it already has goes on identically. Knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve_app.engine.protocol import SamplingParams

_MASK = (1 << 64) - 1
_FIRST_CANDIDATES = 256


def position_uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) from (seed, position): two rounds of splitmix64 over both."""
    state = _mix((seed & _MASK) ^ _mix(position & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Return one token a row of ``logits`` [n, vocab]; ``positions[i]`` is where row i's token will stand.

    Filters apply in the order temperature, top-k, top-p. Tokens tied with the last one kept are kept too, so the
    result does not depend on how a sort breaks ties.
    """
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    drawn = [i for i, p in enumerate(params) if p.temperature > 0.0 and p.top_k != 1]
    if not drawn:
        return tokens
    chosen = [params[i] for i in drawn]
    scaled = logits[drawn].double()
    scaled /= torch.tensor([[p.temperature] for p in chosen], dtype=torch.float64, device=logits.device)
    scaled = _filtered(scaled, chosen)
    cumulative = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    uniform = [position_uniform(p.seed, positions[i]) for i, p in zip(drawn, chosen, strict=True)]
    mark = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the mark; a token of zero mass never is.
    found = torch.searchsorted(cumulative, mark, right=True).clamp_(max=logits.shape[-1] - 1)
    for i, token in zip(drawn, found[:, 0].tolist(), strict=True):
        tokens[i] = token
    return tokens


def _filtered(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return ``scaled`` with -inf wherever top-k or top-p drops a token."""
    vocab = scaled.shape[-1]
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if not rows:
        return scaled
    floor = torch.full((len(params), 1), float("-inf"), dtype=scaled.dtype, device=scaled.device)
    width = max([_FIRST_CANDIDATES, *(params[i].top_k for i in rows)])
    while rows:
        width = min(width, vocab)
        best = torch.topk(scaled[rows], width, dim=-1).values
        again = []
        for i, candidates in zip(rows, best, strict=True):
            threshold = _threshold(scaled[i], candidates, params[i])
            if threshold is None and width < vocab:
                again.append(i)
            else:
                floor[i] = candidates[-1] if threshold is None else threshold
        rows, width = again, width * 8
    return scaled.masked_fill(scaled < floor, float("-inf"))


def _threshold(row: torch.Tensor, best: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Return the smallest logit to keep, or None when ``best`` (the row's highest, sorted) is too short to tell."""
    kept = best
    if 0 < params.top_k < len(row):
        floor = best[params.top_k - 1]
        if params.top_p >= 1.0:
            return floor
        kept = best[best >= floor]
        if len(kept) == len(best) and len(best) < len(row):
            return None
        total = torch.logsumexp(kept, dim=0)
    else:
        total = torch.logsumexp(row, dim=0)
    mass = torch.exp(kept - total).cumsum(dim=0)
    reached = torch.nonzero(mass >= params.top_p)
    if len(reached):
        return kept[reached[0, 0]]
    return kept[-1] if len(kept) < len(best) or len(best) == len(row) else None
