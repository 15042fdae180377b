"""Recorded traffic without its text: its file, what writes it, and what reads it."""
