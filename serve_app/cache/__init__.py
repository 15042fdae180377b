"""The replica's block pool and prefix cache: runs without Ray."""
