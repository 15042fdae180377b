"""Traces of requests in OpenTelemetry's form: which part of a request's time went where, over all processes."""
