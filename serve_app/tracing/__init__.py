"""Traces of requests through all processes, with OpenTelemetry."""
