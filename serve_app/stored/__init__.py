"""Stored responses of tenants, encrypted and bounded, in SQLite, Postgres or Redis. Uses no HTTP."""
