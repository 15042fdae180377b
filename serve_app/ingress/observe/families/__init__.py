"""Every metric family that /metrics shows: name, kind, labels, and what it says to whoever looks at a dashboard."""
