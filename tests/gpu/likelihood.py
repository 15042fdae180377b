"""Compares answers by likelihood, because 16-bit kernels round differently from batch to batch.

The token with the greatest sum of log-probability / temperature and noise is chosen. If no log-probability differs by
more than e, the greatest sums differ by at most e / temperature, whichever token is chosen. So the sums of the chosen
tokens are compared, one by one after the same beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from serve_app.engine.protocol import EngineRequest
from serve_app.engine.runner.sampling import gumbel_noise
from tests.serve_app.engine.tiny import request, run_all

MEAN, MOST, EQUAL = 0.25, 1.0, 1 / 3
"""Limits for the demo model: mean and largest difference, and the least part of equal tokens.

On a CPU, two ways to compute in bfloat16 differ by 0.02 to 0.09 in the mean, and bfloat16 from float32 by 0.14 at most.
After another prompt it is 0.6 or more at temperature 1. Greedily it is 0.2, but then no token is equal; of the right
ones more than half are.
"""


@dataclass(frozen=True)
class Answer:
    """``sums[i]``: of ``tokens[i]``; ``cached``: the cached tokens of each request."""

    tokens: list[int]
    sums: list[float]
    cached: list[int]


def answers(engine: Any, asked: Sequence[EngineRequest]) -> list[Answer]:
    """Let an engine answer at once requests that want logprobs."""
    found = run_all(engine, asked)
    made = []
    for item in asked:
        name = item.request_id
        tokens, told = found.tokens[name], found.logprobs[name]
        sums = [_sum(item, i, token, each.logprob) for i, (token, each) in enumerate(zip(tokens, told, strict=True))]
        made.append(Answer(tokens, sums, [found.cached[name]]))
    return made


def answer_of(engine: Any, ids: Any, max_tokens: int = 16, **asked: Any) -> Answer:
    """Let an engine answer; ``asked``: more arguments of ``request``."""
    return answers(engine, [request("answer", ids, max_tokens, logprobs=0, **asked)])[0]


def chosen_after(engine: Any, ids: Any, begun: Sequence[int], **asked: Any) -> Answer:
    """Let an engine choose a token after each beginning of the answer ``begun``, all at once."""
    texts = [np.concatenate([ids, np.array(begun[:end], dtype=np.int32)]) for end in range(len(begun))]
    each = answers(engine, [request(f"{i}", text, 1, logprobs=0, **asked) for i, text in enumerate(texts)])
    tokens, sums = [one.tokens[0] for one in each], [one.sums[0] for one in each]
    return Answer(tokens, sums, [one.cached[0] for one in each])


def alike(wanted: Answer, found: Answer) -> bool:
    """Return whether two answers, chosen after the same beginnings, differ by no more than rounding."""
    gaps = np.abs(np.array(wanted.sums) - np.array(found.sums))
    equal = float(np.mean(np.array(wanted.tokens) == np.array(found.tokens)))
    print(f"differences: mean {gaps.mean():.3f}, most {gaps.max():.3f}; equal tokens {equal:.2f}")  # of a failed test
    return bool(gaps.mean() <= MEAN and gaps.max() <= MOST and equal >= EQUAL)


def _sum(item: EngineRequest, generated: int, token: int, logprob: float) -> float:
    sampling = item.sampling
    if sampling.greedy:
        return logprob
    noise = gumbel_noise([sampling.seed], [len(item.token_ids) + generated], 1, torch.device("cpu"), first=token)
    return logprob / sampling.temperature + float(noise[0, 0])
