"""Traces of requests through all processes, in OpenTelemetry's form."""
