"""Which computed KV can be used again. Knows no torch, Ray or requests."""
