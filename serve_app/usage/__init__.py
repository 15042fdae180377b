"""Tenants' usage by day."""
