"""Reasons of cache misses, in answers of a server and in files before a deploy."""
