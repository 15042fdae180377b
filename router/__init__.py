"""Cache-aware routing over tokens, hashes, replicas and their loads. Uses no torch, HTTP, text or secrets."""

__version__ = "0.2.0"
"""The version of every package in this repository."""
