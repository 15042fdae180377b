"""Peers: other systems under the same workloads, each in a process of its own, some in an environment of their own.

Nothing here is a dependency of warmpath. ``vllm_cpu`` runs under another environment's Python: it imports nothing of
warmpath but this package.
"""
