"""Registered prompts over HTTP: their figures, and the replacement of a version without a cold request."""
