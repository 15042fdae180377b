"""An EAGLE-3 head as drafter: it guesses from the base model's hidden states, over the same block ids.

Owns the head's KV and, for each block, the fused state of its last computed token: every request that hits a cached
block can go on after it. A slot holds the pair of its own token and the state before it: a block's content depends on
nothing after the block. Guesses leave no trace in the pool.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from serve_app.engine.attention.paging import KvPool, slots_of
from serve_app.engine.attention.reads import alike
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.runner.sampling import choose_tokens
from serve_app.engine.speculative.eagle_config import EagleConfig
from serve_app.engine.speculative.eagle_head import load_head
from serve_app.engine.step import Segment, SegmentResult, ceil_div


class EagleDrafter:
    """Drafts with the head of ``config``, over the hidden states of ``base``."""

    def __init__(self, config: EagleConfig, base: ModelRunner) -> None:
        """Load the head. Raises ValueError when the two do not fit."""
        self._head = load_head(config, base.model, base.dtype, base.device)
        self._device = base.device
        self._vocab_size = base.vocab_size
        size, blocks = base.pool.block_size, base.pool.num_blocks
        self._pool = KvPool(1, blocks, size, config.num_kv_heads, config.head_dim, base.dtype, base.device)
        # Of each block its last token's fused state, [blocks, hidden]; among the pools shaped as they are.
        self._ends = torch.zeros(blocks, config.hidden_size, dtype=base.dtype, device=base.device)
        self.pools: Sequence[torch.Tensor] = (self._pool.tensor, self._ends.view(1, 1, blocks, 1, 1, -1))
        layers = config.aux_layers(int(base.config.num_hidden_layers))
        self._tap = HiddenTap(base.model, layers, blocks * size, base.device)

    @torch.inference_mode()
    def propose(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Guess ``drafts`` tokens after each segment that is one token, one after another."""
        self._tap.clear()
        proposals: list[list[int]] = [[] for _ in segments]
        widths = {
            i: ceil_div(segment.start, self._pool.block_size)
            for i, segment in enumerate(segments)
            if segment.drafts and len(segment.token_ids) == 1 and segment.start
        }
        for batch in alike(widths, self._pool.block_size):
            for i, tokens in zip(batch, self._guess([segments[i] for i in batch]), strict=True):
                proposals[i] = tokens[: segments[i].drafts]
        return proposals

    @torch.inference_mode()
    def follow(
        self, segments: Sequence[Segment], results: Sequence[SegmentResult], proposals: Sequence[Sequence[int]]
    ) -> list[int]:
        """Write the head's KV of every position that the base computed and that counts, and states at blocks' ends."""
        size = self._pool.block_size
        sound = [(s, result.accepted) for s, result in zip(segments, results, strict=True) if not result.error]
        if sound:
            befores = [s.blocks[(s.start - 1) // size] if s.start else 0 for s, _ in sound]
            counts = [len(s.token_ids) + len(accepted) for s, accepted in sound]
            firsts = self._tensor([0, *accumulate(counts[:-1])])
            tokens = self._tensor([token for s, accepted in sound for token in (*s.token_ids.tolist(), *accepted)])
            positions = self._tensor([p for s, more in sound for p in range(s.start, s.end + len(more))])
            slots = self._tensor([slot for s, more in sound for slot in slots_of(s, size, len(more))])
            fused = self._head.fc(self._tap.states(slots)).nan_to_num(0.0, 0.0, 0.0)
            before = fused.roll(1, dims=0)
            before[firsts] = self._ends[self._tensor(befores)]
            # A sequence's first token has no state before it, hence no pair.
            paired = positions > 0
            pairs, _ = self._head.read(tokens[paired], before[paired])
            keys, values = self._head.keys_values(pairs, self._head.rotation(positions[paired] - 1))
            # Numbers only: what masks hide from attention still takes part in its products.
            self._pool.write(0, slots[paired], keys.nan_to_num(0.0, 0.0, 0.0), values.nan_to_num(0.0, 0.0, 0.0))
            closing = positions % size == size - 1
            # Before a segment's first row comes the last one of another; before the very first, the very last.
            closing[firsts - 1] = True
            self._ends[slots[closing] // size] = fused[closing]
        self._tap.clear()
        return [segment.end + len(result.accepted) for segment, result in zip(segments, results, strict=True)]

    def _guess(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Return as many guesses for each segment as the one that wants most wants; fewer where logits break."""
        head, size = self._head, self._pool.block_size
        most = max(segment.drafts for segment in segments)
        params = [segment.sampling for segment in segments if segment.sampling is not None]
        keys, values, mask = self._context(segments, most)
        tail = keys.shape[1] - most
        states = self._ends[self._tensor([segment.blocks[(segment.start - 1) // size] for segment in segments])]
        tokens = self._tensor([int(segment.token_ids[-1]) for segment in segments])
        starts = self._tensor([segment.start for segment in segments])
        guesses: list[list[int]] = [[] for _ in segments]
        for step in range(most):
            rotation = head.rotation(starts - 1 + step)
            pairs, residual = head.read(tokens, states)
            keys[:, tail + step], values[:, tail + step] = head.keys_values(pairs, rotation)
            mask[:, tail + step] = 0
            attended = scaled_dot_product_attention(
                head.queries(pairs, rotation)[:, :, None],
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask[:, None, None],
                enable_gqa=True,
            )
            states = head.finish(attended[:, :, 0], residual)
            logits = torch.full((len(segments), self._vocab_size), float("-inf"), device=self._device)
            logits[:, head.draft_ids] = head.lm_head(head.norm(states)).float()
            chosen = choose_tokens(logits, params, [segment.end + step for segment in segments])
            for own, token in zip(guesses, chosen, strict=True):
                if token is not None and len(own) == step:
                    own.append(token)
            tokens = self._tensor([token or 0 for token in chosen])
        return guesses

    def _context(self, segments: Sequence[Segment], room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy the KV of each segment's past, with ``room`` for as many guesses after it.

        Returns keys and values [n, positions + room, kv_heads, head_dim] and the mask [n, positions + room].
        """
        size, pool = self._pool.block_size, self._pool.tensor[0]
        width = max(ceil_div(segment.start, size) for segment in segments)
        tables = [[*segment.blocks[:width], *[0] * (width - len(segment.blocks))] for segment in segments]
        past = pool[:, self._tensor(tables)].flatten(2, 3)
        copies = torch.cat([past, past.new_zeros(*past.shape[:2], room, *past.shape[3:])], dim=2)
        where = torch.arange(width * size + room, device=self._device)
        starts = self._tensor([segment.start for segment in segments])
        hidden = (where[None] == 0) | (where[None] >= starts[:, None])
        mask = torch.zeros(hidden.shape, dtype=pool.dtype, device=self._device)
        return copies[0], copies[1], mask.masked_fill_(hidden, float("-inf"))

    def _tensor(self, numbers: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)


class HiddenTap:
    """Keeps the states that enter ``layers`` of a model, taken by forward hooks while it computes a step.

    Layer n of n layers means what leaves the last one. Steps are gathered until ``clear``; where two steps computed the
    same slot the later one counts.
    """

    def __init__(self, model: Any, layers: Sequence[int], num_slots: int, device: torch.device) -> None:
        """Attach the hooks. Raises ValueError where ``model`` has no list of its decoder layers."""
        embeddings, config = model.get_input_embeddings(), model.config
        self._layers = tuple(layers)
        self._row_of_slot = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._step: dict[int, torch.Tensor] = {}
        self._states: torch.Tensor | None = None
        count = int(config.num_hidden_layers)
        lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
        if not lists:
            name = type(model).__name__
            raise ValueError(f"{name} has no list of {count} decoder layers to read hidden states from")
        outputs = [embeddings, *lists[0]]
        for layer in set(layers):
            outputs[layer].register_forward_hook(self._keeping(layer))
        model.register_forward_hook(self._end_step, with_kwargs=True)

    def clear(self) -> None:
        """Forget every step; the states of a step are several times as large as its tokens' KV of one layer."""
        self._states = None

    def states(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the states [n, layers * hidden] of ``slots`` [n], all computed since ``clear``."""
        assert self._states is not None
        return self._states[self._row_of_slot[slots]]

    def _keeping(self, layer: int) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            self._step[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def _end_step(self, _: nn.Module, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
        slots = kwargs["paged"].slots
        states = torch.cat([self._step.pop(layer)[: len(slots)] for layer in self._layers], dim=-1)
        before = 0 if self._states is None else len(self._states)
        self._row_of_slot[slots] = torch.arange(before, before + len(slots), device=slots.device)
        self._states = states if self._states is None else torch.cat([self._states, states])
