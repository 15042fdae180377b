"""The words and flags of ``warmpath``. Knows everything above it as one call each; no serving logic."""
