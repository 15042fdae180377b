"""What a router may rely on in an engine's KV events, checked on a recording or on a live engine."""
