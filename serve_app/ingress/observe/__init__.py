"""Observability of an ingress: metrics, cache state, explanations."""
