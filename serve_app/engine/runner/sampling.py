"""From logits to tokens: greedy, temperature, min-p, top-k, top-p, batched.

The random numbers for position p depend on (seed, p) alone, never on the batch: a request that is sent again with the
tokens it already has goes on identically. Each token has a number of its own, and the largest sum of logit and Gumbel
noise wins: logits that differ by little, as a drafter's or another batch's do, choose the same token.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner.position_random import FACTORS, STRIDE, position_key

_FIRST_CANDIDATES = 256
_CACHED_NUMBERS = 1 << 17
"""So many of a kind are worked on at once on a CPU, where what leaves its cache takes three times as long."""
_BLOCK = 256


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device) -> torch.Tensor:
    """Return standard Gumbel numbers [n, vocab], float32: row i is a splitmix64 stream from (seed, position) i."""
    return _noise(_keys(seeds, positions, device), _steps(vocab, device))


def _noise(keys: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the numbers of streams ``keys`` [n, 1] so many ``steps`` on, [vocab] or [n, candidates]."""
    state = keys + steps
    spare = torch.empty_like(state)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        state ^= _shifted(state, shift, spare)
        state *= _signed(factor)
    state ^= _shifted(state, 31, spare)
    # The winners' numbers come from those near 0, where float32 is fine enough; the bounds keep both logarithms finite.
    uniform = _shifted(state, 1, spare).float().mul_(2.0**-63).clamp_(2.0**-63, 1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shifted(state: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Shift right without dragging the sign along: torch's shift of int64 is arithmetic."""
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


@lru_cache(maxsize=4)
def _steps(vocab: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab + 1, device=device) * _signed(STRIDE)


def _keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    keys = [_signed(position_key(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, device=device)[:, None]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def choose_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """Return one token a row of ``logits`` [n, vocab], None where they are not numbers.

    ``positions[i]`` is where row i's token will stand. Filters apply in the order temperature, min-p, top-k, top-p.
    Tokens tied with the last one kept are kept too, so the result does not depend on how a sort breaks ties.
    """
    # One reading of the logits: a row's largest is not a number if one of them is not, and infinite if nothing else is.
    largest, best = _first_largest(logits)
    finite = torch.isfinite(largest).tolist()
    tokens: list[int | None] = [token if fine else None for token, fine in zip(best.tolist(), finite, strict=True)]
    drawn = [i for i, p in enumerate(params) if finite[i] and not p.greedy]
    vocab = logits.shape[-1]
    filtered = [i for i in drawn if 0 < params[i].top_k < vocab or params[i].top_p < 1.0]
    for draw, rows in ((_draw, sorted({*drawn} - {*filtered})), (_draw_filtered, filtered)):
        for part in _parts(rows, logits):
            draws = draw(logits[part], [params[i] for i in part], [positions[i] for i in part])
            for i, token in zip(part, draws.tolist(), strict=True):
                tokens[i] = token
    return tokens


def _parts(rows: Sequence[int], logits: torch.Tensor) -> Iterator[Sequence[int]]:
    """Yield ``rows`` in parts that stay in a CPU's cache, and all of them for a GPU, which waits for each part."""
    size = max(1, _CACHED_NUMBERS // logits.shape[-1]) if logits.device.type == "cpu" else len(rows)
    for start in range(0, len(rows), size or 1):
        yield rows[start : start + size]


def _first_largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value of [n, vocab] and the first id that has it, as ``torch.max`` does.

    That takes six times as long on a CPU, where it has no vector instructions and the largest of a block has.
    """
    whole = values.shape[-1] // _BLOCK * _BLOCK
    if not whole or values.device.type != "cpu":
        return torch.max(values, dim=-1)
    blocks = values[:, :whole].unflatten(1, (-1, _BLOCK))
    largest, block = torch.max(blocks.amax(dim=-1), dim=-1)
    token = blocks[torch.arange(len(values)), block].argmax(dim=-1) + block * _BLOCK
    if whole < values.shape[-1]:
        last, place = torch.max(values[:, whole:], dim=-1)
        later = (last > largest) | last.isnan()
        largest, token = torch.where(later, last, largest), torch.where(later, place + whole, token)
    return largest, token


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """Return the tokens [n] of the largest sums of what min-p leaves and noise."""
    scaled = logits.double().div_(_column([p.temperature for p in params], logits.device))
    if any(p.min_p for p in params):
        floors = scaled.amax(dim=-1, keepdim=True) + _column([p.min_p for p in params], logits.device).log()
        scaled.masked_fill_(scaled < floors, float("-inf"))
    noise = gumbel_noise([p.seed for p in params], positions, logits.shape[-1], logits.device)
    return _first_largest(scaled.add_(noise))[1]


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _draw_filtered(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """Return the tokens [n] of the largest sums of what min-p, top-k and top-p leave and noise.

    All that these leave are among a row's largest logits: a sort of whole rows, and noise for them, cost far more.
    """
    vocab, device, inf = logits.shape[-1], logits.device, float("inf")
    top_k = torch.tensor([[p.top_k if 0 < p.top_k < vocab else vocab] for p in params], device=device)
    temperature = _column([p.temperature for p in params], device)
    top_p, min_p = _column([p.top_p for p in params], device), _column([p.min_p for p in params], device).log()
    keys, whole = _keys([p.seed for p in params], positions, device), None
    width = min(vocab, max(_FIRST_CANDIDATES, *(p.top_k + 1 for p in params)))
    while True:
        best, tokens = torch.topk(logits, width, dim=-1)
        best = best.double().div_(temperature)
        lowest = best[:, :1] + min_p
        best.masked_fill_(best < lowest, -inf)
        floors = best.gather(1, top_k.clamp(max=width) - 1).masked_fill_(top_k == vocab, -inf)
        kept = best.masked_fill(best < floors, -inf)
        # A sum from left to right, which more candidates do not change; without a top-k all of a row is in it.
        total = kept[:, :1] + torch.exp(kept - kept[:, :1]).cumsum(dim=-1)[:, -1:].log()
        if any(not 0 < p.top_k < vocab for p in params):
            whole = _mass(logits, temperature, lowest) if whole is None else whole
            total = torch.where(top_k == vocab, whole, total)
        reached = torch.exp(kept - total).cumsum(dim=-1) >= top_p
        by_mass = best.gather(1, reached.int().argmax(dim=-1, keepdim=True))
        # Where rounding never reaches it, and without a top-p, top-k decides alone.
        lowest = torch.where(reached[:, -1:] & (top_p < 1.0), torch.maximum(floors, by_mass), floors)
        last = best[:, -1:]
        decided = (last == -inf) | (last < torch.where(top_k == vocab, lowest, floors))
        if width == vocab or decided.all():
            sums = best.masked_fill_(best < lowest, -inf) + _noise(keys, _steps(vocab, device)[tokens])
            return torch.where(sums == sums.amax(dim=-1, keepdim=True), tokens, vocab).amin(dim=-1)
        width = min(vocab, width * 8)


def _mass(logits: torch.Tensor, temperature: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials [n, 1] of what is ``lowest`` at least, over whole rows."""
    scaled = logits.double().div_(temperature)
    return scaled.masked_fill_(scaled < lowest, float("-inf")).logsumexp(dim=-1, keepdim=True)
