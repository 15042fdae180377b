"""Answers whose replicas crash, compared with undisturbed ones."""
