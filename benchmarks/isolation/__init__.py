"""Benchmarks of what one tenant can do to another."""
