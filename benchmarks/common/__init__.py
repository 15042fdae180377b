"""Shared parts of the benchmarks: clients, instances, traces, reports."""
