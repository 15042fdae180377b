"""Registered prompts over HTTP: figures, and how a version takes another one's place without a cold request."""
