"""One engine's thread and the order of its parts. Knows no tensors."""
