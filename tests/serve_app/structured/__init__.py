"""Tests of ``serve_app.structured``."""
