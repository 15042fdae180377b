"""The memory-bandwidth limit of decoding: bytes a step has to read, over the bandwidth a plain copy reaches.

Owns both figures. Knows nothing of engines: a model, sizes and a device flow in.
"""

from __future__ import annotations

import time

import torch


def copy_bytes_per_s(device: torch.device, size_bytes: int, repeats: int = 10) -> float:
    """Return bytes read and written a second by copying ``size_bytes`` within the device's memory; the best run."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        _finish(device)
        started_s = time.perf_counter()
        target.copy_(source)
        _finish(device)
        best = min(best, time.perf_counter() - started_s)
    return 2 * size_bytes / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes_read(model: torch.nn.Module) -> int:
    """Return the bytes of weights that a decode step of a dense model reads: all but an input embedding of its own."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    output = model.get_output_embeddings().weight  # type: ignore[operator]
    total = sum(weight.nbytes for weight in model.parameters())
    return int(total if output is embedding else total - embedding.nbytes)


def decode_limit_tok_s(
    *, copy_bytes_per_s: float, weight_bytes: int, kv_bytes_per_token: float, rows: int, context_tokens: float
) -> float:
    """Return the tokens a second of ``rows`` sequences with ``context_tokens`` each, if a step only read memory."""
    step_bytes = weight_bytes + rows * context_tokens * kv_bytes_per_token
    return rows * copy_bytes_per_s / step_bytes
