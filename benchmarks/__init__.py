"""The benchmarks: `python -m benchmarks NAME --json FILE`; without a name, it lists them."""
