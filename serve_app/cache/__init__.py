"""The reusable computed KV. Uses no torch, Ray or requests."""
