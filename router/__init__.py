"""Cache-aware routing: tokens, hashes, replicas and how busy they are. Knows no torch, no HTTP, no text, no secrets."""

__version__ = "0.2.0"
"""Of all that this repository makes."""
