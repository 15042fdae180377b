"""Turns a validated request into token streams. Knows no HTTP, wire formats or engine internals."""
