"""Tenants and keys that operators change while the deployment runs, beside those of the settings."""
