"""From logits to tokens: greedy, temperature, min-p, top-k, top-p, batched.

The random numbers for position p depend on (seed, p) alone, never on the batch: a request that is sent again with the
tokens it already has goes on identically. Each token has a number of its own, and the largest sum of logit and Gumbel
noise wins: logits that differ by little, as a drafter's or another batch's do, choose the same token. (Inverting the
cumulative distribution shifts every token behind a difference.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from serve_app.engine.attention.upload import upload
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner.position_random import FACTORS, STRIDE, position_key

_FIRST_CANDIDATES = 256


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device) -> torch.Tensor:
    """Return standard Gumbel numbers [n, vocab], float32: row i is a splitmix64 stream from (seed, position) i."""
    return _noise(torch.tensor(_keys(seeds, positions), device=device), vocab)


def _noise(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    state = keys[:, None] + torch.arange(1, vocab + 1, device=keys.device) * _signed(STRIDE)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        state ^= _shifted(state, shift)
        state *= _signed(factor)
    state ^= _shifted(state, 31)
    # The winners' numbers come from those near 0, where float32 is fine enough; the bounds keep both logarithms finite.
    uniform = _shifted(state, 1).float().mul_(2.0**-63).clamp_(2.0**-63, 1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without dragging the sign along: torch's shift of int64 is arithmetic."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    return [_signed(position_key(s, p)) for s, p in zip(seeds, positions, strict=True)]


def choose_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """Return one token a row of ``logits`` [n, vocab], None where they are not numbers.

    ``positions[i]`` is where row i's token will stand. Filters apply in the order temperature, min-p, top-k, top-p.
    Tokens tied with the last one kept are kept too, so the result does not depend on how a sort breaks ties.
    """
    if logits.device.type != "cpu":
        chosen: list[int] = sample_at_once(logits, params, positions).tolist()
        return [None if token < 0 else token for token in chosen]
    # One reading of the logits: a row's largest is not a number if one of them is not, and infinite if nothing else is.
    largest, best = torch.max(logits, dim=-1)
    sound = torch.isfinite(largest).tolist()
    tokens: list[int | None] = [token if fine else None for token, fine in zip(best.tolist(), sound, strict=True)]
    drawn = [i for i, p in enumerate(params) if sound[i] and not p.greedy]
    if drawn:
        own = [params[i] for i in drawn]
        temperature = torch.tensor([p.temperature for p in own], dtype=torch.float64)
        scaled = logits[drawn].double().div_(temperature[:, None])
        if any(p.min_p for p in own):
            _drop_improbable(scaled, torch.tensor([p.min_p for p in own], dtype=torch.float64))
        noise = gumbel_noise([p.seed for p in own], [positions[i] for i in drawn], logits.shape[-1], logits.device)
        for i, token in zip(drawn, _winners(scaled, _candidates_floors(scaled, own), noise).tolist(), strict=True):
            tokens[i] = token
    return tokens


def sample_at_once(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """Return the tokens [n] of ``choose_tokens``, int64, on the device of ``logits``; -1 where they are not numbers.

    Nothing waits for the device: the host reads the result with one transfer. Costs a sort of every filtered row.
    """
    broken = torch.isnan(logits).any(dim=-1) | torch.isinf(logits.amax(dim=-1))
    tokens = torch.argmax(logits, dim=-1)
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        own = [params[i] for i in drawn]
        vocab = logits.shape[-1]
        rows, keys, top_k, temperature, top_p, min_p = upload(
            (
                np.array(drawn, dtype=np.int64),
                np.array(_keys([p.seed for p in own], [positions[i] for i in drawn]), dtype=np.int64),
                np.array([p.top_k if 0 < p.top_k < vocab else vocab for p in own], dtype=np.int64),
                np.array([p.temperature for p in own], dtype=np.float64),
                np.array([p.top_p for p in own], dtype=np.float64),
                np.array([p.min_p for p in own], dtype=np.float64),
            ),
            logits.device,
        )
        scaled = logits.index_select(0, rows).double().div_(temperature[:, None])
        if any(p.min_p for p in own):
            _drop_improbable(scaled, min_p)
        floors = _sorted_floors(scaled, top_k, top_p) if any(_filters(p, vocab) for p in own) else None
        tokens = tokens.index_copy(0, rows, _winners(scaled, floors, _noise(keys, vocab)))
    return tokens.masked_fill(broken, -1)


def _filters(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0


def _drop_improbable(scaled: torch.Tensor, min_p: torch.Tensor) -> None:
    """Take out, in place, the tokens whose probability is below ``min_p`` [n] times that of the likeliest."""
    floors = scaled.amax(dim=-1, keepdim=True).add_(min_p.log()[:, None])
    scaled.masked_fill_(scaled < floors, float("-inf"))


def _winners(scaled: torch.Tensor, floors: torch.Tensor | None, noise: torch.Tensor) -> torch.Tensor:
    """Return the tokens [n] of the largest sums of ``scaled`` [n, vocab] and noise; below ``floors`` [n, 1] none."""
    if floors is not None:
        scaled.masked_fill_(scaled < floors, float("-inf"))
    return torch.argmax(scaled.add_(noise), dim=-1)


def _sorted_floors(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return each row's smallest logit to keep [n, 1], without a word to the host.

    ``top_k`` [n] is the size of the vocabulary where there is none, ``top_p`` [n] is 1.
    """
    best = torch.sort(scaled, dim=-1, descending=True).values
    floor = best.gather(1, top_k[:, None] - 1)
    kept = best.masked_fill(best < floor, float("-inf"))
    mass = torch.exp(kept - torch.logsumexp(kept, dim=-1, keepdim=True)).cumsum(dim=-1)
    reached = mass >= top_p[:, None]
    first = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), best.shape[-1] - 1)
    # Without a top-p, and where rounding never reaches it, top-k decides alone.
    by_mass = torch.where(top_p < 1.0, best.gather(1, first[:, None])[:, 0], float("-inf"))
    return torch.maximum(floor[:, 0], by_mass)[:, None]


def _candidates_floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """Return the same floors [n, 1] on the host, which looks at a row's highest logits alone; None without filters.

    (A sort of every row costs a CPU many times that, and looking at results as they come would stop a GPU.)
    """
    vocab = scaled.shape[-1]
    rows = [i for i, p in enumerate(params) if _filters(p, vocab)]
    if not rows:
        return None
    floors = torch.full((len(params), 1), float("-inf"), dtype=scaled.dtype)
    width = max([_FIRST_CANDIDATES, *(params[i].top_k for i in rows)])
    while rows:
        width = min(width, vocab)
        best = torch.topk(scaled[rows], width, dim=-1).values
        again = []
        for i, candidates in zip(rows, best, strict=True):
            floor = _floor(scaled[i], candidates, params[i])
            if floor is None and width < vocab:
                again.append(i)
            else:
                floors[i] = candidates[-1] if floor is None else floor
        rows, width = again, width * 8
    return floors


def _floor(logits: torch.Tensor, candidates: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Return a row's smallest logit to keep; None when ``candidates``, its highest in order, are too few to tell."""
    kept = candidates
    if 0 < params.top_k < len(logits):
        floor = candidates[params.top_k - 1]
        if params.top_p >= 1.0:
            return floor
        kept = candidates[candidates >= floor]
        if len(kept) == len(candidates) and len(candidates) < len(logits):
            return None
        total = torch.logsumexp(kept, dim=0)
    else:
        total = torch.logsumexp(logits, dim=0)
    mass = torch.exp(kept - total).cumsum(dim=0)
    reached = torch.nonzero(mass >= params.top_p)
    if len(reached):
        return kept[reached[0, 0]]
    return kept[-1] if len(kept) < len(candidates) or len(candidates) == len(logits) else None
