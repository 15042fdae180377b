"""Benchmarks of one engine in its own process."""
