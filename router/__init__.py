"""Cache-aware routing: tokens, hashes, replicas and how busy they are. Knows no torch, no HTTP, no text, no secrets."""
