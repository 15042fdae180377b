"""The engine: runs without Ray."""
