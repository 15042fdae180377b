"""One engine's thread and the order of its work. Knows no tensors."""
