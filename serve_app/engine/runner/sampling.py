"""From logits to tokens: greedy, temperature, min-p, top-k, top-p, batched.

The random numbers for position p depend on (seed, p) alone, never on the batch: a request that is sent again with its
tokens so far continues identically. Each vocabulary token has its own number, and the largest sum of logit and Gumbel
noise wins. So slightly different logits, as from another batch, choose the same token.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner.position_random import FACTORS, STRIDE, position_key

_FIRST_CANDIDATES = 256
_CACHED_NUMBERS = 1 << 16
"""On a CPU noise is made in batches of this many numbers: beyond its cache it takes two to three times as long."""
_BLOCK = 256


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], count: int, device: torch.device, first: int = 0
) -> torch.Tensor:
    """Return standard Gumbel numbers [n, count], float32, of tokens ``first``, ``first`` + 1, ...

    Row i is a part of the splitmix64 stream of the i-th (seed, position); the stream begins with token 0.
    """
    keys = [_signed(position_key(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
    state = to_device(keys, torch.int64, device)[:, None] + _steps(first + 1, first + count + 1, device)
    spare = torch.empty_like(state)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        state ^= _shifted(state, shift, spare)
        state *= _signed(factor)
    state ^= _shifted(state, 31, spare)
    # The winners come from numbers near 0, where float32 is fine enough; the bounds keep both logarithms finite.
    uniform = _shifted(state, 1, spare).float().mul_(2.0**-63).clamp_(2.0**-63, 1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=16)
def _steps(start: int, end: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, end, device=device) * _signed(STRIDE)


def _shifted(state: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Shift right without the sign: torch's shift of int64 is arithmetic."""
    return torch.bitwise_right_shift(state, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def choose_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """Return one token per row of ``logits`` [n, vocab], None where they are not numbers. See ``choose_on_device``."""
    chosen, numbers = choose_on_device(logits, params, positions)
    return [token if fine else None for token, fine in zip(chosen.tolist(), numbers.tolist(), strict=True)]


def choose_on_device(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one token per row of ``logits`` [n, vocab], and whether the row's logits are numbers; both on its device.

    ``positions[i]``: the position of row i's token. Filters apply in the order temperature, min-p, top-k, top-p.
    Tokens tied with the last one kept are kept too, so that the result does not depend on the sort's order of ties.
    A GPU is not waited for, except for top-k and top-p.
    """
    # One pass over the logits: a row's largest is not finite if any is NaN or inf, or if all are -inf.
    largest, tokens = _first_largest(logits)
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    size = max(1, _CACHED_NUMBERS // logits.shape[-1]) if logits.device.type == "cpu" else len(params)
    for part in (drawn[start : start + size] for start in range(0, len(drawn), size)):
        # A slice copies nothing.
        where = slice(part[0], part[0] + 1) if len(part) == 1 else to_device(part, torch.int64, logits.device)
        tokens[where] = _draw(logits[where], [params[i] for i in part], [positions[i] for i in part])
    return tokens, torch.isfinite(largest)


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers [n] on a device; a GPU reads pinned memory when it gets there, and nobody waits for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _first_largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value of [n, vocab] and its first id, as ``torch.max`` does.

    On a CPU ``torch.max`` goes number by number; vector instructions find a block's largest in a sixth of the time.
    """
    block = math.gcd(values.shape[-1], _BLOCK)
    if block < _BLOCK // 16 or values.device.type != "cpu":
        return torch.max(values, dim=-1)
    blocks = values.reshape(len(values), -1, block)
    largest, which = torch.max(blocks.amax(dim=-1), dim=-1)
    return largest, blocks[torch.arange(len(values)), which].argmax(dim=-1) + which * block


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """Return the tokens [n] with the largest sums of filtered logit and noise."""
    scaled, vocab = logits.double(), logits.shape[-1]
    if any(p.temperature != 1.0 for p in params):
        scaled.div_(_column([p.temperature for p in params], logits.device))
    if any(p.min_p for p in params):
        floors = scaled.amax(dim=-1, keepdim=True) + _column([p.min_p for p in params], logits.device).log()
        scaled.masked_fill_(scaled < floors, float("-inf"))
    filtered = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if filtered:
        rows = scaled[filtered]
        scaled[filtered] = rows.masked_fill_(rows < _floors(rows, [params[i] for i in filtered]), float("-inf"))
    seeds, width = [p.seed for p in params], _CACHED_NUMBERS if logits.device.type == "cpu" else vocab
    for first in range(0, vocab, width):
        part = scaled[:, first : first + width]
        part += gumbel_noise(seeds, positions, part.shape[-1], logits.device, first)
    return _first_largest(scaled)[1]


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return to_device(values, torch.float64, device)[:, None]


def _floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return each row's smallest logit to keep [n, 1], by top-k and top-p; sorting whole rows costs far more."""
    vocab = scaled.shape[-1]
    top_k = to_device([p.top_k if 0 < p.top_k < vocab else vocab for p in params], torch.int64, scaled.device)[:, None]
    top_p = _column([p.top_p for p in params], scaled.device)
    width = min(vocab, max(_FIRST_CANDIDATES, *(p.top_k for p in params)))
    while True:
        best = torch.topk(scaled, width, dim=-1).values
        floors = best.gather(1, top_k.clamp(max=width) - 1).masked_fill_(top_k == vocab, float("-inf"))
        total = scaled.masked_fill(scaled < floors, float("-inf")).logsumexp(dim=-1, keepdim=True)
        mass = torch.exp(best.masked_fill(best < floors, float("-inf")) - total).cumsum(dim=-1)
        reached = mass >= top_p
        # If rounding keeps the mass below top-p, or there is no top-p, top-k decides alone.
        decided = reached[:, -1:] | (best[:, -1:] < floors) | (top_p >= 1.0)
        if width == vocab or decided.all():
            by_mass = best.gather(1, reached.int().argmax(dim=-1, keepdim=True))
            return torch.where(reached[:, -1:] & (top_p < 1.0), torch.maximum(floors, by_mass), floors)
        width = min(vocab, width * 8)
