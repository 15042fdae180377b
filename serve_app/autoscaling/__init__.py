"""Autoscaling of replicas: signals, a pure policy over them, and their integration in Serve's controller."""
