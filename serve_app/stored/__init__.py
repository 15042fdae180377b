"""Responses that are kept for their tenants, encrypted and bounded, in SQLite, Postgres or Redis. Knows no HTTP."""
