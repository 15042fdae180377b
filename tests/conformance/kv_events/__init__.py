"""Guarantees of an engine's KV events that a router relies on, checked on a recording or a live engine."""
