"""Constraints on answers, token by token. Uses no HTTP, models or engines. Only this package imports llguidance."""
