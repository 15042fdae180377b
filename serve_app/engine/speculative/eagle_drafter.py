"""An EAGLE-3 head as drafter: it guesses from the base model's hidden states, over the same block ids.

Owns the head's KV and, for each block, the fused state of its last computed token: every request that hits a cached
block can go on after it. A slot holds the pair of its own token and the state before it: a block's content depends on
nothing after the block. Guesses leave no trace in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from serve_app.engine.attention.paging import KvPool
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.runner.sampling import choose_tokens
from serve_app.engine.speculative.eagle_head import EagleHead
from serve_app.engine.speculative.hidden_states import HiddenTap
from serve_app.engine.step import Segment, SegmentResult, ceil_div

Ints = npt.NDArray[np.integer[Any]]

GATHERED_TOKENS = 65536
"""Positions whose KV is copied together for a batch of guesses, padding included."""


class EagleDrafter:
    """Drafts with an EAGLE-3 head; satisfies ``speculative.Drafter``."""

    def __init__(self, base: ModelRunner, head: EagleHead) -> None:
        self._head = head
        self._device = base.device
        self._vocab_size = base.vocab_size
        config, size = head.config, base.pool.block_size
        blocks = base.pool.tensor.shape[2]
        self._pool = KvPool(1, blocks, size, config.num_kv_heads, config.head_dim, base.dtype, base.device)
        # Of each block its last token's fused state, [blocks, hidden]; among the pools shaped as they are.
        self._ends = torch.zeros(blocks, config.hidden_size, dtype=base.dtype, device=base.device)
        self.pools: Sequence[torch.Tensor] = (self._pool.tensor, self._ends.view(1, 1, blocks, 1, 1, -1))
        self.block_bytes = config.block_bytes(str(base.dtype).removeprefix("torch."), size)
        layers = config.aux_layers(int(base.config.num_hidden_layers))
        self._tap = HiddenTap(base.model, layers, base.pool.keys[0].shape[0], base.device)

    @torch.inference_mode()
    def propose(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Guess ``drafts`` tokens after each segment that is one token, one after another."""
        self._tap.clear()
        proposals: list[list[int]] = [[] for _ in segments]
        active = [i for i, s in enumerate(segments) if s.drafts and len(s.token_ids) == 1 and s.start]
        for batch in _batches(segments, active, self._pool.block_size):
            chosen = [segments[i] for i in batch]
            for i, tokens in zip(batch, self._guess(chosen), strict=True):
                proposals[i] = tokens[: segments[i].drafts]
        return proposals

    @torch.inference_mode()
    def follow(
        self, segments: Sequence[Segment], results: Sequence[SegmentResult], proposals: Sequence[Sequence[int]]
    ) -> list[int]:
        """Write the head's KV of every position that the base computed and that counts."""
        size = self._pool.block_size
        drafted, tokens, positions, slots, firsts, befores = [], [], [], [], [], []
        row = 0
        for segment, result in zip(segments, results, strict=True):
            end = segment.end + len(result.accepted)
            drafted.append(end)
            if result.error:
                continue
            where = np.arange(segment.start, end)
            table = np.asarray(segment.blocks[: (end - 1) // size + 1], dtype=np.int64)
            tokens.append(np.concatenate([segment.token_ids, np.array(result.accepted, dtype=np.int32)]))
            positions.append(where)
            slots.append(table[where // size] * size + where % size)
            firsts.append(row)
            befores.append(table[(segment.start - 1) // size] if segment.start else 0)
            row += len(where)
        if row:
            self._write(
                np.concatenate(tokens),
                np.concatenate(positions),
                np.concatenate(slots),
                np.array(firsts),
                np.array(befores),
            )
        self._tap.clear()
        return drafted

    def _write(self, tokens: Ints, positions: Ints, slots: Ints, firsts: Ints, befores: Ints) -> None:
        """Write pairs at ``slots`` and the states at blocks' ends.

        ``firsts``: the rows with which segments begin; ``befores``: the block before each, if it begins after 0.
        """
        size = self._pool.block_size
        lasts = np.append(firsts[1:], len(slots)) - 1
        slot_index = self._index(slots)
        fused = self._head.fuse(self._tap.states(slot_index)).nan_to_num(0.0, 0.0, 0.0)
        before = fused.roll(1, dims=0)
        before[self._index(firsts)] = self._ends[self._index(befores)]
        # A sequence's first token has no state before it, hence no pair.
        paired = np.flatnonzero(positions)
        if len(paired):
            at = self._index(paired)
            pairs, _ = self._head.read(self._index(tokens)[at], before[at])
            keys, values = self._head.keys_values(pairs, self._head.rotation(self._index(positions)[at] - 1))
            # Numbers only: what masks hide from attention still takes part in its products.
            self._pool.keys[0].index_copy_(0, slot_index[at], keys.nan_to_num(0.0, 0.0, 0.0))
            self._pool.values[0].index_copy_(0, slot_index[at], values.nan_to_num(0.0, 0.0, 0.0))
        closing = np.union1d(lasts, np.flatnonzero(positions % size == size - 1))
        self._ends.index_copy_(0, self._index(slots[closing] // size), fused[self._index(closing)])

    def _guess(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Return as many guesses for each segment as the one that wants most wants; fewer where logits break."""
        head, size, count = self._head, self._pool.block_size, len(segments)
        most = max(segment.drafts for segment in segments)
        starts = np.array([segment.start for segment in segments])
        keys, values, mask = self._context(segments, most)
        tail = keys.shape[1] - most
        states = self._ends[self._index([s.blocks[(s.start - 1) // size] for s in segments])]
        tokens = self._index([int(segment.token_ids[-1]) for segment in segments])
        params = [segment.sampling for segment in segments if segment.sampling is not None]
        assert len(params) == count
        guesses: list[list[int]] = [[] for _ in segments]
        sound = [True] * count
        for step in range(most):
            rotation = head.rotation(self._index(starts - 1 + step))
            pairs, residual = head.read(tokens, states)
            keys[:, tail + step], values[:, tail + step] = head.keys_values(pairs, rotation)
            mask[:, tail + step] = 0
            attended = torch.nn.functional.scaled_dot_product_attention(
                head.queries(pairs, rotation)[:, :, None],
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask[:, None, None],
                enable_gqa=True,
            )
            states = head.finish(attended[:, :, 0], residual)
            logits = torch.full((count, self._vocab_size), float("-inf"), device=self._device)
            logits[:, head.draft_ids] = head.draft_logits(states).float()
            found = choose_tokens(logits, params, (starts + 1 + step).tolist())
            for i, token in enumerate(found):
                if token is None:
                    sound[i] = False
                elif sound[i]:
                    guesses[i].append(token)
            tokens = self._index([token or 0 for token in found])
        return guesses

    def _context(self, segments: Sequence[Segment], room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy the KV of each segment's past, with ``room`` for as many guesses after it.

        Returns keys and values [n, positions + room, kv_heads, head_dim] and the mask [n, positions + room].
        """
        size, pool = self._pool.block_size, self._pool
        widths = [(segment.start - 1) // size + 1 for segment in segments]
        width = max(widths)
        table = np.zeros((len(segments), width), dtype=np.int64)
        for row, (segment, own) in enumerate(zip(segments, widths, strict=True)):
            table[row, :own] = segment.blocks[:own]
        index = self._index(table.reshape(-1))
        copies = []
        for slots in (pool.keys[0], pool.values[0]):
            shape = (len(segments), width * size, *slots.shape[1:])
            copy = slots.new_zeros(len(segments), width * size + room, *slots.shape[1:])
            copy[:, : width * size] = slots.view(-1, size, *slots.shape[1:])[index].view(shape)
            copies.append(copy)
        where = torch.arange(width * size + room, device=self._device)
        starts = self._index([segment.start for segment in segments])
        seen = (where[None] > 0) & (where[None] < starts[:, None])
        mask = torch.zeros(seen.shape, dtype=pool.tensor.dtype, device=self._device)
        return copies[0], copies[1], mask.masked_fill_(~seen, float("-inf"))

    def _index(self, numbers: Sequence[int] | Ints) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64), device=self._device)


def _batches(segments: Sequence[Segment], active: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield ``active`` in parts of similar length, the shortest first: none is padded to twice its length."""
    batch: list[int] = []
    for i in sorted(active, key=lambda i: segments[i].start):
        width = ceil_div(segments[i].start, size) * size
        shortest = segments[batch[0]].start if batch else 0
        if batch and (width * (len(batch) + 1) > GATHERED_TOKENS or width > max(2 * shortest, 256)):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
