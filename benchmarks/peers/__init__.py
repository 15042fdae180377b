"""Peers: other systems under the same workloads, each in a process of its own, some in an environment of their own.

Nothing here is a dependency of warmpath. A peer's file talks to its system only and imports nothing of warmpath but
this package, so that it also runs under another environment's Python.
"""
