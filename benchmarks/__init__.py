"""Benchmarks anyone can run: `python -m benchmarks NAME --json FILE`; without a name, the list of them."""
