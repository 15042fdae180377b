"""LoRA adapters: files, weights, slots, layers."""
