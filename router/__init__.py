"""Cache-aware routing: knows tokens, hashes, replicas and load; knows no torch and no HTTP."""

from router.compiled import activate

is_compiled = activate(__path__)
"""Whether this process runs the compiled modules (see ``compiled``)."""
