"""Checks for problems that would keep an instance from working, one form for all: what was found, and the remedy."""
