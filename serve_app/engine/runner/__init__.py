"""A transformers model, one packed forward a step. Knows nothing of scheduling, requests or prefixes."""
