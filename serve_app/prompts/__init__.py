"""Registered public prompts."""
