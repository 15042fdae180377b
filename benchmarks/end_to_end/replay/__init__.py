"""Replays a trace, a log or generated traffic over HTTP in an open loop."""
