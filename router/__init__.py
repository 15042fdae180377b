"""Cache-aware routing: knows tokens, hashes, replicas and load; knows no torch and no HTTP."""
