"""A trace, a log or generated traffic, replayed over HTTP in an open loop."""
