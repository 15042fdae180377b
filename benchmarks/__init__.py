"""Benchmarks anyone can run: `python -m benchmarks.NAME --json FILE`."""
