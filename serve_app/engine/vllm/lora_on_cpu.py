"""vLLM's LoRA kernels for CPUs, mended: rows of the base model get nothing of an adapter. Runs in vLLM's worker.

Such rows have the index -1, which the kernels take for the last slot: a request without an adapter, beside one that has
one, silently gets the adapter of that slot, and leaves its KV in the cache. Goes when vLLM has it.
Source: https://github.com/vllm-project/vllm/pull/48421
"""

from __future__ import annotations

import torch


def spare_base_rows() -> None:
    """Let the first of the two kernels leave 0 in rows without an adapter, of which the second makes nothing."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor.masked_fill_((lora_indices_tensor == -1).unsqueeze(1), 0.0)

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
