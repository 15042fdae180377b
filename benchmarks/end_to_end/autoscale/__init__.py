"""Replicas that come, go, die and are updated under traffic, and what its users notice of it."""
