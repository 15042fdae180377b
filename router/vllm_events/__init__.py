"""vLLM's KV events: how they are read, put in order, followed, and told under our hashes."""
