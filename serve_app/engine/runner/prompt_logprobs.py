"""The log-probabilities of prompts' tokens, from one forward's hidden states: a few rows of logits at a time."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from serve_app.engine.runner.token_rules import token_logprobs
from serve_app.engine.sampling_params import TokenLogprob
from serve_app.engine.step import Segment

LEAST_ROWS = 64
"""Logits of at least this many rows exist at once: fewer would be slow, and these fit the slack of every budget."""


class HiddenStates:
    """Keeps the output of a model's base, so that its head can be applied again to some of the rows."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._output: Any = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the hidden states of the forward within the block."""

        def keep(_: Any, __: Any, output: Any) -> None:
            self._output = output

        hook = self._model.base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def logits(self, rows: Sequence[int], parts_of: int) -> Iterator[torch.Tensor]:
        """Yield the float32 logits [n, vocab] of these packed rows, ``parts_of`` at a time.

        By the model's own code after its base, which may scale or cap what its output layer returns.
        """
        base, output = self._model.base_model, self._output
        hidden = output.last_hidden_state
        base.forward = lambda *_, **__: output
        try:
            for at in range(0, len(rows), parts_of):
                part = torch.tensor(rows[at : at + parts_of], device=hidden.device)
                output.last_hidden_state = hidden[:, part]
                yield self._model(input_ids=part[None], use_cache=False, logits_to_keep=0).logits[0].float()
        finally:
            del base.forward
            self._output = None


def tell_prompts(
    hidden: HiddenStates, segments: Sequence[Segment], order: Sequence[int], parts_of: int
) -> dict[int, tuple[TokenLogprob, ...] | None]:
    """Return, by segment, the log-probabilities of its targets; None if its logits are not numbers.

    ``order``: the segments' places in the packed row, whose logits are computed for ``parts_of`` rows at a time.
    """
    begins = accumulate((len(segments[i].token_ids) for i in order), initial=0)
    rows: list[int] = []
    targets: list[int] = []
    tops: list[int] = []
    counts: dict[int, int] = {}
    for i, begin in zip(order, begins, strict=False):
        segment = segments[i]
        if segment.targets is None:
            continue
        first = begin + segment.first_target - 1 - segment.start
        counts[i] = len(segment.targets)
        rows += range(first, first + counts[i])
        targets += segment.targets.tolist()
        tops += [segment.tops] * counts[i]
    entries: list[TokenLogprob] = []
    for logits in hidden.logits(rows, parts_of):
        part = slice(len(entries), len(entries) + len(logits))
        logprobs = torch.log_softmax(logits, dim=-1)
        entries += filter(None, token_logprobs(logprobs, targets[part], tops[part], ranked=True))
    results: dict[int, tuple[TokenLogprob, ...] | None] = {}
    at = 0
    for i, count in counts.items():
        own = tuple(entries[at : at + count])
        results[i] = None if any(math.isnan(one.logprob) for one in own) else own
        at += count
    return results
