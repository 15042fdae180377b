"""Exact, cached conversion between text and token ids. Uses no tenants and no requests."""
