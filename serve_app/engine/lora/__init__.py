"""LoRA adapters: files, weights, slots, layers. Knows nothing of scheduling or runners."""
