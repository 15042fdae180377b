"""What benchmarks share: clients, instances, traces, reports."""
