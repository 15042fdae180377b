"""Recorded traffic once more: simulated in virtual time, or sent to a server."""
