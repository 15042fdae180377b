"""Benchmarks of routing decisions."""
