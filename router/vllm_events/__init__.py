"""vLLM's KV events: subscription, decoding, ordering, and translation to this project's hashes."""
