"""Benchmarks of isolation between tenants."""
