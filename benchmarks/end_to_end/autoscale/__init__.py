"""Replicas that come, go and die on real Ray Serve, under replayed traffic."""
