"""Benchmarks over HTTP against running instances."""
